"""Mean and free energy from one attention over [v | e], e exponentials of the values whose free energy is read.

    e = exp(beta (f - c))        [mean | R] = p @ [v | e]        F = c + log(R) / beta                    (Eq. 4)

With gradients by hand, as one differentiable operator; what R does not prove, `exact` computes again.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.operator import again_differentiable, operator
from fem.ops.common.precision import LEAST_PROVEN, compute_dtype, without_autocast
from fem.ops.common.read import Read
from fem.ops.softmax.attend import attend, attend_backward
from fem.ops.softmax.exact import definition, exact_where
from fem.ops.softmax.packing import Packing
from fem.ops.softmax.support import Support

BAND = 256  # queries that share a shift: few enough that a window of as many keys is most of what they see
_LARGE_SCORE = 256.0  # nats: float32 rounds it to 3e-5 of a weight, which a gradient is a difference of


def free_energy_read(q, k, v, f, beta: Float[Tensor, "hkv df"], support: Support, by_flash: bool) -> Read:
    """The mean of v and the free energy of f, in float32 at least; shapes as in `softmax_read`."""
    mean, free_energy, doubt = _Read.apply(q, k, v, None if f is v else f, beta, *support, by_flash)
    return Read(mean, exact_where(doubt, free_energy, q, k, f, beta, support))


class _Read(torch.autograd.Function):
    """f: None where it is v, as dynamo takes no tensor twice; their gradients are then added in one pass."""

    @staticmethod
    def forward(ctx, q, k, v, f, beta, causal, scale, keep, first, end, bias, by_flash):
        ctx.set_materialize_grads(False)
        inputs = q, k, v, f, beta, causal, scale, keep, first, end, bias, by_flash
        out, free_energy, lse, doubt = _read_forward(*inputs)
        ctx.save_for_backward(q, k, v, f, beta, bias, keep, first, end, out, lse)
        ctx.options = causal, scale, by_flash
        ctx.mark_non_differentiable(doubt)
        return out[..., : v.shape[3]], free_energy, doubt

    @staticmethod
    def backward(ctx, grad_mean, grad_free, _):
        """First derivatives by the operator, further ones by the definition."""
        *inputs, keep, first, end, out, lse = ctx.saved_tensors
        causal, scale, by_flash = ctx.options
        if torch.is_grad_enabled():

            def read(q, k, v, f, beta, bias):
                return definition(q, k, v, v if f is None else f, beta, Support(causal, scale, keep, first, end, bias))

            *gradients, dbias = again_differentiable(read, inputs, (grad_mean, grad_free))
            return *gradients, *[None] * 5, dbias, None
        *tensors, bias = inputs
        start, channels, with_bias = tensors[2].shape[3], tensors[4].shape[1], ctx.needs_input_grad[10]
        grads = [
            out.new_zeros(*out.shape[:3], width) if grad is None else grad
            for grad, width in ((grad_mean, start), (grad_free, channels))
        ]
        rules = causal, scale, keep, first, end, bias, by_flash
        dq, dk, dvalues, dbeta, dbias = _read_backward(*grads, *tensors, *rules, out, lse, with_bias)
        dv, df = dvalues[..., :start], dvalues[..., start : start + channels]
        dv, df = (dv + df, None) if tensors[3] is None else (dv, df)
        return dq, dk, dv, df, dbeta, *[None] * 5, dbias if with_bias else None, None


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? f, Tensor beta, bool causal, float scale, Tensor? keep, Tensor? first, "
    "Tensor? end, Tensor? bias, bool by_flash"
)


@operator(f"softmax_read({_CALL}) -> (Tensor out, Tensor free_energy, Tensor lse, Tensor doubt)")
def _read_forward(q, k, v, f, beta, *rules):
    """[mean | R | zeros], with 1 for an R that is not read; F; lse; and which F are not proven, which are c."""
    *support, by_flash = rules
    with without_autocast(q.device):
        return _forward_in(compute_dtype(q), q, k, v, f, beta, Support(*support), by_flash)


@_read_forward.register_fake
def _(q, k, v, f, beta, *rules):
    channels = beta.shape[1]
    width = max(v.shape[3] + channels, q.shape[3])
    out, free_energy = (q.new_empty(*q.shape[:3], n, dtype=compute_dtype(q)) for n in (width, channels))
    lse = out.new_empty(q.shape[:3])
    return out, free_energy, lse, out.new_empty(free_energy.shape, dtype=torch.bool)


@operator(
    f"softmax_read_backward(Tensor grad_mean, Tensor grad_free, {_CALL}, Tensor out, Tensor lse, bool with_bias) "
    "-> (Tensor dq, Tensor dk, Tensor dvalues, Tensor dbeta, Tensor dbias)"
)
def _read_backward(grad_mean, grad_free, q, k, v, f, beta, *rest):
    *support, by_flash, out, lse, with_bias = rest
    support, dtype = Support(*support), out.dtype
    with without_autocast(q.device):
        if dtype == torch.float32 and q.device.type != "mps" and _large(lse):
            dtype = torch.float64
            out, _, lse, _ = _forward_in(dtype, q, k, v, f, beta, support, by_flash)
        tensors = grad_mean, grad_free, q, k, v, f, beta
        *gradients, dbias = _backward_in(dtype, *tensors, support, by_flash, out, lse, with_bias)
    dbias = out.new_empty(0) if dbias is None else dbias.to(support.bias.dtype)
    return *(x.to(like.dtype).contiguous() for x, like in zip(gradients, (q, k, v, beta))), dbias


@_read_backward.register_fake
def _(grad_mean, grad_free, q, k, v, f, beta, causal, scale, keep, first, end, bias, by_flash, out, lse, with_bias):
    dvalues = v.new_empty(*v.shape[:3], out.shape[3])
    dbias = bias.new_empty(bias.shape) if with_bias else out.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), dvalues, beta.new_empty(beta.shape), dbias


def _packed(v, f, beta, width: int) -> tuple[Float[Tensor, "b t hkv w"], Packing]:
    """[v | e | zeros], as wide as q at least, which flash attention wants, and how e was made of f.

    f is copied for its minimum and maximum, which take six times as long over a slice of a head's channels.
    """
    packing = Packing.of(f.contiguous(), beta)
    e = packing.energies((f - packing.shift).mul_(beta))
    return _joined(v, e, width), packing


def _joined(one: Float[Tensor, "b t h dv"], other: Float[Tensor, "b t h df"], width: int) -> Float[Tensor, "b t h w"]:
    """[one | other | zeros], of that width at least; copies take 2/3 of torch.cat's time."""
    start, stop = one.shape[3], one.shape[3] + other.shape[3]
    both = one.new_empty(*one.shape[:3], max(stop, width))
    both[..., :start], both[..., start:stop], both[..., stop:] = one, other, 0.0
    return both


def _forward_in(dtype, q, k, v, f, beta, support: Support, by_flash: bool) -> tuple[Tensor, ...]:
    q, k, v, f, beta = _cast(dtype, q, k, v, f, beta)
    bands = [
        _band_forward(q[:, rows], k[:, keys], v[:, keys], f[:, keys], beta, inside, by_flash)
        for rows, keys, inside in support.bands(q.shape[1], k.shape[1], BAND)
    ]
    return bands[0] if len(bands) == 1 else tuple(torch.cat(parts, 1) for parts in zip(*bands))


def _band_forward(q, k, v, f, beta, support: Support, by_flash: bool) -> tuple[Tensor, ...]:
    """What `_read_forward` returns, of queries that share a shift."""
    values, packing = _packed(v, f, beta, q.shape[3])
    out, lse = attend(q, k, values, support, by_flash)
    packing, at = packing.per_query_head(q.shape[2]), slice(v.shape[3], v.shape[3] + f.shape[3])
    total, sees = out[..., at].contiguous(), _sees(lse, support)
    if sees is None and total.numel() and total.amin().item() >= LEAST_PROVEN[total.dtype]:
        doubt = torch.zeros(total.shape, dtype=torch.bool, device=total.device)  # in an eighth of the time
    else:
        doubt = packing.doubtful(total)
        total.masked_fill_(doubt if sees is None else doubt | ~sees, 1.0)
        out[..., at] = total
    free_energy = packing.logarithm(total).div_(packing.beta).add_(packing.shift)
    if sees is not None:
        free_energy, doubt = free_energy.masked_fill_(~sees, 0.0), doubt & sees
    return out, free_energy, lse, doubt


def _backward_in(dtype, grad_mean, grad_free, q, k, v, f, beta, support: Support, by_flash, out, lse, with_bias):
    """Gradients of q, k, [v | f], beta and the bias."""
    q, k, v, f, beta = _cast(dtype, q, k, v, f, beta)
    queries = grad_mean.to(dtype), grad_free.to(dtype), q, out, lse
    if support.first is None:
        return _band_backward(*queries, k, v, f, beta, support, by_flash, with_bias)
    dq, dk, dbeta = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(beta[0, 0])
    dvalues, dbias = k.new_zeros(*k.shape[:3], out.shape[3]), torch.zeros_like(support.bias) if with_bias else None
    for rows, keys, inside in support.bands(q.shape[1], k.shape[1], BAND):
        tensors = *(x[:, rows] for x in queries), *(x[:, keys] for x in (k, v, f))
        band = _band_backward(*tensors, beta, inside, by_flash, with_bias)
        parts = dq[:, rows], dk[:, keys], dvalues[:, keys], dbeta, Support.bias_at(dbias, rows, keys)
        for total, part in zip(parts, band):
            if total is not None:
                total += part
    return dq, dk, dvalues, dbeta, dbias


def _band_backward(grad_mean, grad_free, q, out, lse, k, v, f, beta, support: Support, by_flash, with_bias):
    """Gradients of a band. [v | e] is made again: memory is fullest while attention's own gradients are.

        dR = dF / (beta R)        de = p^T dR        df = beta e de        dv = p^T dmean
        dbeta = sum_i e de (f - m) - sum_t dF (F - m) / beta

    for any m; the mean of the free energies as m keeps most digits.
    """
    values, packing = _packed(v, f, beta, q.shape[3])
    at, shared = slice(v.shape[3], v.shape[3] + f.shape[3]), (k.shape[2], q.shape[2] // k.shape[2])
    by_head, sees = packing.per_query_head(q.shape[2]), _sees(lse, support)
    total = out[..., at].contiguous()
    g, below = grad_free / by_head.beta, by_head.logarithm(total).div_(by_head.beta)
    if sees is not None:
        grad_mean, g, below = (torch.where(sees, x, 0.0) for x in (grad_mean, g, below))
    middle = below.mean(1, keepdim=True).unflatten(2, shared).mean(3)
    below.unflatten(2, shared).sub_(middle[:, :, :, None])
    dbeta = -below.mul_(g).sum((0, 1)).unflatten(0, shared).sum(1)
    grad = _joined(grad_mean, g.div_(by_head.slope(total)), out.shape[3])
    del g, below, total
    dq, dk, dvalues, dbias = attend_backward(grad, q, k, values, out, lse, support, by_flash, with_bias)
    del grad
    dz = dvalues[..., at].mul_(packing.slope(values[..., at]))
    dbeta += (f - packing.shift).sub_(middle).mul_(dz).sum((0, 1))
    dz.mul_(beta)
    return dq, dk, dvalues, dbeta, dbias


def _cast(dtype, q, k, v, f, beta) -> tuple[Tensor, ...]:
    v = v.to(dtype)
    return q.to(dtype), k.to(dtype), v, v if f is None else f.to(dtype), beta.to(dtype)[None, None]


def _large(lse: Float[Tensor, "b tq h"]) -> bool:
    """Whether scores are so large that float32 costs their gradients digits."""
    return bool(lse.masked_fill(lse.isneginf(), 0.0).abs().amax() > _LARGE_SCORE)


def _sees(lse: Float[Tensor, "b tq h"], support: Support) -> Bool[Tensor, "b tq h 1"] | None:
    """Which rows see a key; None: all do."""
    return (lse > -torch.inf)[..., None] if support.restricted else None
