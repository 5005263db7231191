"""The read of priors whose score is a weight per value channel that may decay: `rnn_softmax` (AFT), `rnn_decay`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import portable, scan_backend, transformed
from fem.ops.common.cells import by_prefixes, cell_step, zero_unseen
from fem.ops.common.precision import LARGEST_LOG_WEIGHT, compute_dtype, upcast
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Read, Terms, beside, read_free
from fem.ops.common.recurrence import recurrence
from fem.ops.common.scan import ScanCall, memory_before, read_pair, split_channels
from fem.ops.common.slabs import SlabScan
from fem.ops.common.sums import Sums, entering, leaving, shift_for, suspect
from fem.ops.common.tokens import Tokens

SLAB_VALUES = 2**16  # of a slab's values: intermediate results fit the CPU's cache

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

    state: the last token's log_weight, mean and free_energy, (B, H, d) each, in fp32 (float64 for float64).
    """
    if free_values is None:
        return _channel_read(log_weight, log_decay, v, *read_free(v, None, beta), call=call)
    x, a = (split_channels(part, (v.shape[-1], free_values.shape[-1])) for part in (log_weight, log_decay))
    means = partial(_channel_read, x[0], a[0], v, *read_free(v, None, None))
    return read_pair(
        [means, partial(_channel_read, x[1], a[1], free_values[..., :0], free_values, beta)], v, free_values, call
    )


def _channel_read(x, a, v, f, beta, *, call: ScanCall) -> Read | tuple[Read, dict[str, Tensor]]:
    """Of the d channels that v has, or f, or both."""
    backend = scan_backend(call.backend, v.device, compute_dtype(x, a, v, f), "triton")
    one_way = partial(_channel_one_way, backend=backend)
    terms, state = call.both_ways(one_way, (x, a, v, f), beta, widen=backend != "triton")  # kernels widen themselves
    state = {name: part for name, part in state.items() if part.shape[-1]}
    return call.result(terms, state, beta, v.dtype if v.shape[-1] else f.dtype, beta if beta.numel() else None)


def _channel_one_way(
    x, a, v, f, beta, tokens: Tokens, state, present: bool, backend: str
) -> tuple[Terms, dict[str, Tensor]]:
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    heads = v.shape[2]
    x, a, v, f = (None if part is None else part.flatten(2) for part in (x, a, v, f))
    x, a, v, f = _weighed(x, a, v, f, tokens, present)
    inputs = ChannelInputs(x, a, v, f, beta.to(compute_dtype(v, f)).flatten())
    memory = memory_before(state, inputs.beta, *((v.shape[0], 1, part.shape[-1]) for part in (x, v, f)))
    if backend == "triton" and x.numel() and not (portable() or transformed(*inputs, *memory)):
        from fem.ops.channel_scan.channel_kernels import channels_by_kernels  # by Triton, which is not required

        terms, after = channels_by_kernels(memory, *inputs)
    else:
        terms, after = CHANNEL_SCAN(memory, backend, CHANNEL_SCAN._cast(inputs, upcast))
    by_heads = lambda part: part.unflatten(-1, (heads, part.shape[-1] // heads))  # noqa: E731
    return Terms(*map(by_heads, terms)), {name: by_heads(part.squeeze(1)) for name, part in after._asdict().items()}


def _weighed(x, a, v, f, tokens: Tokens, present: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Log-weights and decays in which masked tokens weigh and decay nothing, and documents forget what was before."""
    x = (v if v.shape[-1] else f).new_zeros(()).expand(*v.shape[:2], max(v.shape[2], f.shape[2])) if x is None else x
    if not (present and tokens.keep is None and tokens.start is None):  # float16 does not hold LOG_ZERO
        x, a = (part.float() if part is not None and part.dtype == torch.float16 else part for part in (x, a))
    if tokens.keep is not None:
        keep = tokens.keep[..., None]
        x, v, f = torch.where(keep, x, LOG_ZERO), torch.where(keep, v, 0), torch.where(keep, f, 0)
        a = None if a is None else torch.where(keep, a, 0)
    if tokens.start is not None:
        a = torch.where(tokens.start[..., None], LOG_ZERO, torch.zeros_like(x) if a is None else a)
    if not present:  # each token comes one later, and so is never read by its own
        later = lambda part: torch.cat([part[:, :1], part[:, :-1]], 1)  # noqa: E731
        x, v, f = torch.cat([torch.full_like(x[:, :1], LOG_ZERO), x[:, :-1]], 1), later(v), later(f)
        x = x if a is None else (upcast(x) + a).clamp_min(LOG_ZERO)
    return x, a, v, f


class ChannelInputs(NamedTuple):
    """What the scan of channels reads, heads side by side."""

    log_weight: Float[Tensor, "b t c"]
    log_decay: Float[Tensor, "b t c"] | None  # into each token
    v: Float[Tensor, "b t dv"]
    f: Float[Tensor, "b t df"]
    beta: Float[Tensor, " df"]


class _ChannelScan(SlabScan):
    name, Inputs = "channel_scan", ChannelInputs

    def step(self, memory, x):
        after = zero_unseen(cell_step(memory, *x))
        return after, after

    def exact(self, memory, x):
        return by_prefixes(memory, *x)

    def size(self, x):
        return torch.sym_max(16, SLAB_VALUES // torch.sym_max(1, x.log_weight.shape[0] * x.log_weight.shape[2]))

    def rough(self, x):
        """Whether beta f is added to log-weights so large that the sum loses digits."""
        heaviest = lambda y: torch.where(y > NO_WEIGHT, y, 0).abs().amax()  # noqa: E731
        return bool(x.f.shape[-1]) and bool(heaviest(x.log_weight) > LARGEST_LOG_WEIGHT)

    def slab(self, memory, kernels, x):
        """By sums of [v | e | 1]."""
        log_weight, decay, v, f, beta = x
        there = log_weight.detach() > NO_WEIGHT
        highest = torch.where(beside(there, f), f.detach(), -torch.inf).amax(1, keepdim=True)
        heaviest = log_weight.detach().amax(1, keepdim=True)
        shift = shift_for(memory, highest, heaviest, beta, light=0.0).about(f, beta, 1)
        relative = log_weight - shift.weight
        weight, energy = relative.exp(), (beside(relative, f) + shift.exponent(f, beta)).exp()
        items = Sums(beside(weight, v) * v, energy, weight)
        sums = _running(decay, items, entering(memory, shift, beta))
        read, doubt = leaving(sums, shift, beta, suspected=bool(suspect(sums)))
        if doubt is not None:
            held = (memory.log_weight > NO_WEIGHT) | (there.cumsum(1) > 0)
            if bool((doubt & held).any()):
                return None
        return read, Terms(*(part[:, -1:] for part in read)), 0


CHANNEL_SCAN = _ChannelScan()


def _running(decay: Tensor | None, items: Sums, first: Sums) -> Sums:
    """The sums after every token, from the first: one recurrence for all that have a channel."""
    there = [name for name, part in items._asdict().items() if part.shape[-1]]
    u, state = (torch.stack([getattr(parts, name) for name in there], 2) for parts in (items, first))
    sums = recurrence(None if decay is None else decay.unsqueeze(2), u, state.squeeze(1)).unbind(2)
    return items._replace(**dict(zip(there, sums)))
