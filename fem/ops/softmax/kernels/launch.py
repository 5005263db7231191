"""The softmax read by our kernels: what they are launched on, and the entries that they cannot prove."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import triton_interprets
from fem.ops.common.fallback_count import suspects
from fem.ops.common.read import Read
from fem.ops.softmax import entries as softmax_entries
from fem.ops.softmax.channels import PROVEN, channel_tables, least_totals
from fem.ops.softmax.kernels import backward as softmax_backward
from fem.ops.softmax.kernels import forward as softmax_forward
from fem.ops.softmax.kernels import launch_decode as softmax_decode
from fem.ops.softmax.kernels import values as softmax_values
from fem.ops.softmax.kernels.blocks import (
    FORWARD,
    KEY_GRADIENTS,
    QUERY_GRADIENTS,
    ROWS,
    WIDE_FORWARD,
    WIDE_KEY_GRADIENTS,
    WIDE_QUERY_GRADIENTS,
    WIDEST,
    Blocks,
    Table,
    blocks_for,
    padded,
)
from fem.ops.softmax.support import Intervals


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
    if softmax_decode.reads(q, k, v, beta, bias):
        return softmax_decode.softmax_read(q, k, v, beta, intervals, bias, scale)
    float16 = q.dtype == torch.bfloat16
    dtype = torch.bfloat16 if float16 and not triton_interprets() else torch.float32
    first, end, kept, order = intervals
    if order is not None:
        k, v = (x.take_along_dim(order[:, :, None, None], 1) for x in (k, v))
        if bias is not None and bias.shape[3] > 1:
            bias = bias.take_along_dim(order[:, None, None], 3)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    if bias is not None and bias.dtype != dtype:
        bias = bias.float()
    mean, free_energy, *_ = _forward(q, k, v, beta, kept, bias, first, end, scale, float16)
    return Read(mean, free_energy)


@torch.library.custom_op(
    "fem::softmax_read_triton",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? kept, Tensor? bias, Tensor first, Tensor end, "
    "float scale, bool float16) -> (Tensor mean, Tensor free_energy, Tensor total, Tensor values, Tensor channels, "
    "Tensor shifts, Tensor wide, Tensor peaks, Tensor weights)",
)
def _forward(q, k, v, beta, kept, bias, first, end, scale, float16):
    """mean, F, and what the backward needs besides: R, [v | E], tables of channels and shifts, wide heads, M and l."""
    (batch, queries, heads, dk), (_, keys, key_heads, dv) = q.shape, v.shape
    outputs = _outputs(q, k, v, beta, kept, bias, first, end, scale, float16)
    mean, free_energy, total, values, channels, shifts, wide, peaks, weights = outputs
    half = values.shape[-1] // 2
    grid = (triton.cdiv(keys, ROWS), key_heads, batch)
    low, high = q.new_empty(2, batch, grid[0], key_heads, dv, dtype=torch.float32)
    sums = q.new_empty(batch, grid[0], key_heads, half, dtype=torch.float32)
    rows = {"WIDTH": dv, "PADDED": half, "BLOCK": ROWS}
    softmax_values.value_bounds[grid](v, kept, low, high, keys, key_heads * dv, **rows)
    channels.copy_(channel_tables(beta, low.amin(1), high.amax(1), half, float16))
    softmax_values.values_and_exponentials[grid](v, kept, channels, values, sums, keys, key_heads * dv, **rows)
    channels[0, :, :, 5] = least_totals(channels[0], sums.sum(1), float16)

    strides, scales = _strides(first, bias), (scale * math.log2(math.e), 1 / scale)
    doubts = q.new_empty(batch, heads, triton.cdiv(queries, _blocks(FORWARD, q, half, bias).queries), dtype=torch.int32)

    def read(formed: bool) -> None:
        blocks = _blocks(WIDE_FORWARD if formed else FORWARD, q, half, bias)
        softmax_forward.read_forward[(triton.cdiv(queries, blocks.queries), heads, batch)](
            q, k, v if formed else values, kept, bias, first, end, channels[int(formed)], shifts, wide,
            mean, free_energy, total, peaks, weights, doubts,
            queries, keys, heads, heads // key_heads, *strides, *scales,
            DK=dk, D=padded(dk), DV=dv, HALF=half, **_products(formed, float16), **blocks.launch(),
        )  # fmt: skip

    read(formed=False)
    wide.copy_(doubts.sum(2).unflatten(1, (key_heads, -1)).sum(2) > 0)
    entries = ()
    if wide.any():
        softmax_values.block_shifts[(shifts.shape[2], key_heads, batch)](
            high, first, end, channels[1], wide, shifts, queries, grid[0], strides[0], **rows
        )
        read(formed=True)
        entries = _unproven(total, channels, wide, weights)
        _centre(channels[1], free_energy, entries)
    if len(entries):
        batch, head, row, channel = entries.unbind(1)
        again = softmax_entries.free_energies(
            *softmax_entries.definition(q, k, v, beta, bias, first, end, scale), entries
        )
        free_energy[batch, row, head, channel] = again.to(free_energy.dtype)
    suspects.count(free_energy.numel(), len(entries))
    return outputs


@_forward.register_fake
def _outputs(q, k, v, beta, kept, bias, first, end, scale, float16):
    (batch, queries, heads, _), (_, keys, key_heads, dv) = q.shape, v.shape
    half = padded(dv)
    full = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    return (
        q.new_empty(batch, queries, heads, dv),
        q.new_empty(batch, queries, heads, dv),
        full(batch, queries, heads, dv),
        q.new_empty(batch, keys, key_heads, 2 * half, dtype=torch.float16 if float16 else torch.float32),
        full(2, batch, key_heads, softmax_values.CHANNEL_ROWS.value, half),
        full(batch, key_heads, triton.cdiv(queries, softmax_values.SHIFT_ROWS.value), half),
        q.new_empty(batch, key_heads, dtype=torch.int32),
        full(batch, heads, queries),
        full(batch, heads, queries),
    )


@torch.library.custom_op(
    "fem::softmax_read_triton_backward",
    mutates_args=(),
    schema="(Tensor grad_mean, Tensor grad_free_energy, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? kept, "
    "Tensor? bias, Tensor first, Tensor end, Tensor mean, Tensor total, Tensor values, Tensor channels, Tensor shifts, "
    "Tensor wide, Tensor peaks, Tensor weights, float scale, bool of_bias) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, Tensor dbias)",
)
def _backward(
    grad_mean, grad_free_energy, q, k, v, beta, kept, bias, first, end, mean, total, values, channels, shifts, wide,
    peaks, weights, scale, of_bias,
):  # fmt: skip
    (batch, queries, heads, dk), (_, keys, key_heads, dv) = q.shape, v.shape
    half, groups, float16 = values.shape[-1] // 2, heads // key_heads, values.dtype == torch.float16
    full = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    strides, scales = _strides(first, bias), (scale * math.log2(math.e), 1 / scale, scale)
    widths = {"DV": dv, "HALF": half}
    of_rows = full(batch, triton.cdiv(queries, ROWS), heads, half)
    dbeta = 0
    delta, exponents = torch.empty_like(weights), torch.empty_like(weights)
    dq, dk_, dv_ = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ds = full(batch, heads, queries, keys).zero_() if of_bias else None
    for formed in _passes(wide):
        how = _products(formed, float16)
        g = q.new_empty(batch, queries, heads, 2 * half, dtype=torch.float32 if formed else values.dtype)
        softmax_backward.row_gradients[(of_rows.shape[1], heads, batch)](
            grad_mean.contiguous(), grad_free_energy.contiguous(), mean, total, weights, channels[int(formed)], shifts,
            wide, g, exponents, delta, of_rows, queries, heads, groups, PROVEN, **widths, **how, BLOCK=ROWS,
        )  # fmt: skip
        lifted, tops = _lifted(peaks, exponents if g.dtype == torch.float16 else torch.zeros_like(peaks), groups)
        blocks = _blocks(WIDE_KEY_GRADIENTS if formed else KEY_GRADIENTS, q, half, bias)
        grid = (triton.cdiv(keys, blocks.keys), key_heads, batch)
        row_blocks = Intervals(first, end).rows_of_key_blocks(keys, blocks.keys, blocks.queries)
        support, sizes = (bias, first, end), (queries, keys, heads, groups, *strides, *scales)
        of_keys = full(batch, grid[0], key_heads, half).zero_()
        softmax_backward.key_gradients[grid](
            q, k, v if formed else values, g, kept, *support, row_blocks, channels[int(formed)], shifts, wide, lifted,
            delta, tops, dk_, dv_, of_keys, *sizes, DK=dk, D=padded(dk), **widths, **how, **blocks.launch(),
        )  # fmt: skip
        dbeta = dbeta + of_keys.sum((0, 1))
        blocks = _blocks(WIDE_QUERY_GRADIENTS if formed else QUERY_GRADIENTS, q, half, bias)
        softmax_backward.query_gradients[(triton.cdiv(queries, blocks.queries), heads, batch)](
            q, k, v if formed else values, g, kept, *support, channels[int(formed)], shifts, wide, lifted, delta, tops,
            dq, ds, *sizes,
            DK=dk, D=padded(dk), **widths, **how, **blocks.launch(),
        )  # fmt: skip

    dbeta = (dbeta + of_rows.sum((0, 1)).unflatten(0, (key_heads, groups)).sum(1))[:, :dv]
    entries = _unproven(total, channels, wide, weights) if formed else ()
    if len(entries):
        b, head, row, channel = entries.unbind(1)
        scores, *definition = softmax_entries.definition(q, k, v, beta, bias, first, end, scale)
        more = [torch.zeros_like(x) for x in (scores.q, scores.k, *definition)]
        softmax_entries.add_gradients(scores, *definition, entries, grad_free_energy[b, row, head, channel], *more, ds)
        of_group = lambda x, dim: x.unflatten(dim, (key_heads, groups)).sum(dim + 1)  # noqa: E731
        dq, dbeta = (dq + more[0]).to(q.dtype), dbeta + of_group(more[3][0, 0], 0)
        dk_, dv_ = ((x + of_group(y, 2)).to(x.dtype) for x, y in ((dk_, more[1]), (dv_, more[2])))
    return dq, dk_, dv_, dbeta.to(beta.dtype), ds.sum_to_size(bias.shape).to(bias.dtype) if of_bias else full(0)


@_backward.register_fake
def _(
    grad_mean, grad_free_energy, q, k, v, beta, kept, bias, first, end, mean, total, values, channels, shifts, wide,
    peaks, weights, scale, of_bias,
):  # fmt: skip
    whole = lambda x: x.new_empty(x.shape)  # noqa: E731
    return whole(q), whole(k), whole(v), whole(beta), whole(bias) if of_bias else total.new_empty(0)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, _ = inputs
    mean, _, *memory = output
    ctx.save_for_backward(*tensors, mean, *memory)
    ctx.mark_non_differentiable(*memory)


def _gradients(ctx, grad_mean, grad_free_energy, *_):
    of_beta, of_bias = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    saved = ctx.saved_tensors
    grads = (torch.zeros_like(saved[8]) if x is None else x for x in (grad_mean, grad_free_energy))
    dq, dk, dv, dbeta, dbias = _backward(*grads, *saved, ctx.scale, of_bias)
    return dq, dk, dv, dbeta if of_beta else None, None, dbias if of_bias else None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _blocks(table: Table, q: Tensor, half: int, bias: Tensor | None) -> Blocks:
    return blocks_for(table, max(padded(q.shape[-1]), 2 * half), q.dtype == torch.bfloat16, bias is not None)


def _strides(first: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """The batch stride of the intervals, and the strides of the bias."""
    return first.stride(0) if len(first) > 1 else 0, *softmax_decode.bias_strides(bias)


def _passes(wide: Tensor) -> Iterator[bool]:
    """A launch for the heads whose [v | E] are stored; then, only if there are any, one for those that form them."""
    yield False
    if wide.any():
        yield True


def _products(formed: bool, float16: bool) -> dict[str, bool | str]:
    """The products with [v | E]: float16 as stored, tf32 as formed, and in float32 for float32."""
    return {"FORMED": formed, "PRECISION": "tf32" if formed and float16 else "ieee"}


def _centre(formed: Tensor, free_energy: Tensor, unproven: Tensor) -> None:
    """Let c / rate be the mean of the proven F: what the values' part of dbeta and the rows' are differences to."""
    batch, head, row, channel = unproven.unbind(1)
    proven = torch.ones_like(free_energy, dtype=torch.bool)
    proven[batch, row, head, channel] = False
    of_key_head = lambda x: x.sum(1).unflatten(1, (formed.shape[1], -1)).sum(2)  # noqa: E731
    mean = of_key_head(torch.where(proven, free_energy.float(), 0.0)) / of_key_head(proven).clamp_min(1)
    rate, shift, near = formed[..., : mean.shape[-1]].unbind(2)[:3]
    shift.copy_(torch.where(near > 0, 0.0, mean * rate))


def _lifted(peaks: Tensor, exponents: Tensor, groups: int) -> tuple[Tensor, Float[Tensor, "b hkv"]]:
    """M - n + top, and top = max n of a key head's rows."""
    tops = exponents.unflatten(1, (-1, groups)).amax((2, 3))
    return peaks - exponents + tops.repeat_interleave(groups, 1)[..., None], tops


def _unproven(total: Tensor, channels: Tensor, wide: Tensor, weights: Tensor):
    """The entries (batch, head, row, channel) of wide heads with R + a < e^-60 in rows that see a key, ascending."""
    heads, dv = total.shape[2:]
    per_head = lambda x: x.repeat_interleave(heads // wide.shape[1], 1)[:, :, None]  # noqa: E731
    low = total.transpose(1, 2) + per_head(channels[1, :, :, 2, :dv]) < PROVEN
    return (low & (weights > 0)[..., None] & (per_head(wide)[..., None] > 0)).nonzero()
