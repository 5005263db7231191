"""Priors whose score is a weight per value channel, which may decay: AFT (`rnn_softmax`), `rnn_decay`."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.channel_scan.naive import naive_channel_scan_read
from fem.ops.common.backend import scan_backend, widest
from fem.ops.common.precision import wide_dtype
from fem.ops.common.read import Read, Terms, merge, read_of
from fem.ops.common.scaled_sums import (
    Memory,
    Streams,
    Sums,
    accumulate,
    accumulate_backward,
    last_step,
    leave,
    leave_backward,
)
from fem.ops.common.tokens import Tokens

Heads = Float[Tensor, "b t h d"]


def channel_scan_read(
    log_weight: Heads | None,
    v: Heads,
    beta: Float[Tensor, "h d"] | None,
    log_decay: Heads | None = None,
    *,
    causal: bool = True,
    tokens: Tokens | None = None,
    initial_state: dict[str, Tensor] | None = None,
    return_state: bool = False,
    normalize: bool = True,
    backend: str = "auto",
) -> Read | tuple[Read, dict[str, Tensor]]:
    """Mean and free energy of the values under weights of their own channel.

        s_tj(i) = exp(log_weight_ij + sum_{i<r<=t} log_decay_rj)        p_tj(i) = s_tj(i) / sum_i s_tj(i)
        mean_tj = sum_i p_tj(i) v_ij        F_tj = (1 / beta_j) log sum_i p_tj(i) exp(beta_j v_ij)     (Eq. 4, 30, 31)

    log_weight (None: 0), log_decay (None: 0) <= 0, v: (B, T, H, d_v); beta (H, d_v), None for the mean alone.
    causal=False adds the same scores of the sequence read backwards, the present token once.
    normalize=False leaves s as it is: mean = sum s v, F = (1 / beta) log sum s e^{beta v}.
    The state is (B, H, d_v) of `peak`, `total` and `weighted`, and with a beta `energy_peak` and `energy`, float32 at
    least: the scaled sums of `fem.ops.common.scaled_sums`. Gradients pass through it, but not through the peaks.
    """
    given = (x is not None for x in (log_weight, log_decay, beta))
    backend = scan_backend(backend, v.device, "channel_scan", widest(v, log_weight, log_decay), *given)
    if backend == "reference":
        loops = partial(naive_channel_scan_read, log_weight, v, beta, log_decay)
        return by_definition(loops, v.dtype, causal, tokens, normalize, initial_state, return_state)
    terms, state = channel_scan_terms(
        log_weight, v, beta, log_decay, causal=causal, tokens=tokens, initial_state=initial_state, backend=backend
    )
    read = read_of(terms, beta, normalize, v.dtype)
    return (read, state) if return_state else read


def channel_scan_terms(
    log_weight: Heads | None,
    v: Heads,
    beta: Float[Tensor, "h d"] | None,
    log_decay: Heads | None = None,
    *,
    causal: bool = True,
    tokens: Tokens | None = None,
    initial_state: dict[str, Tensor] | None = None,
    backend: str = "plain",
) -> tuple[Terms, dict[str, Tensor]]:
    """The normalised read with the logarithm of its total weight, and the state after the last token."""
    past, state = _one_way(log_weight, v, beta, log_decay, tokens, initial_state, True, backend)
    if causal:
        return past, state
    flip = lambda tensor: None if tensor is None else tensor.flip(1)  # noqa: E731
    back = None if tokens is None else tokens.reversed()
    future, _ = _one_way(flip(log_weight), flip(v), beta, flip(log_decay), back, None, False, backend)
    return merge(past, Terms(*map(flip, future)), None if beta is None else beta.to(past.mean.dtype)), state


def by_definition(loops, dtype, causal, tokens, normalize, initial_state, return_state) -> Read:
    """The read by the loops of `naive`."""
    if initial_state is not None or return_state:
        raise ValueError(
            "backend='reference' reads whole sequences and keeps no state; use backend='auto' with states."
        )
    keep, document = (None, None) if tokens is None else (tokens.keep, tokens.document)
    read = loops(causal=causal, key_mask=keep, segment_ids=document, normalize=normalize)
    return Read(*(None if part is None else part.to(dtype) for part in read))


def _one_way(log_weight, v, beta, log_decay, tokens, state, present: bool, backend: str):
    """The read of what stands before each token, with the token itself if `present`, and the state after the last."""
    shape, wide = v.shape, wide_dtype(log_weight, v, log_decay)
    x, v, a = (None if part is None else part.flatten(2) for part in _seen(log_weight, v, log_decay, tokens))
    beta = None if beta is None else beta.to(wide).flatten()
    if state is None:
        start = Streams.nothing(torch.empty_like(v[:, 0], dtype=wide), beta)
    else:
        start = Streams.of([part.flatten(-2) for part in Streams.from_state(state, wide).parts()])
    if backend == "triton":
        from fem.ops.channel_scan.kernels.launch import channel_scan
    else:
        channel_scan = _plain_scan
    terms, after = channel_scan(a, x, v, beta, start)
    if not present:
        first = leave(start, beta)
        first = (first.log_weight(), first.mean, first.free_energy)
        log_weight, *read = (None if part is None else last_step(part, f) for part, f in zip(terms, first))
        terms = Terms(log_weight if a is None else log_weight + a, *read)
    state = {name: part.unflatten(-1, shape[2:]) for name, part in after.state().items()}
    return Terms(*(None if part is None else part.view(shape) for part in terms)), state


def _plain_scan(log_decay, x, v, beta, start: Streams) -> tuple[Terms, Streams]:
    wide = start.weights.peak.dtype
    v = v.to(wide)
    x = v.new_zeros(()).expand_as(v) if x is None else x.to(wide)
    begin = start.parts()
    parts = _channel_scan(None if log_decay is None else log_decay.to(wide), x, v, beta, begin)
    memory = Memory(*parts[: 3 if beta is None else 4])
    return Terms(memory.log_weight(), memory.mean, memory.free_energy), Streams.of(parts[-len(begin) :])


def _seen(log_weight, v, log_decay, tokens) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Log-weights, values and decays in which masked tokens weigh nothing and documents begin with nothing."""
    x, a = log_weight, log_decay
    if tokens is not None and tokens.keep is not None:
        keep = tokens.keep[:, :, None, None]
        x = torch.where(keep, torch.zeros_like(v) if x is None else x, -math.inf)
        v, a = torch.where(keep, v, 0), None if a is None else torch.where(keep, a, 0)
    if tokens is not None and tokens.start is not None:
        a = torch.where(tokens.start[:, :, None, None], -math.inf, torch.zeros_like(v) if a is None else a)
    return x, v, a


@torch.library.custom_op(
    "fem::channel_scan",
    mutates_args=(),
    schema="(Tensor? log_decay, Tensor x, Tensor v, Tensor? beta, Tensor[] start) -> Tensor[]",
)
def _channel_scan(log_decay, x, v, beta, start):
    """The memory after every token, the energies it was made of, and the streams after the last token."""
    before = Streams.of(start)
    weights = accumulate(log_decay, x, v, before.weights)
    energies = None if beta is None else accumulate(log_decay, x + beta * v, None, before.energies)
    streams = Streams(weights, energies)
    made_of = [] if energies is None else [energies.peak, energies.sums[0]]
    return [*leave(streams, beta).parts(), *made_of, *streams.last().parts()]


@_channel_scan.register_fake
def _(log_decay, x, v, beta, start):
    return [
        *(x.new_empty(x.shape) for _ in range(3 if beta is None else 6)),
        *(torch.empty_like(part) for part in start),
    ]


@torch.library.custom_op(
    "fem::channel_scan_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor? log_decay, Tensor x, Tensor v, Tensor? beta, Tensor[] start, Tensor[] after) "
    "-> Tensor[]",
)
def _channel_scan_backward(grads, log_decay, x, v, beta, start, after):
    """Gradients of x, v, the start without its peak, then, where there are any, of beta and log_decay."""
    before, memory = Streams.of(start), Memory(*after[: 3 if beta is None else 4])
    *d_memory, d_last, d_last_energy = grads if beta is not None else [*grads, None]
    energy_peak, energy = (None, None) if beta is None else after[4:6]
    d_weights, d_energies, d_beta = leave_backward(Memory(None, *d_memory), memory, energy, beta)
    d_weights[:, :, -1] += d_last
    sums = torch.stack([memory.total, memory.total * memory.mean])
    weights = accumulate_backward(d_weights, log_decay, x, v, before.weights, Sums(memory.peak, sums))
    d_x, d_v, d_decay = weights.added.mul_(weights.weight), weights.v, weights.log_decay
    if beta is None:
        return [d_x, d_v, weights.start, *([] if d_decay is None else [d_decay])]
    d_energies[:, :, -1] += d_last_energy
    after = Sums(energy_peak, energy.unsqueeze(0))
    energies = accumulate_backward(d_energies, log_decay, x + beta * v, None, before.energies, after)
    d_z = energies.added.mul_(energies.weight)
    d_beta = d_beta.addcmul_(d_z, v).sum((0, 1))
    d_v.addcmul_(beta, d_z)
    d_x.add_(d_z)
    d_decays = [] if d_decay is None else [d_decay.add_(energies.log_decay)]
    return [d_x, d_v, weights.start, energies.start, d_beta, *d_decays]


@_channel_scan_backward.register_fake
def _(grads, log_decay, x, v, beta, start, after):
    like = [x, v, *start[1::2], beta, log_decay]
    return [part.new_empty(part.shape) for part in like if part is not None]


def _save(ctx, inputs, output):
    log_decay, x, v, beta, start = inputs
    ctx.save_for_backward(log_decay, x, v, beta, *start, *output[: 3 if beta is None else 6])
    ctx.parts = len(start)


def _differentiate(ctx, grads):
    log_decay, x, v, beta, *rest = ctx.saved_tensors
    start, after = rest[: ctx.parts], rest[ctx.parts :]
    given = [*grads[1 : 3 if beta is None else 4], *grads[len(after) :][1::2]]
    gradients = iter(_channel_scan_backward(given, log_decay, x, v, beta, start, after))
    d_x, d_v = next(gradients), next(gradients)
    d_start = [next(gradients) if part % 2 else None for part in range(ctx.parts)]
    d_beta, d_decay = (None if part is None else next(gradients) for part in (beta, log_decay))
    return d_decay, d_x, d_v, d_beta, d_start


_channel_scan.register_autograd(_differentiate, setup_context=_save)
