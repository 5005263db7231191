"""One token of a softmax read over a cache: no copy of the cache, and where it holds [v | e] no exponential of it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.packing import Packing
from fem.ops.common.precision import upcast
from fem.ops.common.read import Read
from fem.ops.softmax.cached import PROVEN, SMALL_BETA, proven, unpack
from fem.ops.softmax.scores import flash

_BLOCK = 1 << 18  # values at a time on a CPU, so that their exponentials stay in the cache
_LIFT = 2.0**40  # p is scaled by it, so that terms which underflow are negligible even times the largest finite e


def packed_step(q, keys, values, packing: Packing, mask: Tensor | None, scale: float) -> Read | None:
    """`softmax_step` over values [v | e] of `pack_to_be_proven`; None where R does not prove an entry.

    q (B, H, d_k), keys and values (B, H_kv, T, .), mask (#B, #H, T), beta and shift (B, H_kv, 1, d_f). Results are
    (B, H, d_v) and (B, H, d_f), without gradients.
    """
    batch, heads, width = q.shape
    kv_heads = keys.shape[1]
    q = q.view(batch, kv_heads, -1, width)
    if mask is not None:
        mask = mask.expand(batch, -1, -1)
        one = mask.shape[1] == 1
        mask = mask[:, :, None] if one else mask.expand(-1, heads, -1).unflatten(1, (kv_heads, -1))
    out = _attend(q, keys, values, mask, scale)
    channels = packing.shift.shape[-1]
    mean, total = out.split_with_sizes((out.shape[-1] - channels, channels), -1)
    if mask is None and packing.small is None:  # every row sees a key, so R = 0 proves nothing
        logarithm = total.log()
        if not torch.linalg.vector_norm(logarithm, math.inf).item() <= PROVEN:  # no e exceeds e^30, so no total does
            return None
        free_energy = torch.addcdiv(packing.shift, logarithm, packing.beta)
    elif bool(proven(total, packing.small).all()):
        free_energy = unpack(out, packing).free_energy
    else:
        return None
    fallbacks.count(total.numel(), 0)
    return Read(mean.reshape(batch, heads, mean.shape[-1]), free_energy.reshape(batch, heads, channels))


def _attend(q, keys, values, mask, scale) -> Float[Tensor, "b hkv g w"]:
    """p @ [v | e], in float32 at least; 0 where nothing is seen."""
    if q.is_cpu and keys.shape[-1] == values.shape[-1] and q.dtype == keys.dtype == values.dtype:
        mask = None if mask is None else mask.to(q.dtype)
        return upcast(flash(q, keys, values, False, mask, scale)[0])
    scores = (upcast(q) * scale) @ upcast(keys).mT
    scores = scores if mask is None else scores + mask
    peak = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weight = (scores - peak).exp_()
    return (weight @ upcast(values)) / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def softmax_step(q, keys, v, f, beta, mask, scale: float, shared: bool) -> Read | None:
    """The mean of v and the free energy of f (B, H_kv, T, .) for one query per head; beta (H_kv, d_f).

        mean_j = sum_i p_i v_ij        F_j = m_j + (1 / beta_j) log sum_i p_i e^{beta_j (f_ij - m_j)},
        m_j <= sum_i p_i f_ij;    shared: v is f.

    and, where a beta is small, log(1 + sum_i p_i (e^{..} - 1)), which keeps its digits.

    p: softmax of the scores plus `mask`. By Jensen's inequality F >= mean, so the sum is at least 1 and nothing small
    can be missed from it; where e is too large to be sure, None is returned. Results are (B, 1, H, .), in float32 at
    least. A row that sees no key reads 0. Without gradients.
    """
    batch, heads, width = q.shape
    kv_heads = keys.shape[1]
    q = upcast(q).view(batch, kv_heads, heads // kv_heads, width) * scale
    scores = q @ upcast(keys).mT
    if mask is not None:
        scores += mask.expand(batch, heads, -1).reshape(scores.shape)
    prior = _lifted_softmax(scores)
    mean = (prior @ upcast(v)).div_(_LIFT)
    per_head = lambda x: x.reshape(batch, 1, heads, x.shape[-1])  # noqa: E731
    if not f.shape[-1]:
        return Read(per_head(mean), per_head(mean[..., :0])) if bool(mean.isfinite().all()) else None
    of_f, f = mean if shared else (prior @ upcast(f)).div_(_LIFT), upcast(f)
    beta = beta[:, None].to(mean.dtype)
    seen = prior.amax(-1, keepdim=True) > 0
    # A row that sees no key has a mean of 0, which may be far below all values: their largest serves it as well.
    means = of_f if bool(seen.all()) else torch.where(seen, of_f, f.amax(2, keepdim=True))
    middle = means.amin(2, keepdim=True)
    small = bool((beta < SMALL_BETA).any())
    total = _energies(prior, f, middle, beta if small else beta * math.log2(math.e), small).div_(_LIFT)
    gain = (total.log1p_() if small else total.log_()).div_(beta)  # -inf where beta `middle` overflows
    free_energy = torch.where(seen, middle + gain, 0.0)
    if not (math.isfinite(free_energy.sum().item()) and math.isfinite(mean.sum().item())):
        return None
    fallbacks.count(free_energy.numel(), 0)
    return Read(per_head(mean), per_head(free_energy))


def traced_step(q, keys, v, f, beta, mask, scale: float, shared: bool) -> Read:
    """`softmax_step` for a compiler, which fuses it into a few passes over the cache: it looks at no value.

        F = c + log(1 + sum_i p_i (e^{beta (f_i - c)} - 1)) / beta
        c = max(sum_i p_i f_i, max_i(f_i + log(p_i) / beta))

    F is at least c, by Jensen's inequality and as a sum is at least each of its terms. So no p_i e^{..} exceeds 1, the
    sum of all is at least 1, and the result is exact for any values: no flag says where it is not.
    """
    heads, kv_heads, least = q.shape[1], keys.shape[1], torch.finfo(upcast(q).dtype).min
    per_head = lambda x: upcast(x)[:, :, None]  # noqa: E731
    q = upcast(q).unflatten(1, (kv_heads, -1))[..., None, :]
    scores = (q * per_head(keys)).sum(-1, keepdim=True) * scale  # a sum, as cuBLAS would want the cache in float32
    if mask is not None:
        scores = scores + mask.expand(-1, heads, -1).unflatten(1, (kv_heads, -1))[..., None]
    log_p = scores - scores.amax(3, keepdim=True).clamp_min(least)
    log_p = log_p - log_p.exp().sum(3, keepdim=True).clamp_min(1.0).log()
    beta = beta.to(log_p.dtype)
    beta = beta.as_strided(beta.shape, beta.stride())[:, None, None]  # inductor stores it: else made per number of f
    p, v, f = log_p.exp(), per_head(v), per_head(f)
    mean = (p * v).sum(3, keepdim=True)
    middle = mean if shared else (p * f).sum(3, keepdim=True)
    shift = torch.maximum(middle, (f + log_p / beta).amax(3, keepdim=True))
    z = (f - shift) * beta
    more = torch.where(z < 1, p * z.expm1(), (log_p + z).exp() - p).sum(3, keepdim=True)
    free_energy = shift + more.log1p() / beta
    return Read(*(x.reshape(x.shape[0], 1, heads, x.shape[-1]) for x in (mean, free_energy)))


def _lifted_softmax(scores: Float[Tensor, "b hkv g t"]) -> Float[Tensor, "b hkv g t"]:
    """2^40 p, from squares of e^{s / 2}; 0 in a row of -inf."""
    peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    root = (scores - peak).mul_(0.5).exp_()
    weight = (root * _LIFT).mul_(root)
    return weight.mul_(_LIFT / weight.sum(-1, keepdim=True).clamp_min_(1.0))


def _energies(
    prior: Float[Tensor, "b hkv g t"],
    f: Float[Tensor, "b hkv t df"],
    middle: Float[Tensor, "b hkv 1 df"],
    rate: Float[Tensor, "hkv 1 df"],
    small: bool,
) -> Float[Tensor, "b hkv g df"]:
    """sum_i p_i 2^(rate (f_i - middle)), or sum_i p_i (e^(rate (f_i - middle)) - 1) if small, by blocks of tokens."""
    total, offset = 0.0, -rate * middle
    room = f.shape[2] if f.is_cuda else max(1, _BLOCK // (f.shape[0] * f.shape[1] * f.shape[3]))
    for p, block in zip(prior.split(room, -1), f.split(room, 2)):
        z = (block - middle).mul_(rate).expm1_() if small else torch.addcmul(offset, block, rate).exp2_()
        total = total + p @ z
    return total
