"""The scan of a selective state space model by Triton, one token after another, with states in and out.

    h_tn = e^{delta_t a_n} h_{t-1,n} + b_tn u_t        y_t = sum_n c_tn h_tn

A program holds the N states of BLOCK columns of a row in registers. The items u have several streams of W columns, such
as [v | e | 1], which share delta and a: column j has those of channel j mod W. The backward keeps the states before
every 64th token, and computes the others again. Where a document opens, the states before it are forgotten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import on

CHUNK = 64  # tokens between states that are kept
BLOCK = 32  # columns of a program


@triton.jit
def decay_of(step, a, opens, token, HAS_OPENS: tl.constexpr):
    """e^{delta_t a}, (N, BLOCK); 0 where a document opens."""
    decay = tl.exp(step[None, :] * a)
    if HAS_OPENS:
        decay = tl.where(tl.load(opens + token) != 0, 0.0, decay)
    return decay


@triton.jit
def loaded(delta, b, u, token, W, D, channel, column, live, state, exists, N: tl.constexpr):
    """delta_t and u_t of the columns, b_t of the states. A loop loads them one token before it uses them."""
    step = tl.load(delta + token * W + channel, live, other=0.0)
    item = tl.load(u + token * D + column, live, other=0.0)
    return step, item, tl.load(b + token * N + state, exists, other=0.0)


@triton.jit
def scan_kernel(
    delta, a, b, c, u, opens, first, y, kept, last, T, W, D,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, HAS_OPENS: tl.constexpr,
):  # fmt: skip
    """y, the states before every CHUNK-th token, kept (B, chunks, N, D), and the last, from the first (B, N, D)."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state, channel, live = tl.arange(0, STATES), column % W, column < D
    exists, both = state < N, (state < N)[:, None] & live[None, :]
    rate = tl.load(a + state[:, None] * W + channel[None, :], both, other=0.0)
    cell = (row * N + state[:, None]) * D + column[None, :]
    h = tl.load(first + cell, both, other=0.0)
    chunks = (T + CHUNK - 1) // CHUNK
    next_step, next_item, next_into = loaded(delta, b, u, row * T, W, D, channel, column, live, state, exists, N)
    next_out = tl.load(c + row * T * N + state, exists, other=0.0)
    for t in range(T):
        token, ahead = row * T + t, row * T + tl.minimum(t + 1, T - 1)
        step, item, into, out = next_step, next_item, next_into, next_out
        next_step, next_item, next_into = loaded(delta, b, u, ahead, W, D, channel, column, live, state, exists, N)
        next_out = tl.load(c + ahead * N + state, exists, other=0.0)
        if t % CHUNK == 0:
            tl.store(kept + ((row * chunks + t // CHUNK) * N + state[:, None]) * D + column[None, :], h, both)
        h = decay_of(step, rate, opens, token, HAS_OPENS) * h + into[:, None] * item[None, :]
        tl.store(y + token * D + column, tl.sum(out[:, None] * h, 0), live)
    tl.store(last + cell, h, both)


@triton.jit
def scan_backward_kernel(
    delta, a, b, c, u, opens, kept, d_y, d_last, scratch, d_delta, d_a, d_b, d_c, d_u, d_first, T, W, D, TOKENS,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, HAS_OPENS: tl.constexpr,
):  # fmt: skip
    """Gradients, with g_t = c_t dy_t + e^{delta_{t+1} a} g_{t+1}: du = sum_n b g, db = g u, dc = h dy,
    d(delta a) = g e^{delta a} h_{t-1}. d_b and d_c have a part for each block of columns, d_delta and d_a one a column.
    """
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state, channel, live = tl.arange(0, STATES), column % W, column < D
    exists, both = state < N, (state < N)[:, None] & live[None, :]
    rate = tl.load(a + state[:, None] * W + channel[None, :], both, other=0.0)
    cell = state[:, None] * D + column[None, :]
    g, a_sum = tl.load(d_last + row * N * D + cell, both, other=0.0), tl.zeros((STATES, BLOCK), tl.float32)
    chunks = (T + CHUNK - 1) // CHUNK
    part = tl.program_id(0).to(tl.int64) * TOKENS
    for k in range(chunks):
        chunk = chunks - 1 - k
        h = tl.load(kept + (row * chunks + chunk) * N * D + cell, both, other=0.0)
        first, end = row * T + chunk * CHUNK, row * T + tl.minimum(T, chunk * CHUNK + CHUNK)
        next_step, next_item, next_into = loaded(delta, b, u, first, W, D, channel, column, live, state, exists, N)
        for token in range(first, end):  # the states before each token of the chunk
            step, item, into = next_step, next_item, next_into
            ahead = tl.minimum(token + 1, end - 1)
            next_step, next_item, next_into = loaded(delta, b, u, ahead, W, D, channel, column, live, state, exists, N)
            tl.store(scratch + (row * CHUNK + token - first) * N * D + cell, h, both)
            h = decay_of(step, rate, opens, token, HAS_OPENS) * h + into[:, None] * item[None, :]
        tl.debug_barrier()
        next_step, next_item, next_into = loaded(delta, b, u, end - 1, W, D, channel, column, live, state, exists, N)
        next_before = tl.load(scratch + (row * CHUNK + end - 1 - first) * N * D + cell, both, other=0.0)
        next_out = tl.load(c + (end - 1) * N + state, exists, other=0.0)
        next_dy = tl.load(d_y + (end - 1) * D + column, live, other=0.0)
        for j in range(end - first):
            token = end - 1 - j
            step, item, into, before, out, dy = next_step, next_item, next_into, next_before, next_out, next_dy
            ahead = tl.maximum(token - 1, first)
            next_step, next_item, next_into = loaded(delta, b, u, ahead, W, D, channel, column, live, state, exists, N)
            next_before = tl.load(scratch + (row * CHUNK + ahead - first) * N * D + cell, both, other=0.0)
            next_out = tl.load(c + ahead * N + state, exists, other=0.0)
            next_dy = tl.load(d_y + ahead * D + column, live, other=0.0)
            decay = decay_of(step, rate, opens, token, HAS_OPENS)
            h = decay * before + into[:, None] * item[None, :]
            g += out[:, None] * dy[None, :]
            tl.store(d_c + (part + token) * N + state, tl.sum(h * dy[None, :], 1), exists)
            tl.store(d_b + (part + token) * N + state, tl.sum(g * item[None, :], 1), exists)
            tl.store(d_u + token * D + column, tl.sum(g * into[:, None], 0), live)
            g = g * decay
            through = g * before
            tl.store(d_delta + token * D + column, tl.sum(through * rate, 0), live)
            a_sum += through * step[None, :]
        tl.debug_barrier()  # the next chunk writes to the same scratch
    tl.store(d_a + row * N * D + cell, a_sum, both)
    tl.store(d_first + row * N * D + cell, g, both)


class _Scan(torch.autograd.Function):
    """The kernels' launches: a program has BLOCK columns of a row."""

    @staticmethod
    def forward(ctx, delta, a, b, c, u, opens, first):
        """y and the last states; kept for the gradient are the states before every CHUNK-th token."""
        delta, a, b, c, u, first = (x.float().contiguous() for x in (delta, a, b, c, u, first))
        (batch, time, columns), (states, width) = u.shape, a.shape
        y, last = torch.empty_like(u), torch.empty_like(first)
        kept = u.new_empty(batch, triton.cdiv(time, CHUNK), states, columns)
        marks = u if opens is None else opens.to(torch.int8).contiguous()
        ctx.sizes = {"N": states, "STATES": triton.next_power_of_2(states), "BLOCK": BLOCK, "CHUNK": CHUNK}
        ctx.sizes["HAS_OPENS"] = opens is not None
        ctx.grid = (triton.cdiv(columns, BLOCK), batch)
        with on(u.device):
            scan_kernel[ctx.grid](
                delta, a, b, c, u, marks, first, y, kept, last, time, width, columns, **ctx.sizes
            )  # fmt: skip
        ctx.save_for_backward(delta, a, b, c, u, marks, kept)
        return y, last

    @staticmethod
    def backward(ctx, grad, d_last):
        """Gradients by one launch, whose parts by block, row and stream are added up here."""
        delta, a, b, c, u, marks, kept = ctx.saved_tensors
        (batch, time, columns), (states, width) = u.shape, a.shape
        d_delta, d_u = torch.empty_like(u), torch.empty_like(u)
        d_a, d_first = (u.new_empty(batch, states, columns) for _ in range(2))
        d_b, d_c = (u.new_empty(ctx.grid[0], *b.shape) for _ in "bc")
        scratch = u.new_empty(batch, CHUNK, states, columns)
        with on(u.device):
            scan_backward_kernel[ctx.grid](
                delta, a, b, c, u, marks, kept, grad.contiguous(), d_last.contiguous(), scratch, d_delta, d_a, d_b, d_c,
                d_u, d_first, time, width, columns, batch * time, **ctx.sizes,
            )  # fmt: skip
        streams = (columns // width, width)
        over_streams = lambda d, dim: d.unflatten(-1, streams).sum(dim)  # noqa: E731
        return over_streams(d_delta, -2), over_streams(d_a, (0, -2)), d_b.sum(0), d_c.sum(0), d_u, None, d_first


def sequential_scan(
    delta: Float[Tensor, "b t w"],
    a: Float[Tensor, "n w"],
    b: Float[Tensor, "b t n"],
    c: Float[Tensor, "b t n"],
    u: Float[Tensor, "b t d"],
    opens: Bool[Tensor, "b t"] | None,
    first: Float[Tensor, "b n d"],
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b n d"]]:
    """y and the last states in float32, of items whose d columns are streams of w, differentiable once.

    opens: where a document begins. first: the states before the first token.
    """
    return _Scan.apply(delta, a, b, c, u, opens, first)
