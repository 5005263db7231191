"""The softmax read by our kernels: what they are launched on, and the entries that they cannot prove."""

from __future__ import annotations

import math

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from fem.kernels import softmax_backward, softmax_forward, softmax_values
from fem.kernels.softmax_blocks import FORWARD, KEY_GRADIENTS, QUERY_GRADIENTS, ROWS, WIDEST, blocks_for
from fem.ops import softmax_entries
from fem.ops.backend import triton_interprets
from fem.ops.intervals import Intervals
from fem.ops.read import Read
from fem.ops.softmax_scores import Scores
from fem.ops.suspects import suspects

_PROVEN = math.exp(-60.0)


def softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"],
    intervals: Intervals,
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    scale: float,
) -> Read:
    """Mean and free energy of the values under a softmax prior, by Triton kernels.

        p_ti = softmax_i(scale q_t . k_i + bias_ti) over the interval of t        mean_tj = sum_i p_ti v_ij
        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j v_ij)                       (Eq. 4, Appendix H.1)

    q, k, v in one dtype: bfloat16 is read as it is, float32 and float16 in float32, and so are the results. Every sum
    runs in float32, and gradients repeat bit by bit. Raises ValueError on float64, on scale <= 0, and on heads wider
    than 256, [v | E] included.
    """
    if q.dtype == torch.float64:
        raise ValueError("backend='triton' computes in float32, got float64 inputs; use backend='auto'.")
    if scale <= 0:
        raise ValueError(f"backend='triton' needs scale > 0, got {scale}; use backend='auto'.")
    if max(q.shape[-1], 2 * v.shape[-1]) > WIDEST:
        raise ValueError(
            f"backend='triton' reads key widths up to {WIDEST} and value widths up to {WIDEST // 2}, got "
            f"{q.shape[-1]} and {v.shape[-1]}; use backend='auto'."
        )
    dtype = torch.bfloat16 if q.dtype == torch.bfloat16 and not triton_interprets() else torch.float32
    first, end, kept, order = intervals
    if order is not None:
        k, v = (x.take_along_dim(order[:, :, None, None], 1) for x in (k, v))
        if bias is not None and bias.shape[3] > 1:
            bias = bias.take_along_dim(order[:, None, None], 3)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    if bias is not None and bias.dtype != dtype:
        bias = bias.float()
    mean, free_energy, *_ = _forward(q, k, v, beta, kept, bias, first, end, scale)
    return Read(mean, free_energy)


@torch.library.custom_op(
    "fem::softmax_read_triton",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? kept, Tensor? bias, Tensor first, Tensor end, "
    "float scale) -> (Tensor mean, Tensor free_energy, Tensor total, Tensor values, Tensor channels, Tensor peaks, "
    "Tensor weights)",
)
def _forward(q, k, v, beta, kept, bias, first, end, scale):
    """mean, F, and what the backward needs besides: R, [v | E], the table of channels, M and l."""
    (batch, queries, heads, dk), (_, keys, key_heads, dv) = q.shape, v.shape
    mean, free_energy, total, values, channels, peaks, weights = _outputs(q, k, v, beta, kept, bias, first, end, scale)
    half = values.shape[-1] // 2
    grid = (triton.cdiv(keys, ROWS), key_heads, batch)
    low, high = q.new_empty(2, batch, grid[0], key_heads, dv, dtype=torch.float32)
    rows = {"WIDTH": dv, "PADDED": half, "BLOCK": ROWS}
    softmax_values.value_bounds[grid](v, kept, low, high, keys, key_heads * dv, **rows)
    channels.copy_(_channels(beta, low.amin(1), high.amax(1), half))
    softmax_values.values_and_exponentials[grid](v, kept, channels, values, keys, key_heads * dv, **rows)

    width = _padded(dk)
    blocks = blocks_for(FORWARD, *_shape(q, half, bias))
    softmax_forward.read_forward[(triton.cdiv(queries, blocks.queries), heads, batch)](
        q, k, values, bias, first, end, channels, mean, free_energy, total, peaks, weights,
        queries, keys, heads, heads // key_heads, *_strides(q, first, bias), scale * math.log2(math.e), 1 / scale,
        DK=dk, D=width, DV=dv, HALF=half, **blocks.launch(),
    )  # fmt: skip
    entries = _unproven(total, channels, weights)
    if len(entries):
        batch, head, row, channel = entries.unbind(1)
        again = softmax_entries.free_energies(*_definition(q, k, v, beta, bias, first, end, scale), entries)
        free_energy[batch, row, head, channel] = again.to(free_energy.dtype)
    suspects.count(free_energy.numel(), len(entries))
    return mean, free_energy, total, values, channels, peaks, weights


@_forward.register_fake
def _outputs(q, k, v, beta, kept, bias, first, end, scale):
    (batch, queries, heads, _), (_, keys, key_heads, dv) = q.shape, v.shape
    half = _padded(dv)
    full = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    return (
        q.new_empty(batch, queries, heads, dv),
        q.new_empty(batch, queries, heads, dv),
        full(batch, queries, heads, dv),
        q.new_empty(batch, keys, key_heads, 2 * half),
        full(batch, key_heads, 3, half),
        full(batch, heads, queries),
        full(batch, heads, queries),
    )


@torch.library.custom_op(
    "fem::softmax_read_triton_backward",
    mutates_args=(),
    schema="(Tensor grad_mean, Tensor grad_free_energy, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? kept, "
    "Tensor? bias, Tensor first, Tensor end, Tensor mean, Tensor total, Tensor values, Tensor channels, Tensor peaks, "
    "Tensor weights, float scale, bool of_bias) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dbias)",
)
def _backward(
    grad_mean, grad_free_energy, q, k, v, beta, kept, bias, first, end, mean, total, values, channels, peaks, weights,
    scale, of_bias,
):  # fmt: skip
    (batch, queries, heads, dk), (_, keys, key_heads, dv) = q.shape, v.shape
    half, width, groups = values.shape[-1] // 2, _padded(dk), heads // key_heads
    full = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    g, delta = values.new_empty(batch, queries, heads, 2 * half), torch.empty_like(weights)
    grid = (triton.cdiv(queries, ROWS), heads, batch)
    of_rows = full(batch, grid[0], heads, half)
    softmax_backward.row_gradients[grid](
        grad_mean.contiguous(), grad_free_energy.contiguous(), mean, total, weights, channels, g, delta, of_rows,
        queries, heads, groups, _PROVEN, DV=dv, HALF=half, BLOCK=ROWS,
    )  # fmt: skip

    strides, scales = _strides(q, first, bias), (scale * math.log2(math.e), 1 / scale, scale)
    blocks = blocks_for(KEY_GRADIENTS, *_shape(q, half, bias))
    grid = (triton.cdiv(keys, blocks.keys), key_heads, batch)
    row_blocks = Intervals(first, end).rows_of_key_blocks(keys, blocks.keys, blocks.queries)
    of_keys = full(batch, grid[0], key_heads, half)
    dq, dk_, dv_ = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    softmax_backward.key_gradients[grid](
        q, k, values, g, bias, first, end, row_blocks, channels, peaks, delta, dk_, dv_, of_keys,
        queries, keys, heads, groups, *strides, *scales, DK=dk, D=width, DV=dv, HALF=half, **blocks.launch(),
    )  # fmt: skip

    blocks = blocks_for(QUERY_GRADIENTS, *_shape(q, half, bias))
    ds = full(batch, heads, queries, keys).zero_() if of_bias else None
    softmax_backward.query_gradients[(triton.cdiv(queries, blocks.queries), heads, batch)](
        q, k, values, g, bias, first, end, peaks, delta, dq, ds,
        queries, keys, heads, groups, *strides, *scales, DK=dk, D=width, HALF=half, **blocks.launch(),
    )  # fmt: skip

    dbeta = of_keys.sum((0, 1)) + of_rows.sum((0, 1)).unflatten(0, (key_heads, groups)).sum(1)
    dbeta = dbeta[:, :dv]
    entries = _unproven(total, channels, weights)
    if len(entries):
        b, head, row, channel = entries.unbind(1)
        scores, *definition = _definition(q, k, v, beta, bias, first, end, scale)
        more = [torch.zeros_like(x) for x in (scores.q, scores.k, *definition)]
        softmax_entries.add_gradients(scores, *definition, entries, grad_free_energy[b, row, head, channel], *more, ds)
        of_group = lambda x, dim: x.unflatten(dim, (key_heads, groups)).sum(dim + 1)  # noqa: E731
        dq, dbeta = (dq + more[0]).to(q.dtype), dbeta + of_group(more[3][0, 0], 0)
        dk_, dv_ = ((x + of_group(y, 2)).to(x.dtype) for x, y in ((dk_, more[1]), (dv_, more[2])))
    return dq, dk_, dv_, dbeta.to(beta.dtype), ds.sum_to_size(bias.shape).to(bias.dtype) if of_bias else full(0)


@_backward.register_fake
def _(
    grad_mean, grad_free_energy, q, k, v, beta, kept, bias, first, end, mean, total, values, channels, peaks, weights,
    scale, of_bias,
):  # fmt: skip
    whole = lambda x: x.new_empty(x.shape)  # noqa: E731
    return whole(q), whole(k), whole(v), whole(beta), whole(bias) if of_bias else total.new_empty(0)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    mean, _, *memory = output
    ctx.save_for_backward(*tensors, mean, *memory)
    ctx.mark_non_differentiable(*memory)


def _gradients(ctx, grad_mean, grad_free_energy, *_):
    of_beta, of_bias = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    saved = ctx.saved_tensors
    grads = (torch.zeros_like(saved[8]) if x is None else x for x in (grad_mean, grad_free_energy))
    dq, dk, dv, dbeta, dbias = _backward(*grads, *saved, ctx.scale, of_bias)
    return dq, dk, dv, dbeta if of_beta else None, None, dbias if of_bias else None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _shape(q: Tensor, half: int, bias: Tensor | None) -> tuple[int, bool, bool]:
    return max(_padded(q.shape[-1]), 2 * half), q.dtype == torch.bfloat16, bias is not None


def _strides(q: Tensor, first: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """The batch stride of the intervals, and the strides of the bias: 0 where it is broadcast."""
    of_first = first.stride(0) if len(first) > 1 else 0
    if bias is None:
        return of_first, 0, 0, 0, 0
    return of_first, *(stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride()))


def _channels(beta: Tensor, low: Tensor, high: Tensor, half: int) -> Float[Tensor, "b h 3 half"]:
    """Per channel: beta log2(e), the integer c above every w, or 0 where |w| < 1, and a."""
    rate = (beta.float() * math.log2(math.e)).expand_as(high)
    low, high = (torch.where(high < low, 0.0, bound) * rate for bound in (low, high))
    near = torch.maximum(high, -low) < 1
    channels = torch.stack([rate, torch.where(near, 0.0, high.ceil()), near.float()], 2)
    pad = torch.nn.functional.pad(channels, (0, half - rate.shape[-1]))
    pad[:, :, 0, rate.shape[-1] :] = 1.0
    return pad


def _unproven(total: Tensor, channels: Tensor, weights: Tensor):
    """The entries (batch, head, row, channel) with R + a < e^-60 in rows that see a key, in ascending order."""
    heads, dv = total.shape[2:]
    one = channels[:, :, 2, :dv].repeat_interleave(heads // channels.shape[1], 1)[:, :, None]
    return ((total.transpose(1, 2) + one < _PROVEN) & (weights > 0)[..., None]).nonzero()


def _definition(q, k, v, beta, bias, first, end, scale) -> tuple[Scores, Tensor, Tensor]:
    """Scores, values and beta per query head, as `softmax_entries` takes them."""
    per_head = lambda x, dim: x.float().repeat_interleave(q.shape[2] // x.shape[dim], dim)  # noqa: E731
    allowed = Intervals(first, end).allowed(k.shape[1])[:, None]
    mask = torch.where(allowed, q.new_zeros((), dtype=torch.float32) if bias is None else bias.float(), -torch.inf)
    scores = Scores(q.float(), per_head(k, 2), mask, False, scale, False)
    return scores, per_head(v, 2), per_head(beta, 0)[None, None]
