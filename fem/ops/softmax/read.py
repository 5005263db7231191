"""The softmax read: mean and free energy of the values under a softmax prior, as one differentiable op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import softmax_backend
from fem.ops.common.fallback_count import suspects
from fem.ops.common.read import Read
from fem.ops.common.tokens import Tokens
from fem.ops.softmax import flex as softmax_composed
from fem.ops.softmax.choice import fastest_backend
from fem.ops.softmax.decode import softmax_step
from fem.ops.softmax.naive import naive_softmax_read
from fem.ops.softmax.plain import FreeEnergyRead
from fem.ops.softmax.scores import Scores
from fem.ops.softmax.support import intervals

_FEW_SCORES = 700  # of a head: little to compute, and of one or two likely keys a gradient is all rounding error


def softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"] | None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    tokens: Tokens | None = None,
    backend: str = "auto",
) -> Read:
    """Mean and free energy of the values under a softmax prior.

        p_ti = softmax_i(scale q_t . k_i + bias_ti)        mean_tj = sum_i p_ti v_ij
        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j v_ij)                        (Eq. 4, Appendix H.1)

    `tokens` describe the T keys; with causal, a window or documents the T_q queries are the last of them. Query head h
    reads key head h // (H / H_kv). The dtype of q, k and v together is that of both results, under autocast too; sums
    run in float32 at least. Arguments are checked in `fem.functional`; raises ValueError on an unknown backend.
    """
    backend = softmax_backend(backend, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    if backend == "reference":
        keep, document = (None, None) if tokens is None else (tokens.keep, tokens.document)
        read = naive_softmax_read(q, k, v, beta, causal, scale, window, bias, keep, document)
        return Read(read.mean.to(dtype), None if beta is None else read.free_energy.to(dtype))
    queries, time = q.shape[1], k.shape[1]
    if q.shape[0] * queries == 0:
        nothing = v.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        return Read(nothing, None if beta is None else nothing)
    if backend == "auto":
        how = {"causal": causal, "scale": scale, "window": window, "bias": None if bias is None else bias.detach()}
        backend = fastest_backend(softmax_read, q, k, v, beta, tokens, **how)
    if q.numel() and v.numel():
        if backend == "triton" and beta is not None:
            return _triton_read(q, k, v, beta, causal, scale, window, bias, tokens, dtype)
        if backend == "sdpa" and q.device.type == "cuda":
            return _composed_read(q, k, v, beta, causal, scale, window, bias, tokens, dtype)
    allowed = _allowed(queries, time, causal, window, tokens, q.device)
    mask = _mask(allowed, bias, time, _compute_dtype(dtype))
    if queries == 1 and backend == "sdpa":
        read = _step(q, [k.transpose(1, 2)], [v.transpose(1, 2)], beta, mask, scale)
        if read is not None:
            return read
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    mean, free_energy = _Read.apply(q, k, v, beta, mask, causal and queries == time, scale, backend == "sdpa")
    return Read(mean.to(dtype), None if beta is None else free_energy.to(dtype))


def cached_read(
    q: Float[Tensor, "b tq h dk"],
    keys: Sequence[Float[Tensor, "b hkv _t dk"]],
    values: Sequence[Float[Tensor, "b hkv _t dv"]],
    beta: Float[Tensor, "hkv dv"] | None,
    *,
    window: int | None = None,
    tokens: Tokens | None = None,
    backend: str = "auto",
) -> Read:
    """`softmax_read` of the last tokens over a cache: keys and values with the heads first, in pieces, oldest first."""
    time = sum(piece.shape[2] for piece in keys)
    if q.shape[1] == 1 and softmax_backend(backend, q.device) in ("sdpa", "auto"):
        mask = _mask(_allowed(1, time, True, window, tokens, q.device), None, time, _compute_dtype(q.dtype))
        read = _step(q, keys, values, beta, mask, q.shape[-1] ** -0.5)
        if read is not None:
            return read
    k, v = (torch.cat(tuple(x), 2).transpose(1, 2) for x in (keys, values))
    return softmax_read(q, k, v, beta, window=window, tokens=tokens, backend=backend)


def _step(q, keys, values, beta, mask, scale) -> Read | None:
    """The read of one token where nobody asks for gradients; None: it has to be read otherwise."""
    tensors = [x for x in (q, *keys, *values, beta, mask) if x is not None]
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return None
    read = softmax_step(q[:, 0], keys, values, beta, None if mask is None else mask[:, :, 0], scale)
    dtype = torch.promote_types(q.dtype, torch.promote_types(keys[0].dtype, values[0].dtype))
    return None if read is None else Read(*(None if x is None else x.to(dtype) for x in read))


def _triton_read(q, k, v, beta, causal, scale, window, bias, tokens, dtype) -> Read:
    from fem.ops.softmax.kernels import launch as softmax_triton

    seen, bias = intervals(q.shape[1], k.shape[1], causal, window, tokens, q.device), _of_pairs(bias)
    read = softmax_triton.softmax_read(q.to(dtype), k.to(dtype), v.to(dtype), beta, seen, bias, scale)
    return Read(read.mean.to(dtype), read.free_energy.to(dtype))


def _composed_read(q, k, v, beta, causal, scale, window, bias, tokens, dtype) -> Read:
    queries, time = q.shape[1], k.shape[1]
    seen = intervals(queries, time, causal, window, tokens, q.device)
    marked = tokens is not None and (tokens.keep is not None or tokens.document is not None)
    by_blocks = marked or window is not None or bias is not None or (causal and 1 < queries < time)
    plainly = None if by_blocks else causal and queries > 1
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    read = softmax_composed.softmax_read(q, k, v, beta, seen, _of_pairs(bias), scale, plainly)
    return Read(*(None if x is None else x.to(dtype) for x in read))


def _of_pairs(bias: Tensor | None) -> Float[Tensor, "#b #h #tq #t"] | None:
    return None if bias is None else bias[(None,) * (4 - bias.dim())]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _allowed(
    queries: int, time: int, causal: bool, window: int | None, tokens: Tokens | None, device: torch.device
) -> Bool[Tensor, "#b 1 #tq t"] | None:
    """Which keys a query may see, apart from i <= t where there are as many queries as keys; None: all."""
    index = torch.arange(time, device=device)
    of_key = lambda of: of.expand(1, -1)[:, None, None] if of.dim() == 1 else of[:, None, None]  # noqa: E731
    of_query = lambda of: of_key(of)[..., time - queries :].transpose(-1, -2)  # noqa: E731
    rules = []
    if causal and 1 < queries < time:
        rules.append(of_key(index) <= of_query(index))
    if tokens is not None and tokens.keep is not None:
        rules.append(of_key(tokens.keep))
    if tokens is not None and tokens.document is not None:
        rules.append(of_key(tokens.document) == of_query(tokens.document))
    if window is not None:
        position = index if tokens is None or tokens.position is None else tokens.position
        rules.append((of_key(position) - of_query(position)).abs() < window)
    if not rules:
        return None
    allowed = rules[0]
    for rule in rules[1:]:
        allowed = allowed & rule
    return allowed


def _mask(
    allowed: Tensor | None, bias: Tensor | None, time: int, dtype: torch.dtype
) -> Float[Tensor, "#b #h #tq t"] | None:
    """What is added to the scores: the bias, -inf where a key is not allowed; None: nothing."""
    if bias is not None:
        bias = _of_pairs(bias.to(dtype))
        bias = bias.expand(*bias.shape[:3], time)
    if allowed is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, bias, -torch.inf)


# The op, in eager and compiled graphs, in float32 or better.


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, mask, *how):
        out, free_energy, *memory = _forward(q, k, v, beta, mask, *how)
        ctx.save_for_backward(q, k, beta, mask, out, *memory)
        ctx.how = how
        return out[..., : v.shape[3]], free_energy

    @staticmethod
    def backward(ctx, grad_mean, grad_free_energy):
        of_beta, of_mask = ctx.needs_input_grad[3:5]
        dq, dk, dv, dbeta, dmask = _backward(grad_mean, grad_free_energy, *ctx.saved_tensors, *ctx.how, of_mask)
        return dq, dk, dv, dbeta if of_beta else None, dmask if of_mask else None, None, None, None


@torch.library.custom_op(
    "fem::softmax_read",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? mask, bool causal, float scale, bool flash) -> "
    "(Tensor out, Tensor free_energy, Tensor lse, Tensor values, Tensor shift, Tensor span)",
)
def _forward(q, k, v, beta, mask, causal, scale, flash):
    """[mean | R | zeros], F, and what the backward needs besides; with beta=None the mean alone."""
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k, mask, causal, scale, flash)
        values = _per_query_head(q, v, 2).to(scores.q.dtype)
        if beta is None:
            values = scores.padded(values)
            out, lse = scores.attend(values)
            return out, out.new_empty(0), lse, values, out.new_empty(0), out.new_empty(0)
        read = FreeEnergyRead.of(scores, values, _per_query_head(q, beta, 0).to(values.dtype)[None, None])
        out, free_energy, lse, recomputed = read.forward()
        suspects.count(free_energy.numel(), recomputed)
        return out, free_energy, lse, read.values, read.shift, read.span


@_forward.register_fake
def _(q, k, v, beta, mask, causal, scale, flash):
    (batch, queries, heads, width), channels = q.shape, v.shape[3]
    read = 1 if beta is None else 2
    width = max(read * channels, width) if flash else read * channels
    empty = lambda *shape: q.new_empty(shape, dtype=_compute_dtype(q.dtype))  # noqa: E731
    out, lse, values = (
        empty(batch, queries, heads, width),
        empty(batch, queries, heads),
        empty(batch, k.shape[1], heads, width),
    )
    if beta is None:
        return out, empty(0), lse, values, empty(0), empty(0)
    per_channel = (batch, 1, heads, channels)
    return out, empty(batch, queries, heads, channels), lse, values, empty(*per_channel), empty(*per_channel)


@torch.library.custom_op(
    "fem::softmax_read_backward",
    mutates_args=(),
    schema="(Tensor grad_mean, Tensor grad_free_energy, Tensor q, Tensor k, Tensor? beta, Tensor? mask, Tensor out, "
    "Tensor lse, Tensor values, Tensor shift, Tensor span, bool causal, float scale, bool flash, bool of_mask) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dmask)",
)
def _backward(
    grad_mean, grad_free_energy, q, k, beta, mask, out, lse, values, shift, span, causal, scale, flash, of_mask
):
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k, mask, causal, scale, flash)
        if beta is None:
            grad = scores.padded(grad_mean)
            dq, dk, dv, ds = scores.attend_backward(grad, values, out, lse, of_mask)
            dv, dbeta = dv[..., : grad_mean.shape[3]], out.new_empty(0)
        else:
            read = FreeEnergyRead(scores, values, _per_query_head(q, beta, 0).to(values.dtype)[None, None], shift, span)
            if q.shape[1] * k.shape[1] <= _FEW_SCORES:
                read = read.in_float64()
                out, _, lse, _ = read.forward()
            dq, dk, dv, dbeta, ds = read.backward(grad_mean, grad_free_energy, out, lse, of_mask)
            dbeta = dbeta[0, 0].unflatten(0, (len(beta), -1)).sum(1).to(beta.dtype)
        if q.shape[2] > k.shape[2]:
            dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
        dmask = ds.sum_to_size(mask.shape).to(mask.dtype) if of_mask else out.new_empty(0)
        return *(x.to(q.dtype).contiguous() for x in (dq, dk, dv)), dbeta, dmask


@_backward.register_fake
def _(grad_mean, grad_free_energy, q, k, beta, mask, out, lse, values, shift, span, causal, scale, flash, of_mask):
    whole = lambda x: x.new_empty(x.shape)  # noqa: E731
    dv = k.new_empty(*k.shape[:3], grad_mean.shape[3])
    dbeta = out.new_empty(0) if beta is None else whole(beta)
    return whole(q), whole(k), dv, dbeta, whole(mask) if of_mask else out.new_empty(0)


def _scores(q, k, mask, causal, scale, flash) -> Scores:
    dtype = _compute_dtype(q.dtype)
    return Scores(q.to(dtype), _per_query_head(q, k, 2).to(dtype), mask, causal, scale, flash)


def _per_query_head(q: Tensor, x: Tensor, dim: int) -> Tensor:
    groups = q.shape[2] // x.shape[dim]
    return x.repeat_interleave(groups, dim) if groups > 1 else x
