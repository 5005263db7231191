"""The prior of a selective state space model (Mamba): per value channel, N decaying states that a token reads."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import portable, scan_backend, transformed
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Read, Terms, beside, log, read_free
from fem.ops.common.scan import ScanCall, memory_before, read_pair, split_channels
from fem.ops.common.slabs import SlabScan
from fem.ops.common.sums import Sums, entering, leaving, shift_for, suspect
from fem.ops.common.tokens import Tokens, filled
from fem.ops.ssm.ssm_log_space import SsmInputs, ssm_by_prefixes, ssm_step
from fem.ops.ssm.state_scan import state_scan

SLAB_STATES = 2**20  # of a slab's states, between borders that training keeps
MOST_STATES = 256  # of a channel, which kernels take
LEAST_SHIFT = -25.0  # of a row: rows below e^-60 of it are in doubt, before the gradient of D overflows

Heads = Float[Tensor, "b t h d"]


def ssm_read(
    delta: Heads,
    A: Float[Tensor, "h d n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, "h d"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    free_values: Float[Tensor, "b t h df"] | None = None,
    logs: tuple[Heads, Float[Tensor, "b t n"], Float[Tensor, "b t n"]] | None = None,
    *,
    call: ScanCall,
) -> Read | tuple[Read, dict[str, Tensor]]:
    """`fem.functional.ssm_read` of checked arguments.

    The state is that of `channel_scan_read` for each of the N states, (B, N, H, d).
    logs: log delta, log B and log C, exact where delta, B or C themselves have underflowed.
    Training keeps the states at the borders of slabs and computes the others again: memory O(T d_v), not O(T d_v N).
    """
    if free_values is None:
        return _ssm_read(delta, A, B, C, D, v, *read_free(v, None, beta), logs, call=call)
    widths = v.shape[-1], free_values.shape[-1]
    delta, D, log_delta = (split_channels(x, widths) for x in (delta, D, None if logs is None else logs[0]))
    A = split_channels(A, widths, 1)
    values = (v, *read_free(v, None, None)), (free_values[..., :0], free_values, beta)
    reads = [
        partial(_ssm_read, delta[n], A[n], B, C, D[n], *values[n], None if logs is None else (log_delta[n], *logs[1:]))
        for n in range(2)
    ]
    return read_pair(reads, v, free_values, call)


def _ssm_read(delta, A, B, C, D, v, f, beta, logs, *, call: ScanCall) -> Read | tuple[Read, dict[str, Tensor]]:
    """Of the d channels that v has, or f, or both."""
    terms, state = ssm_terms(delta, A, B, C, D, v, f, beta, logs, call)
    return call.result(terms, state, beta, v.dtype if v.shape[-1] else f.dtype, beta if beta.numel() else None)


def ssm_terms(delta, A, B, C, D, v, f, beta, logs, call: ScanCall) -> tuple[Terms, dict[str, Tensor]]:
    """`ssm_read` as normalised terms with the logarithm of their total weight, and the state."""
    dtype = call.dtype(delta, A, B, C, D, v, f)
    backend = scan_backend(call.backend, v.device, dtype, "triton")
    backend = "plain" if backend == "triton" and A.shape[-1] > MOST_STATES else backend
    logs = logs or (log(x.to(dtype)) for x in (delta, B, C))
    one_way = partial(_ssm_one_way, A.to(dtype), D.to(dtype), backend)
    terms, state = call.both_ways(one_way, (delta, *logs, v, f), beta, widen=False)
    return terms, {name: part for name, part in state.items() if part.shape[-1]}


def _ssm_one_way(A, D, backend, delta, log_delta, log_b, log_c, v, f, beta, tokens: Tokens, state, present):
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    heads, keep = v.shape[2], None if tokens.keep is None else tokens.keep.unsqueeze(-1)
    delta, log_delta, v, f = (x.flatten(2) for x in (delta, log_delta, v, f))
    delta, log_delta, log_b, log_c = (x.to(A.dtype) for x in (delta, log_delta, log_b, log_c))
    if keep is not None:  # masked tokens weigh and decay nothing
        delta, v, f = torch.where(keep, delta, 0), filled(v, keep), filled(f, keep)
        log_delta, log_b, log_c = (torch.where(keep, x, -math.inf) for x in (log_delta, log_b, log_c))
    a, skip, rate = A.flatten(0, 1).T, D.flatten(), beta.to(A.dtype).flatten()
    x = SsmInputs(delta, log_delta, log_b, log_c, tokens.start, v, f, a, skip, rate)
    terms, after = _scanned(x if present else _before(x), state, backend)
    if not present:
        terms = Terms(*(part[:, ::2] for part in terms))
    if keep is not None:  # a masked token does not even see itself through D
        terms = Terms(*(torch.where(keep, part, nothing) for part, nothing in zip(terms, (LOG_ZERO, 0, 0))))
    by_heads = lambda part: part.unflatten(-1, (heads, part.shape[-1] // heads))  # noqa: E731
    return Terms(*map(by_heads, terms)), {name: by_heads(part) for name, part in after._asdict().items()}


def _scanned(x: SsmInputs, state, backend: str) -> tuple[Terms, Terms]:
    """What every token reads, and the memory after the last: by kernels, or by sums."""
    shapes = [(x.v.shape[0], len(x.a), part.shape[-1]) for part in (x.delta, x.v, x.f)]
    memory = None if state is None else memory_before(state, x.delta, *shapes)
    if backend == "triton" and not (portable() or transformed(*x, *(memory or ()))):
        one = torch.compiler.is_compiling() and x.delta.shape[1] == 1  # inductor fuses it with what stands around it
        if x.delta.numel() and not one:
            from fem.ops.ssm.fused_ssm import states_by_kernels  # by Triton, which the library does not require

            return states_by_kernels(memory, x)
    x = x._replace(a=x.a.contiguous(), v=x.v.to(x.delta.dtype), f=x.f.to(x.delta.dtype))
    backend = "plain" if backend == "triton" else backend  # the sums have no kernels of their own
    return SSM_SCAN(memory or memory_before(None, x.delta, *shapes), backend, x)


def _before(x: SsmInputs) -> SsmInputs:
    """Every token twice: one that decays what was before and reads it, and one that is added to it, without a decay."""
    twice = SsmInputs(*(y if n > 6 or y is None else y.repeat_interleave(2, 1) for n, y in enumerate(x)))
    adds = (torch.arange(twice.v.shape[1], device=x.v.device) % 2 == 1)[:, None]
    return twice._replace(
        delta=torch.where(adds, 0, twice.delta),
        log_delta=torch.where(adds, twice.log_delta, -math.inf),
        opens=None if x.opens is None else twice.opens & ~adds[:, 0],
        skip=torch.zeros_like(x.skip),
    )


class _SsmScan(SlabScan):
    name, Inputs = "ssm_scan", SsmInputs
    exact = staticmethod(ssm_by_prefixes)
    step = staticmethod(ssm_step)

    def size(self, x):
        return torch.sym_max(16, SLAB_STATES // torch.sym_max(1, x.delta.shape[0] * x.a.numel()))

    def slab(self, memory, kernels, x):
        """By sums of [v | e | 1] in every state, and through the skip. Waits for the device."""
        (into, heaviest), (out, most) = _scaled(x.log_b), _scaled(x.log_c)
        heights, highest = x.log_delta.detach() + heaviest, x.f.detach().amax(1, keepdim=True)
        shift = shift_for(memory, highest, heights.amax(1, keepdim=True), x.beta, light=0.0).about(x.f, x.beta, 1)
        weight, energy = (x.log_delta + (heaviest - shift.weight)).exp(), shift.exponent(x.f, x.beta).exp()
        items = Sums(beside(weight, x.v) * x.v, beside(weight, x.f) * energy, weight)
        widths, first = [part.shape[-1] for part in items], torch.cat(entering(memory, shift, x.beta), -1)
        sums = state_scan(x.delta, x.a, into, out, torch.cat(items, -1), x.opens, first)
        rows, last = (Sums(*part.split_with_sizes(widths, -1)) for part in sums)
        own = Sums(x.v, energy, torch.ones_like(weight))
        rows, level = _with_skip(rows, shift.weight + most, own, x.skip)

        suspected = bool(suspect(rows) | suspect(last))
        read, doubt = leaving(rows, shift._replace(weight=level), x.beta, suspected=suspected)
        after, lost = leaving(last, shift, x.beta, suspected=suspected)
        held = memory.log_weight > NO_WEIGHT
        if doubt is not None:
            entered = held.any(1, keepdim=True) | ((weight > 0).cumsum(1) > 0)
            if bool((doubt & ((out > 0).any(-1, keepdim=True) & entered | (x.skip > 0))).any()):
                return None
        if lost is not None:
            entered = (into > 0).any(1).unsqueeze(-1) & (weight > 0).any(1, keepdim=True)
            if bool((lost & (held | entered)).any()):
                return None
        return read, after, 0


SSM_SCAN = _SsmScan()


def _scaled(log_x: Tensor) -> tuple[Tensor, Tensor]:
    """x in units of each token's largest entry, and the logarithm of that, (B, T, 1), which has no gradient."""
    most = log_x.detach().amax(-1, keepdim=True).clamp_min(NO_WEIGHT)
    return (log_x - most).exp(), most


def _with_skip(rows: Sums, before: Tensor, own: Sums, skip: Tensor) -> tuple[Sums, Tensor]:
    """The sums with a token's own items through the skip, and the logarithm of the weights that they are relative to.

    before: that logarithm of the rows, (B, T, D).
    """
    level = torch.maximum(before, log(skip.detach())).clamp_min(LEAST_SHIFT)
    recalled, present = (before - level).exp(), skip * (-level).exp()
    pairs = zip(rows, own)
    return Sums(*(beside(recalled, part) * part + beside(present, part) * item for part, item in pairs)), level
