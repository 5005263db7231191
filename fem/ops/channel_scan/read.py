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
from fem.ops.common.backend import scan_backend
from fem.ops.common.composed import fused
from fem.ops.common.naive_rows import by_definition
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import NO_WEIGHT, Read, Terms, nothing_read
from fem.ops.common.scaled_sums import Sums, last_step, start_of, state_of
from fem.ops.common.scan import ScanCall, read_pair, split_channels

Heads = Float[Tensor, "b t h d"]


def channel_scan_read(
    log_weight: Heads | None,
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Heads | None = None,
    free_values: Float[Tensor, "b t h df"] | None = None,
    *,
    call: ScanCall,
) -> Read | tuple[Read, dict[str, Tensor]]:
    """`fem.functional.channel_scan_read` of checked arguments.

    The state is (B, H, d_v) of `peak`, `total` and `weighted`, the scaled sums of `fem.ops.common.scaled_sums`, and
    with a beta `free_energy`, float32 at least. Gradients pass through it, but not through the peak.
    """
    if free_values is not None:
        widths = v.shape[-1], free_values.shape[-1]
        x, a = (split_channels(x, widths) for x in (log_weight, log_decay))
        reads = [
            partial(channel_scan_read, x[0], v, None, a[0]),
            partial(channel_scan_read, x[1], free_values, beta, a[1]),
        ]
        return read_pair(reads, v, free_values, call)
    backend = scan_backend(call.backend, v.device, compute_dtype(v, log_weight, log_decay))
    if backend == "reference" and 0 not in v.shape[:2]:
        loops = partial(naive_channel_scan_read, log_weight, v, beta, log_decay)
        return by_definition(loops, v.dtype, call)
    if backend == "triton" and fused(call, log_weight, v, beta, log_decay):
        inputs = _seen(log_weight, v, log_decay, call.tokens)
        x, values, a = (None if part is None else part.flatten(2) for part in inputs)
        sums = composed(x, values, None if beta is None else beta.float().flatten(), a)
        return call.result(Terms(*(part.view(v.shape) for part in sums)), None, beta, v.dtype)
    terms, state = call.both_ways(_one_way, (log_weight, v, log_decay), beta)
    return call.result(terms, state, beta, v.dtype)


def _one_way(log_weight, v, log_decay, beta, tokens, state, present: bool):
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    shape, dtype = v.shape, compute_dtype(log_weight, v, log_decay)
    x, v, a = (None if part is None else part.flatten(2) for part in _seen(log_weight, v, log_decay, tokens))
    beta = None if beta is None else beta.to(dtype).flatten()
    like = v.new_empty(shape[0], v.shape[2], dtype=dtype)
    start = start_of(state, None if beta is None else beta.view(shape[2:]), like)
    if 0 in shape[:2]:
        state = state_of(Sums(*start[:2]), *start[2:])
        state = {name: part.unflatten(-1, shape[2:]) for name, part in state.items()}
        return nothing_read(v.to(dtype), shape, beta, x, v, a, *start), state
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
