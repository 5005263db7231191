"""The channel scan by our kernels: their launches, and their gradients."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.channel_scan.kernels import backward as channel_backward
from fem.ops.channel_scan.kernels import forward as channel_forward
from fem.ops.common.kernels.launch import on_its_device
from fem.ops.common.read import Terms
from fem.ops.common.scaled_sums import Streams
from fem.ops.decay_scan.kernels.launch import Cut, readable

Tokens = Float[Tensor, "b t c"]


def channel_scan(
    log_decay: Tokens | None, x: Tokens | None, v: Tokens, beta: Float[Tensor, " c"] | None, start: Streams
) -> tuple[Terms, Streams]:
    """The read of every token with the logarithm of its total weight, and the streams after the last one.

        s_t(i) = exp(x_i + sum_{i<r<=t} log_decay_r)        p_t(i) = s_t(i) / sum_i s_t(i)
        mean_t = sum_i p_t(i) v_i        F_t = (1 / beta) log sum_i p_t(i) exp(beta v_i)

    log_decay (None: 0), x (None: 0) and v in any of float32, bfloat16 and float16; sums, and the results, in float32.
    Training keeps the inputs, mean, F and one number per stream and token. Gradients repeat bit by bit.
    Raises ValueError on float64.
    """
    log_decay, x, v = readable(log_decay, x, v)
    beta = None if beta is None else beta.float().contiguous()
    log_weight, mean, _, last, *energies = _forward(log_decay, x, v, beta, packed(start))
    return Terms(log_weight, mean, *energies[:1]), unpacked(last)


def packed(streams: Streams) -> Float[Tensor, "parts b c"]:
    """m, S(1), S(v) and, where there are energies, n, c = 0, E: the state of the kernels."""
    (peak, (total, weighted)), energies = streams
    parts = [peak, total, weighted]
    if energies is not None:
        parts += [energies.peak, torch.zeros_like(peak), energies.sums[0]]
    return torch.stack(parts)


def unpacked(state: Float[Tensor, "parts b c"]) -> Streams:
    return Streams.of([state[0], state[1:3], *([state[3], state[5:]] if len(state) > 3 else [])])


@torch.library.custom_op(
    "fem::channel_scan_triton",
    mutates_args=(),
    schema="(Tensor? log_decay, Tensor? x, Tensor v, Tensor? beta, Tensor start) -> Tensor[]",
)
@on_its_device
def _forward(log_decay, x, v, beta, start):
    """log weight, mean, shares, the state after the last token, and with a beta F and the shares of the energies."""
    outputs = _outputs(log_decay, x, v, beta, start)
    log_weight, mean, share, last, free_energy, energy_share = outputs if beta is not None else [*outputs, None, None]
    cut, (_, time, channels) = Cut.of(*v.shape), v.shape
    _, chunks, batch = cut.grid
    entering, size = start, start[0].numel()
    if chunks > 1:
        entering = start.new_empty(len(start), batch, chunks, channels)
        through = torch.empty_like(entering[0])
        channel_forward.channel_sums[cut.grid](
            log_decay, x, v, beta, through, entering, time, channels, through.numel(), **cut.blocks
        )
        channel_forward.channel_carry[cut.carry_grid](
            beta, through, entering, start, chunks, channels, through.numel(), size, **cut.carry_blocks
        )
    channel_forward.channel_reads[cut.grid](
        log_decay, x, v, beta, entering, log_weight, mean, free_energy, share, energy_share, last,
        time, channels, entering[0].numel(), size, **cut.blocks,
    )  # fmt: skip
    return outputs


@_forward.register_fake
def _outputs(log_decay, x, v, beta, start):
    whole = lambda: v.new_empty(v.shape, dtype=torch.float32)  # noqa: E731
    return [whole(), whole(), whole(), torch.empty_like(start), *([] if beta is None else [whole(), whole()])]


@torch.library.custom_op(
    "fem::channel_scan_triton_backward",
    mutates_args=(),
    schema="(Tensor? d_log_weight, Tensor? d_mean, Tensor? d_free_energy, Tensor? d_last, Tensor? log_decay, "
    "Tensor? x, Tensor v, Tensor? beta, Tensor start, Tensor mean, Tensor share, Tensor last, Tensor? free_energy, "
    "Tensor? energy_share) -> Tensor[]",
)
@on_its_device
def _backward(
    d_log_weight, d_mean, d_free_energy, d_last, log_decay, x, v, beta, start, mean, share, last, free_energy,
    energy_share,
):  # fmt: skip
    """Gradients of the start and v and, where there are any, of log_decay, x and beta."""
    given = [None if grad is None else grad.contiguous() for grad in (d_log_weight, d_mean, d_free_energy)]
    cut, (_, time, channels) = Cut.of(*v.shape), v.shape
    _, chunks, batch = cut.grid
    behind = start.new_zeros(3, *start.shape[1:]) if d_last is None else to_units(d_last, last)
    entering, d_start, size = behind, torch.empty_like(behind), start[0].numel()
    if chunks > 1:
        entering, through = start.new_empty(3, batch, chunks, channels), start.new_empty(4, batch, chunks, channels)
        channel_backward.channel_gradient_sums[cut.grid](
            *given, v, beta, mean, share, energy_share, through, entering, time, channels, through[0].numel(),
            **cut.blocks,
        )  # fmt: skip
        channel_backward.channel_gradient_carry[cut.carry_grid](
            through, entering, behind, chunks, channels, through[0].numel(), size, **cut.carry_blocks
        )
    d_decay, d_x, d_v = (None if part is None else torch.empty_like(part) for part in (log_decay, x, v))
    d_beta = None if beta is None else start.new_empty(batch, chunks, channels)
    channel_backward.channel_gradients[cut.grid](
        *given, v, beta, mean, free_energy, share, energy_share, entering,
        d_x, d_v, d_decay, d_beta, d_start, time, channels, entering[0].numel(), size, **cut.blocks,
    )  # fmt: skip
    d_start = from_units(d_start, start)
    d_beta = None if beta is None else d_beta.sum((0, 1))
    return [d_start, d_v, *(grad for grad in (d_decay, d_x, d_beta) if grad is not None)]


@_backward.register_fake
def _(
    d_log_weight, d_mean, d_free_energy, d_last, log_decay, x, v, beta, start, mean, share, last, free_energy,
    energy_share,
):  # fmt: skip
    return [torch.empty_like(part) for part in (start, v, log_decay, x, beta) if part is not None]


def to_units(grad: Tensor, state: Tensor) -> Tensor:
    """w, s, u of `channel_scan.kernels.backward` from the gradient of a state."""
    _, total, weighted, *energies = state.unbind()
    of_total, of_weighted = grad[1] * total + grad[2] * weighted, grad[2] * total
    of_energy = grad[5] * energies[2] if energies else torch.zeros_like(total)
    return torch.stack([of_total + of_energy, of_weighted, of_energy])


def from_units(flows: Tensor, state: Tensor) -> Tensor:
    """The gradient of a state from its w, s, u."""
    w, s, u = flows.unbind()
    _, total, weighted, *energies = state.unbind()
    zero, of_weighted = torch.zeros_like(w), s / total
    grads = [zero, (w - u) / total - of_weighted * weighted / total, of_weighted]
    return torch.stack(grads + ([zero, zero, u / energies[2]] if energies else []))


def _save(ctx, inputs, output):
    _, mean, share, last, *energies = output
    ctx.save_for_backward(*inputs, mean, share, last, *(energies or (None, None)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grads):
    d_log_weight, d_mean, _, d_last, *energies = grads
    saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
    d_start, d_v, *rest = _backward(d_log_weight, d_mean, energies[0] if energies else None, d_last, *saved)
    rest = iter(rest)
    d_decay, d_x, d_beta = (None if saved[index] is None else next(rest) for index in (0, 1, 3))
    return d_decay, d_x, d_v, d_beta, d_start


_forward.register_autograd(_differentiate, setup_context=_save)
