"""The channel scan as one operator with its gradient, and token by token in steps that PyTorch differentiates."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.common.precision import double, needs_float64
from fem.ops.common.read import Terms
from fem.ops.common.scaled_sums import (
    Memory,
    Streams,
    Sums,
    accumulate,
    accumulate_backward,
    add_token,
    leave,
    leave_backward,
    start_backward,
)
from fem.ops.common.steps import along_time, portable
from fem.ops.common.transforms import again_differentiable, differentiated, transformed


def channel_scan(
    log_decay: Tensor | None, x: Tensor | None, v: Tensor, beta: Tensor | None, start: list[Tensor]
) -> tuple[Terms, Sums]:
    """The read after every token, (B, T, C), and the weights after the last.

    start: peak (B, C), sums (2, B, C) and, with a beta, the free energy (B, C) before the first token.
    """
    x = v.new_zeros(()).expand_as(v) if x is None else x
    inputs = (log_decay, x, v, beta, *start)
    one = v.shape[1] == 1 and not differentiated(*inputs)
    run = step_by_step if portable() or one or transformed(*inputs) else _channel_scan
    reads = len(start)
    outputs = run(log_decay, x, v, beta, start)
    return Terms(*outputs[:reads]), Sums(*outputs[reads : reads + 2])


def step_by_step(log_decay, x, v, beta, start) -> list[Tensor]:
    """The reads, the last peak and the last sums, by steps that PyTorch can differentiate any number of times."""

    def step(before, log_decay, x, v):
        peak, *memory = before
        left = peak if log_decay is None else peak + log_decay
        peak, sums, *free_energy = after = add_token(left, *memory, x=x, v=v, beta=beta)
        return after, [peak + sums[0].log(), sums[1] / sums[0], *free_energy]

    (peak, sums, *_), reads = along_time(step, start, log_decay, x, v)
    return [*reads, peak, sums]


def _streams(log_decay, x, v, beta, before: Streams) -> Streams:
    energies = None if beta is None else accumulate(log_decay, torch.addcmul(x, beta, v), None, before.energies)
    return Streams(accumulate(log_decay, x, v, before.weights), energies)


@operator("channel_scan(Tensor? log_decay, Tensor x, Tensor v, Tensor? beta, Tensor[] start) -> Tensor[]")
def _channel_scan(log_decay, x, v, beta, start):
    """The reads after every token, the peak and the sums after the last, then for the backward pass all peaks, totals
    and energies."""
    dtype = v.dtype
    if needs_float64(v, beta, x):
        log_decay, x, v, beta, *start = double(log_decay, x, v, beta, *start)
    streams = _streams(log_decay, x, v, beta, Streams.after(*start, beta=beta))
    peak, total, *read = leave(streams, beta).parts()
    last = streams.last().weights.rounded(dtype)
    made_of = [] if beta is None else [streams.energies.peak, streams.energies.sums[0]]
    outputs = [total.log().add_(peak), *read, *last, peak, total, *made_of]
    return [part.to(dtype) for part in outputs]


@_channel_scan.register_fake
def _(log_decay, x, v, beta, start):
    like_v = lambda count: [v.new_empty(v.shape) for _ in range(count)]  # noqa: E731
    reads, saved = (2, 2) if beta is None else (3, 4)
    return [*like_v(reads), *(torch.empty_like(part) for part in start[:2]), *like_v(saved)]


@operator(
    "channel_scan_backward(Tensor? d_log_weight, Tensor[] grads, Tensor? log_decay, Tensor x, Tensor v, "
    "Tensor? beta, Tensor[] start, Tensor[] saved) -> Tensor[]"
)
def _channel_scan_backward(d_log_weight, grads, log_decay, x, v, beta, start, saved):
    """Gradients of x, v, the start without its peak, then, where there are any, of beta and log_decay."""
    dtype, again = v.dtype, needs_float64(v, beta, x)
    if again:
        d_log_weight, log_decay, x, v, beta = double(d_log_weight, log_decay, x, v, beta)
        start, grads = double(*start), double(*grads)
    before = Streams.after(*start, beta=beta)
    if again:  # what was saved is rounded
        streams = _streams(log_decay, x, v, beta, before)
        memory, energies = leave(streams, beta), streams.energies
        last = memory.peak[:, -1]
        grads[-1] = grads[-1] * (last - last.to(dtype)).clamp(-1, 1).exp()  # LOG_ZERO rounds by far more than 1
    else:
        mean, *free_energy, peak, total = saved[: 3 if beta is None else 4]
        memory = Memory(peak, total, mean, *free_energy)
        energies = None if beta is None else Sums(saved[4], saved[5].unsqueeze(0))
    *d_read, d_last = grads
    energy = None if beta is None else energies.sums[0]
    d_total = None if d_log_weight is None else d_log_weight / memory.total
    d_memory = Memory(None, d_total, *d_read)
    d_weights, d_energies, d_beta = leave_backward(d_memory, memory, energy, beta)
    d_weights[:, :, -1] += d_last
    sums = torch.stack([memory.total, memory.total * memory.mean])
    weights = accumulate_backward(d_weights, log_decay, x, v, before.weights, Sums(memory.peak, sums))
    results = [weights.added.mul_(weights.weight), weights.v, weights.start]
    d_decay = weights.log_decay
    if beta is not None:
        z = torch.addcmul(x, beta, v)
        of_energies = accumulate_backward(d_energies, log_decay, z, None, before.energies, energies)
        d_z = of_energies.added.mul_(of_energies.weight)
        d_beta = d_beta.addcmul_(d_z, v).sum((0, 1))
        results[0].add_(d_z)
        results[1].addcmul_(beta, d_z)
        d_free_energy, of_start = start_backward(of_energies.start, results[2], before, start[2], beta)
        results += [d_free_energy, d_beta + of_start.sum(0)]
        d_decay = d_decay if d_decay is None else d_decay.add_(of_energies.log_decay)
    return [part.to(dtype) for part in (*results, d_decay) if part is not None]


@_channel_scan_backward.register_fake
def _(d_log_weight, grads, log_decay, x, v, beta, start, saved):
    like = [x, v, *start[1:], beta, log_decay]
    return [part.new_empty(part.shape) for part in like if part is not None]


def _save(ctx, inputs, output):
    log_decay, x, v, beta, start = inputs
    reads = len(start)
    ctx.save_for_backward(log_decay, x, v, beta, *start, *output[1:reads], *output[reads + 2 :])
    ctx.reads = reads
    ctx.shapes = [part.shape for part in output[: reads + 2]]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grads):
    log_decay, x, v, beta, *rest = ctx.saved_tensors
    start, saved = rest[: ctx.reads], rest[ctx.reads :]
    of_log_weight, *rest = grads[: ctx.reads + 2]
    *of_reads, _, of_sums = (v.new_zeros(shape) if x is None else x for x, shape in zip(rest, ctx.shapes[1:]))
    if torch.is_grad_enabled():
        steps = lambda log_decay, x, v, beta, *start: step_by_step(log_decay, x, v, beta, start)  # noqa: E731
        of_outputs = [of_log_weight, *of_reads, None, of_sums]  # a peak has no gradient
        gradients = again_differentiable(steps, (log_decay, x, v, beta, *start), of_outputs)
        return *gradients[:4], gradients[4:]
    gradients = iter(_channel_scan_backward(of_log_weight, [*of_reads, of_sums], log_decay, x, v, beta, start, saved))
    d_x, d_v = next(gradients), next(gradients)
    d_start = [None, *(next(gradients) for _ in start[1:])]
    d_beta, d_decay = (None if part is None else next(gradients) for part in (beta, log_decay))
    return d_decay, d_x, d_v, d_beta, d_start


_channel_scan.register_autograd(_differentiate, setup_context=_save)
