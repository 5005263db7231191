"""One query over cached values, exact for any of them: no sum is so small, and no term so large, that a digit is lost.

    F = c + log(1 + sum_i p_i (e^{beta (f_i - c)} - 1)) / beta
    c = max(sum_i p_i f_i, max_i(f_i + log(p_i) / beta))

F is at least c, by Jensen's inequality and as a sum is at least each of its terms. So no p_i e^{..} exceeds 1, and the
sum of all is at least 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import may_look
from fem.ops.common.precision import SMALLEST_BETA, upcast
from fem.ops.common.read import Read

_BLOCK = 1 << 18  # values at a time on a CPU, so that their exponentials stay in the cache
_LIFT = 2.0**40  # p is scaled by it, so that terms which underflow are negligible even times the largest finite e


def one_query_read(
    q: Float[Tensor, "b h dk"],
    k: Float[Tensor, "b hkv t dk"],
    v: Float[Tensor, "b hkv t dv"],
    f: Float[Tensor, "b hkv t df"],
    beta: Float[Tensor, "hkv df"],
    mask: Float[Tensor, "#b #hq t"] | None,
    scale: float,
    shared: bool,
) -> Read:
    """The mean of v and the free energy of f, v itself if shared: (B, 1, H, .), in float32 at least, without gradients.

    mask is added to the scores; a row that sees no key reads 0.
    """
    batch, heads, _ = q.shape
    looks = may_look(q)
    q = upcast(q).unflatten(1, (k.shape[1], -1)) * scale
    # as a sum where it is fused: cuBLAS would want the cache in float32
    scores = q @ upcast(k).mT if looks else (q[..., None, :] * upcast(k)[:, :, None]).sum(-1)
    sees = None
    if mask is not None:
        mask = mask.expand(-1, heads, -1).unflatten(1, (k.shape[1], -1))
        scores = torch.where(mask == -torch.inf, mask, scores + mask)  # whatever a hidden key holds
        sees = scores.amax(-1, keepdim=True) > -torch.inf
        scores = scores.masked_fill(~sees, 0.0)
    log_p = scores.log_softmax(-1)
    p, v, f, beta = log_p.exp(), upcast(v), upcast(f), beta.to(log_p.dtype)[:, None]
    average = lambda x: p @ x if looks else (p[..., None] * x[:, :, None]).sum(3)  # noqa: E731
    mean = average(v)
    middle = mean if shared else average(f)
    free_energy = _by_blocks(log_p, f, middle, beta) if looks and f.shape[-1] else None
    if free_energy is None:
        free_energy = _above_largest_term(log_p, p, f, middle, beta)
    read = (x if sees is None else torch.where(sees, x, 0.0) for x in (mean, free_energy))
    return Read(*(x.reshape(batch, 1, heads, x.shape[-1]) for x in read))


def _above_largest_term(log_p, p, f, middle, beta) -> Float[Tensor, "b hkv g df"]:
    """By the equation above, which a compiler fuses into a few passes over the cache: it looks at no value."""
    log_p, p, f, middle, beta = log_p[..., None], p[..., None], f[:, :, None], middle[:, :, :, None], beta[:, None]
    beta = beta.as_strided(beta.shape, beta.stride())  # inductor stores it: else made per number of f
    shift = torch.maximum(middle, (f + log_p / beta).amax(3, keepdim=True))
    z = (f - shift) * beta
    more = torch.where(z < 1, p * z.expm1(), (log_p + z).exp() - p).sum(3, keepdim=True)
    return (shift + more.log1p() / beta)[:, :, :, 0]


def _by_blocks(log_p, f, middle, beta) -> Float[Tensor, "b hkv g df"] | None:
    """By log(1 + sum_i p_i (e^{beta (f_i - c)} - 1)), c the least mean, so that by Jensen's inequality the sum is at
    least 0; None where an exponential overflows or a beta is small. e - 1 takes half of expm1's time, and its rounding
    averages out, which that of sum_i p_i does not."""
    if beta.amin().item() < SMALLEST_BETA:
        return None
    root = (log_p * 0.5).exp_()
    p, shift, total = (root * _LIFT).mul_(root), middle.amin(2, keepdim=True), 0.0
    offset, room = -beta * shift, max(1, _BLOCK // (f.shape[0] * f.shape[1] * f.shape[3]))
    for weight, block in zip(p.split(room, -1), f.split(room, 2)):
        total = total + weight @ torch.addcmul(offset, block, beta).exp_().sub_(1)
    free_energy = shift + total.div_(_LIFT).log1p_().div_(beta)
    return free_energy if bool(free_energy.isfinite().all()) else None
