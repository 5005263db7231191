"""Triton kernels for what stands around a read: beta and the gates; without gradients the rotation of queries and keys
and their features; of one token its way into the cache.

PyTorch launches ten to fourteen kernels for either, which is most of what one token of a layer takes. Graphs of
torch.compile do not need them, as inductor fuses the same operations. The gates have a gradient, in one launch, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fem.ops.common.backend import differentiated, on
from fem.ops.common.joined import by_tokens, tokens_apart
from fem.ops.common.launch import cdiv, launched, next_power_of_2
from fem.ops.common.operator import again_differentiable
from fem.ops.common.triton_math import exact_softplus, gate, sigmoid, through_gate, turned

NUMBERS = 1024  # of a program, 8 for each of 128 threads


@launched
def softplus_kernel(x, y, start, count, BLOCK: tl.constexpr):
    """y = softplus(x + start), in float32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, exact_softplus(tl.load(x + at, at < count, other=0.0).to(tl.float32) + start), at < count)


def launch_softplus(x: Tensor, start: float = 0.0) -> Tensor:
    """softplus(x + start) of a parameter without a gradient, in float32."""
    x, y = x.contiguous(), x.new_empty(x.shape, dtype=torch.float32)
    with on(x.device):
        softplus_kernel[cdiv(x.numel(), NUMBERS),](x, y, start, x.numel(), BLOCK=NUMBERS)
    return y


@triton.jit
def in_columns(row, heads, token_row, WIDTH: tl.constexpr):
    """Where heads of tokens begin, of tokens that are token_row apart."""
    return (row // heads).to(tl.int64)[:, None] * token_row + (row % heads)[:, None] * WIDTH


@launched
def gate_kernel(
    mean, free, inner, outer, o, rows, heads, logit_row, eps, MEAN: tl.constexpr, FREE: tl.constexpr,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, MIXED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """o = g u of ROWS heads of tokens. u: [mean, F] where SPLIT, (1 - lambda) mean + lambda F where MIXED, else F or,
    without it, the mean. inner, outer: logits of lambda = sigmoid(inner) and g = RMSNorm of softplus(outer), logit_row
    from a token to the next."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token, exists = row.to(tl.int64)[:, None], (row < rows)[:, None]
    inside = exists & (column < WIDTH)[None]
    at, logit = token * WIDTH + column[None], in_columns(row, heads, logit_row, WIDTH) + column[None]
    u = tl.zeros((ROWS, COLUMNS), tl.float32)
    if SPLIT or MIXED or FREE == 0:
        u += tl.load(mean + token * MEAN + column[None], exists & (column < MEAN)[None], other=0.0).to(tl.float32)
    if FREE > 0:
        channel = column - (MEAN if SPLIT else 0)
        there = exists & ((channel >= 0) & (channel < FREE))[None]
        f = tl.load(free + token * FREE + channel[None], there, other=0.0).to(tl.float32)
        if MIXED:
            f = sigmoid(tl.load(inner + logit, inside, other=0.0).to(tl.float32)) * (f - u)
        u += f
    if GATED:
        u *= gate(tl.load(outer + logit, inside, other=0.0), inside, WIDTH, eps)
    tl.store(o + at, u, inside)


@launched
def gate_backward_kernel(
    d_o, mean, free, inner, outer, d_mean, d_free, d_inner, d_outer, rows, heads, logit_row, d_logit_row, eps,
    MEAN: tl.constexpr, FREE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, MIXED: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of what `gate_kernel` reads: du = g do."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token, exists = row.to(tl.int64)[:, None], (row < rows)[:, None]
    inside, in_mean = exists & (column < WIDTH)[None], exists & (column < MEAN)[None]
    at, logit = token * WIDTH + column[None], in_columns(row, heads, logit_row, WIDTH) + column[None]
    d_logit = in_columns(row, heads, d_logit_row, WIDTH) + column[None]
    d_u = tl.load(d_o + at, inside, other=0.0).to(tl.float32)
    u, gap, lambda_ = tl.zeros_like(d_u), tl.zeros_like(d_u), tl.zeros_like(d_u)
    channel = column - (MEAN if SPLIT else 0)
    there = exists & ((channel >= 0) & (channel < FREE))[None]
    if SPLIT or MIXED or FREE == 0:
        u += tl.load(mean + token * MEAN + column[None], in_mean, other=0.0).to(tl.float32)
    if FREE > 0:
        f = tl.load(free + token * FREE + channel[None], there, other=0.0).to(tl.float32)
        if MIXED:
            gap, lambda_ = f - u, sigmoid(tl.load(inner + logit, inside, other=0.0).to(tl.float32))
            f = lambda_ * gap
        u += f
    if GATED:
        a = tl.load(outer + logit, inside, other=0.0).to(tl.float32)
        d_a, d_u = through_gate(a, u, d_u, inside, WIDTH, eps)
        tl.store(d_outer + d_logit, d_a, inside)
    if MIXED:
        tl.store(d_inner + d_logit, d_u * gap * lambda_ * (1 - lambda_), inside)
        tl.store(d_free + at, d_u * lambda_, inside)
        tl.store(d_mean + at, d_u * (1 - lambda_), inside)
    else:
        if FREE > 0:
            tl.store(d_free + token * FREE + channel[None], d_u, there)
        if SPLIT or FREE == 0:
            tl.store(d_mean + token * MEAN + column[None], d_u, in_mean)


def gated(
    plain: Callable[..., Tensor],
    mean: Float[Tensor, "*t h dm"],
    free: Float[Tensor, "*t h df"] | None,
    inner: Float[Tensor, "*t h_d"] | None,
    outer: Float[Tensor, "*t h_d"] | None,
    split: bool,
    eps: float,
) -> Float[Tensor, "*t h d"]:
    """`TwoLevelGate` of a read and the gates' logits, in the dtype of the read.

    plain(mean, free, inner, outer): the same, differentiable any number of times.
    """
    read, logits = [None if x is None else x.contiguous() for x in (mean, free)], [inner, outer]
    if (apart := tokens_apart(inner, outer)) is None:
        logits = [None if x is None else x.contiguous() for x in logits]
    if differentiated(*read, *logits):
        return _Gated.apply(plain, split, eps, apart, *read, *logits)
    return launch_gate(*read, *logits, split, eps, rows_apart=(apart, None))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plain, split, eps, apart, *given):
        ctx.plain, ctx.split, ctx.eps, ctx.apart = plain, split, eps, apart
        ctx.save_for_backward(*given)
        return launch_gate(*given, split, eps, rows_apart=(apart, None))

    @staticmethod
    def backward(ctx, grad):
        given = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *[None] * 4, *again_differentiable(lambda *x: [ctx.plain(*x)], given, [grad])
        mean, free, inner, _ = given
        unread = free is not None and inner is None and not ctx.split
        found = [
            None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (None if unread else mean, *given[1:])
        ]
        launch_gate(*given, ctx.split, ctx.eps, grad.contiguous(), found, (ctx.apart, None))
        return *[None] * 4, *found


def launch_gate(
    mean, free, inner, outer, split: bool, eps: float, d_o: Tensor | None = None, found=(), rows_apart=(None, None)
) -> Tensor:
    """o; with d_o, write the gradients of the four inputs to what was found of them, and return d_o.

    rows_apart: numbers from one token to the next, of the logits and of their gradients; None: they lie side by side.
    """
    free = mean[..., :0] if free is None else free
    width = mean.shape[-1] + free.shape[-1] if split else max(mean.shape[-1], free.shape[-1])
    columns, rows = next_power_of_2(width), mean.shape[:-1].numel()
    tile = max(1, NUMBERS // columns)
    sizes = {"MEAN": mean.shape[-1], "FREE": free.shape[-1], "WIDTH": width, "ROWS": tile, "COLUMNS": columns}
    parts = {"SPLIT": split, "MIXED": inner is not None and not split, "GATED": outer is not None}
    o = mean.new_empty(*mean.shape[:-1], width) if d_o is None else d_o
    given, heads = [o if x is None else x for x in (mean, free, inner, outer)], mean.shape[-2]
    apart = [heads * width if row is None else row for row in rows_apart]
    with on(mean.device):
        if d_o is None:
            gate_kernel[cdiv(rows, tile),](*given, o, rows, heads, apart[0], eps, **sizes, **parts)
        else:
            found = [o if x is None else x for x in found]
            gate_backward_kernel[cdiv(rows, tile),](d_o, *given, *found, rows, heads, *apart, eps, **sizes, **parts)
    return o


@triton.jit
def _turn_heads(
    x, y, row, x_row, cos, sin, eps, COUNT: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):
    """The COUNT heads of a row's token, turned by angles whose cos and sin are given; with an eps, their features."""
    head, plane = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    there, at = (head < COUNT) & (plane < WIDTH // 2), head * WIDTH + plane
    low, high = turned(x + row * x_row + at, cos, sin, there, WIDTH // 2)
    if eps is not None:
        low, high = tl.maximum(low, 0.0) + eps, tl.maximum(high, 0.0) + eps
    tl.store(y + row * COUNT * WIDTH + at, low, there)
    tl.store(y + row * COUNT * WIDTH + at + WIDTH // 2, high, there)


@launched
def rotate_token_kernel(
    q, k, q_out, k_out, position, frequency, factor, eps, q_row, k_row, period,
    heads: tl.constexpr, kv_heads: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """y_j = x_j cos a_j - x_{j+d/2} sin a_j, y_{j+d/2} = x_{j+d/2} cos a_j + x_j sin a_j of a token, a_j =
    position frequency_j in float64; cos and sin are rounded to the dtype of y. With an eps, ReLU(y) + eps. After
    `period` tokens positions begin anew."""
    row, plane = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    angle = tl.load(position + row % period).to(tl.float64)
    angle *= tl.load(frequency + plane, plane < WIDTH // 2, other=0.0)
    dtype = q_out.dtype.element_ty
    cos = (factor * tl.cos(angle)).to(tl.float32).to(dtype).to(tl.float32)[None]
    sin = (factor * tl.sin(angle)).to(tl.float32).to(dtype).to(tl.float32)[None]
    _turn_heads(q, q_out, row, q_row, cos, sin, eps, heads, WIDTH, HEADS, HALF)
    _turn_heads(k, k_out, row, k_row, cos, sin, eps, kv_heads, WIDTH, HEADS, HALF)


def rotated_tokens(
    tensors: Sequence[Float[Tensor, "b t _ d"]],
    position: Int[Tensor, " t"] | Int[Tensor, "b t"],
    frequency: Float64[Tensor, " planes"],
    factor: float,
    eps: float | None = None,
) -> list[Float[Tensor, "b t _ d"]]:
    """`rotate_all` of queries and keys; with an eps their features ReLU(.) + eps, in float32."""
    (q, q_row), (k, k_row) = map(by_tokens, tensors)
    out = [x.new_empty(x.shape, dtype=x.dtype if eps is None else torch.float32) for x in (q, k)]
    width, most = q.shape[3], max(q.shape[2], k.shape[2])
    with on(q.device):
        rotate_token_kernel[q.shape[0] * q.shape[1],](
            q, k, *out, position.contiguous(), frequency, factor, eps, q_row, k_row, position.numel(),
            heads=q.shape[2], kv_heads=k.shape[2], WIDTH=width, HEADS=next_power_of_2(most),
            HALF=next_power_of_2(width // 2),
        )  # fmt: skip
    return out


@launched
def append_token_kernel(
    k, v, k_place, v_place, k_row, v_row, k_batch, k_head, v_batch, v_head,
    heads: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The key and the value of a row's token, written to their places in a cache."""
    row, head, column = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, COLUMNS)
    inside = (head < heads) & (column < KEY)[None]
    key = tl.load(k + row * k_row + head * KEY + column[None], inside)
    tl.store(k_place + row * k_batch + head * k_head + column[None], key, inside)
    inside = (head < heads) & (column < VALUE)[None]
    value = tl.load(v + row * v_row + head * VALUE + column[None], inside)
    tl.store(v_place + row * v_batch + head * v_head + column[None], value, inside)


def append_token(
    k: Float[Tensor, "b h 1 dk"],
    v: Float[Tensor, "b h 1 dv"],
    k_place: Float[Tensor, "b h 1 dk"],
    v_place: Float[Tensor, "b h 1 dv"],
) -> None:
    """Write k and v to their places, views of a cache that hold a head's numbers side by side."""
    (batch, heads, _, key), value = k.shape, v.shape[3]
    k, v = (x if x.stride(1) == x.shape[3] and x.stride(3) == 1 else x.contiguous() for x in (k, v))
    with on(k.device):
        append_token_kernel[batch,](
            k, v, k_place, v_place, k.stride(0), v.stride(0), *k_place.stride()[:2], *v_place.stride()[:2],
            heads=heads, KEY=key, VALUE=value, HEADS=next_power_of_2(heads),
            COLUMNS=next_power_of_2(max(key, value, 1)),
        )  # fmt: skip
