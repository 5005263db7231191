"""The scan behind `ssm_read` by our kernels: their launches, and their gradients."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fem.ops.channel_scan.kernels import backward as channel_backward
from fem.ops.channel_scan.kernels import forward as channel_forward
from fem.ops.channel_scan.kernels.launch import from_units, packed, to_units, unpacked
from fem.ops.common.kernels.launch import on_its_device
from fem.ops.common.read import Terms
from fem.ops.common.scaled_sums import Streams
from fem.ops.decay_scan.kernels import launch as decay_scan_triton
from fem.ops.decay_scan.kernels.launch import Cut, readable
from fem.ops.ssm.kernels import backward as ssm_backward
from fem.ops.ssm.kernels import forward as ssm_forward

_STATES = 256  # of a program
_PROGRAMS = 512  # of the backward at a time, each with a scratch of its own: what an H100 holds


def ssm_scan(
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    opens: Tensor | None,
    start: Streams,
    logs: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Terms, Streams]:
    """The read of every token with the logarithm of its total weight, (B, T, D), and the states after the last one.

    The arguments of `fem.ops.ssm.plain`; delta, b, c and v in any of float32, bfloat16 and float16, sums in float32.
    logs: of delta, b and c, in float32: they take the place of b, of c and of delta as a factor of b; delta itself
    then only decays.
    Training keeps the inputs, the reads and the states of every 64th token. Gradients repeat bit by bit.
    Raises ValueError on float64.
    """
    delta, v = readable(delta, v)
    log_delta, b, c = readable(*((None, b, c) if logs is None else (x.float() for x in logs)))
    a, skip, beta = (None if part is None else part.float().contiguous() for part in (a, skip, beta))
    opens = None if opens is None else opens.to(torch.int8)
    inputs = (delta, a, b, c, skip, v, beta, opens, log_delta)
    log_weight, mean, last, _, *free_energy = _forward(*inputs, packed(start))
    return Terms(log_weight, mean, *free_energy), unpacked(last)


_INPUTS = (
    "Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor v, Tensor? beta, Tensor? opens, Tensor? log_delta"
)


@torch.library.custom_op("fem::ssm_scan_triton", mutates_args=(), schema=f"({_INPUTS}, Tensor start) -> Tensor[]")
@on_its_device
def _forward(delta, a, b, c, skip, v, beta, opens, log_delta, start):
    """log weight, mean, the states after the last token and before every chunk, and with a beta F."""
    outputs = _outputs(delta, a, b, c, skip, v, beta, opens, log_delta, start)
    log_weight, mean, last, entering, free_energy = outputs if beta is not None else [*outputs, None]
    (batch, time, channels), rank = v.shape, len(a)
    grid, blocks = cut(v, rank)
    chunks, states = grid[1], rank * channels
    size, start_size = entering[0].numel(), start[0].numel()
    if chunks == 1:
        entering.copy_(start.view_as(entering))
    else:
        through = torch.empty_like(entering[0])
        ssm_forward.ssm_sums[grid](
            delta, log_delta, a, b, v, beta, opens, through, entering, time, channels, size, **blocks
        )
        carry = Cut.of(batch, time, states)
        steep = None if beta is None else beta.repeat(rank)
        channel_forward.channel_carry[carry.carry_grid](
            steep, through, entering, start, chunks, states, size, start_size, **carry.carry_blocks
        )
    ssm_forward.ssm_reads[grid](
        delta, log_delta, a, b, c, skip, v, beta, opens, entering, log_weight, mean, free_energy, last,
        time, channels, size, start_size, **blocks,
    )  # fmt: skip
    return outputs


@_forward.register_fake
def _outputs(delta, a, b, c, skip, v, beta, opens, log_delta, start):
    whole = lambda: v.new_empty(v.shape, dtype=torch.float32)  # noqa: E731
    chunks = triton.cdiv(v.shape[1], decay_scan_triton.CHUNK)
    entering = start.new_empty(len(start), v.shape[0], chunks, start.shape[-1])
    return [whole(), whole(), torch.empty_like(start), entering, *([] if beta is None else [whole()])]


@torch.library.custom_op(
    "fem::ssm_scan_triton_backward",
    mutates_args=(),
    schema=f"(Tensor? d_log_weight, Tensor? d_mean, Tensor? d_free_energy, Tensor? d_last, {_INPUTS}, Tensor start, "
    "Tensor mean, Tensor last, Tensor entering, Tensor? free_energy) -> Tensor[]",
)
@on_its_device
def _backward(
    d_log_weight, d_mean, d_free_energy, d_last, delta, a, b, c, skip, v, beta, opens, log_delta, start, mean, last,
    entering, free_energy,
):  # fmt: skip
    """Gradients of the start, delta, a, b, c, v and, where there are any, of skip, beta and log_delta."""
    given = [None if grad is None else grad.contiguous() for grad in (d_log_weight, d_mean, d_free_energy)]
    (batch, time, channels), rank = v.shape, len(a)
    grid, blocks = cut(v, rank)
    blocks_of_channels, chunks, _ = grid
    size, states = entering[0].numel(), rank * channels
    behind = start.new_zeros(3, *start.shape[1:]) if d_last is None else to_units(d_last, last)
    read = (*given, delta, log_delta, a, b, c, skip, v, beta, opens, entering)
    flows = behind
    if chunks > 1:
        flows, through = start.new_empty(3, batch, chunks, states), start.new_empty(4, batch, chunks, states)
        ssm_backward.ssm_gradient_sums[grid](*read, mean, through, flows, time, channels, size, **blocks)
        carry = Cut.of(batch, time, states)
        channel_backward.channel_gradient_carry[carry.carry_grid](
            through, flows, behind, chunks, states, size, behind[0].numel(), **carry.carry_blocks
        )
    side_by_side = min(chunks, max(1, _PROGRAMS // (blocks_of_channels * batch)))
    scratch = start.new_empty(3 if beta is None else 5, batch, side_by_side, decay_scan_triton.CHUNK, states)
    own_scratch = start.new_empty(2, batch, side_by_side, decay_scan_triton.CHUNK, channels)
    d_delta, d_v, d_start = torch.empty_like(delta), torch.empty_like(v), torch.empty_like(behind)
    d_log_delta = None if log_delta is None else torch.empty_like(log_delta)
    d_a, d_skip, d_beta = (start.new_empty(batch, side_by_side, *x.shape) for x in (a, v[0, 0], v[0, 0]))
    d_b, d_c = start.new_empty(2, blocks_of_channels, *b.shape)
    ssm_backward.ssm_gradients[(blocks_of_channels, side_by_side, batch)](
        *read, flows, mean, free_energy, scratch, own_scratch,
        d_delta, d_log_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, d_start, time, chunks, channels,
        size, flows[0].numel(), start[0].numel(), scratch[0].numel(), own_scratch[0].numel(), b.numel(), **blocks,
    )  # fmt: skip
    of_rows = [x.sum((0, 1)) for x, there in ((d_skip, skip), (d_beta, beta)) if there is not None]
    d_b, d_c = d_b.sum(0).to(b.dtype), d_c.sum(0).to(c.dtype)
    of_rows += [] if log_delta is None else [d_log_delta]
    return [from_units(d_start, start), d_delta, d_a.sum((0, 1)), d_b, d_c, d_v, *of_rows]


@_backward.register_fake
def _(
    d_log_weight, d_mean, d_free_energy, d_last, delta, a, b, c, skip, v, beta, opens, log_delta, start, mean, last,
    entering, free_energy,
):  # fmt: skip
    like = (start, delta, a, b, c, v, skip, beta, log_delta)
    return [torch.empty_like(part) for part in like if part is not None]


def _save(ctx, inputs, output):
    _, mean, last, entering, *free_energy = output
    ctx.save_for_backward(*inputs, mean, last, entering, *(free_energy or [None]))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grads):
    d_log_weight, d_mean, d_last, _, *d_free_energy = grads
    saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
    given = (d_log_weight, d_mean, d_free_energy[0] if d_free_energy else None, d_last)
    d_start, d_delta, d_a, d_b, d_c, d_v, *rest = _backward(*given, *saved)
    rest = iter(rest)
    d_skip, d_beta, d_log_delta = (None if saved[index] is None else next(rest) for index in (4, 6, 8))
    return d_delta, d_a, d_b, d_c, d_skip, d_v, d_beta, None, d_log_delta, d_start


_forward.register_autograd(_differentiate, setup_context=_save)


def cut(v: Tensor, rank: int) -> tuple[tuple[int, int, int], dict[str, int | bool]]:
    """The grid of the kernels that take a chunk of some channels each, and their block sizes."""
    padded = triton.next_power_of_2(rank)
    block = min(triton.next_power_of_2(v.shape[2]), max(1, _STATES // padded))
    sizes = {"N": rank, "PADDED": padded, "CHUNK": decay_scan_triton.CHUNK, "BLOCK": block}
    grid = (triton.cdiv(v.shape[2], block), triton.cdiv(v.shape[1], decay_scan_triton.CHUNK), v.shape[0])
    return grid, sizes | {"num_warps": 4, "enable_fp_fusion": True}
