"""The read of priors whose score is a weight per value channel that may decay: `rnn_softmax` (AFT), `rnn_decay`."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.channel_scan.composed import composed
from fem.ops.channel_scan.naive import naive_channel_scan_read
from fem.ops.channel_scan.plain import channel_scan
from fem.ops.common.backend import scan_backend, widest
from fem.ops.common.composed import fused
from fem.ops.common.naive_rows import by_definition
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import NO_WEIGHT, Read, Terms, connected_zeros, merge, nothing_read, read_of
from fem.ops.common.scaled_sums import Sums, last_step, start_of, state_of
from fem.ops.common.tokens import Tokens

Heads = Float[Tensor, "b t h d"]


def channel_scan_read(
    log_weight: Heads | None,
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Heads | None = None,
    free_values: Float[Tensor, "b t h df"] | None = None,
    *,
    causal: bool = True,
    tokens: Tokens | None = None,
    initial_state: dict[str, Tensor] | None = None,
    return_state: bool = False,
    normalize: bool = True,
    backend: str = "auto",
) -> Read | tuple[Read, dict[str, Tensor]]:
    """`fem.functional.channel_scan_read` of checked arguments, with `tokens` in the place of masks and documents.

    The state is (B, H, d_v) of `peak`, `total` and `weighted`, the scaled sums of `fem.ops.common.scaled_sums`, and
    with a beta `free_energy`, float32 at least. Gradients pass through it, but not through the peak.
    """
    options = {"causal": causal, "tokens": tokens, "normalize": normalize, "backend": backend}
    if free_values is not None:
        widths = v.shape[-1], free_values.shape[-1]
        x, a = (split_channels(x, widths) for x in (log_weight, log_decay))
        reads = [
            partial(channel_scan_read, x[0], v, None, a[0]),
            partial(channel_scan_read, x[1], free_values, beta, a[1]),
        ]
        return read_pair(reads, v, free_values, initial_state, return_state, options)
    backend = scan_backend(backend, v.device, widest(v, log_weight, log_decay))
    if backend == "reference" and 0 not in v.shape[:2]:
        loops = partial(naive_channel_scan_read, log_weight, v, beta, log_decay)
        return by_definition(loops, v.dtype, causal, tokens, initial_state, return_state, normalize=normalize)
    if backend == "triton" and fused(causal, initial_state, return_state, log_weight, v, beta, log_decay):
        x, values, a = (None if part is None else part.flatten(2) for part in _seen(log_weight, v, log_decay, tokens))
        sums = composed(x, values, None if beta is None else beta.float().flatten(), a)
        return read_of(Terms(*(part.view(v.shape) for part in sums)), beta, normalize, v.dtype)
    terms, state = channel_scan_terms(
        log_weight, v, beta, log_decay, causal=causal, tokens=tokens, initial_state=initial_state
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
) -> tuple[Terms, dict[str, Tensor]]:
    """The normalised read with the logarithm of its total weight, and the state after the last token."""
    past, state = _one_way(log_weight, v, beta, log_decay, tokens, initial_state, True)
    if causal:
        return past, state
    flip = lambda tensor: None if tensor is None else tensor.flip(1)  # noqa: E731
    back = None if tokens is None else tokens.reversed()
    future, _ = _one_way(flip(log_weight), flip(v), beta, flip(log_decay), back, None, False)
    return merge(past, Terms(*map(flip, future)), None if beta is None else beta.to(past.mean.dtype)), state


def split_channels(x: Tensor | None, widths: tuple[int, int], dim: int = -1) -> tuple[Tensor | None, ...]:
    """What belongs to the channels of v, and to those of the free values."""
    return (None, None) if x is None else x.split(widths, dim)


def read_pair(reads, v: Tensor, free_values: Tensor, state, return_state: bool, options: dict):
    """The mean of v by the first of two reads, and the free energy of the free values by the second.

    Channels do not know each other, so a pair is two reads, and its state two states. A read of no channel is left out.
    """
    results, after = [v, free_values], {}
    for n, name in enumerate(("mean.", "free.")):
        if results[n].shape[-1] == 0:
            continue
        memory = {key.removeprefix(name): x for key, x in (state or {}).items() if key.startswith(name)} or None
        read = reads[n](initial_state=memory, return_state=return_state, **options)
        read, memory = read if return_state else (read, {})
        results[n] = read[n]
        after |= {name + key: x for key, x in memory.items()}
    return (Read(*results), after) if return_state else Read(*results)


def _one_way(log_weight, v, beta, log_decay, tokens, state, present: bool):
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    shape, dtype = v.shape, compute_dtype(log_weight, v, log_decay)
    x, v, a = (None if part is None else part.flatten(2) for part in _seen(log_weight, v, log_decay, tokens))
    beta = None if beta is None else beta.to(dtype).flatten()
    like = v.new_empty(shape[0], v.shape[2], dtype=dtype)
    start = start_of(state, None if beta is None else beta.view(shape[2:]), like)
    if 0 in shape[:2]:
        state = state_of(Sums(*start[:2]), *start[2:])
        state = {name: part.unflatten(-1, shape[2:]) for name, part in state.items()}
        return nothing_read(connected_zeros(v.to(dtype), shape, x, v, a, beta, *start), beta), state
    terms, last = channel_scan(*(None if part is None else part.to(dtype) for part in (a, x, v)), beta, start)
    free_energy = None if beta is None else terms.free_energy[:, -1].clone()
    if not present:
        first = (start[0] + start[1][0].log(), start[1][1] / start[1][0], *start[2:])
        log_weight, *read = (None if part is None else last_step(part, f) for part, f in zip(terms, (*first, None)))
        log_weight = log_weight if a is None else log_weight + a
        seen = log_weight > NO_WEIGHT  # else the tokens before belong to another document
        terms = Terms(log_weight, *(None if part is None else torch.where(seen, part, 0) for part in read))
    state = {name: part.unflatten(-1, shape[2:]) for name, part in state_of(last, free_energy).items()}
    return Terms(*(None if part is None else part.view(shape) for part in terms)), state


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
