"""The prior of a selective state space model (Mamba): per value channel, N decaying states that a token reads."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import found, scan_backend
from fem.ops.common.naive_rows import by_definition
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Read, Terms, beside, log, read_free
from fem.ops.common.scan import ScanCall, memory_before, read_pair, split_channels
from fem.ops.common.slabs import SlabScan
from fem.ops.common.sums import Sums, entering, leaving, looked_at, shift_for, suspect
from fem.ops.common.tokens import filled
from fem.ops.ssm.naive_ssm import naive_ssm_read
from fem.ops.ssm.ssm_log_space import ssm_by_prefixes, ssm_step
from fem.ops.ssm.state_scan import state_scan

SLAB_STATES = 2**20  # of a slab's states, between borders that training keeps
MOST_STATES = 256  # of a channel, which kernels take
LEAST_SHIFT = -25.0  # of a row: rows below e^-60 of it are in doubt, before the gradient of D overflows
OURS, STATELESS = 1, 2  # by our kernel; by any, as no state goes on

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
    values = f if v.shape[-1] == 0 else v
    temperature = beta if beta.numel() else None
    if call.backend == "reference" and 0 not in v.shape[:2]:
        return by_definition(partial(naive_ssm_read, delta, A, B, C, D, values, temperature), values.dtype, call)
    terms, state = ssm_terms(delta, A, B, C, D, v, f, beta, logs, call)
    return call.result(terms, state, beta, values.dtype, temperature)


def ssm_terms(delta, A, B, C, D, v, f, beta, logs, call: ScanCall) -> tuple[Terms, dict[str, Tensor]]:
    """`ssm_read` as normalised terms with the logarithm of their total weight, and the state."""
    backend = scan_backend(call.backend, v.device, compute_dtype(delta, A, B, C, D, v, f), "triton")
    kernels = OURS if backend == "triton" and A.shape[-1] <= MOST_STATES else 0
    if kernels and call.initial_state is None and not call.return_state:
        kernels = STATELESS
    along = (delta, B, C, *(logs or (None, None, None)), v, f)
    terms, state = call.both_ways(partial(_ssm_one_way, A, D, kernels), along, beta)
    return terms, {name: part for name, part in state.items() if part.shape[-1]}


def _ssm_one_way(A, D, kernels: int, delta, B, C, log_delta, log_b, log_c, v, f, beta, tokens, state, present: bool):
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    heads, dtype = v.shape[2], compute_dtype(delta, A, B, C, D, v, f)
    flat = lambda x: None if x is None else x.flatten(2).to(dtype)  # noqa: E731
    delta, v, f, log_delta = map(flat, (delta, v, f, log_delta))
    B, C, log_b, log_c = (None if x is None else x.to(dtype) for x in (B, C, log_b, log_c))
    keep = None if tokens.keep is None else tokens.keep.unsqueeze(-1)
    if keep is not None:  # masked tokens weigh and decay nothing
        delta, B, C = (torch.where(keep, x, 0) for x in (delta, B, C))
        log_delta, log_b, log_c = (
            None if x is None else torch.where(keep, x, -math.inf) for x in (log_delta, log_b, log_c)
        )
        v, f = filled(v, keep), filled(f, keep)
    if log_delta is not None:
        B = C = None
    a, D, beta = A.to(dtype).flatten(0, 1).T.contiguous(), D.to(dtype).flatten() if present else None, beta.to(dtype)
    inputs = (delta, B, C, log_delta, log_b, log_c, tokens.start, v, f, a, D, beta.flatten())
    cells = ((v.shape[0], len(a), x.shape[-1]) for x in (delta, v, f))
    terms, after = SSM_SCAN(memory_before(state, v, *cells), kernels if present else 0, *inputs)
    if keep is not None:  # a masked token does not even see itself through D
        terms = Terms(*(torch.where(keep, x, nothing) for x, nothing in zip(terms, (LOG_ZERO, 0, 0))))
    by_heads = lambda x: x.unflatten(-1, (heads, x.shape[-1] // heads))  # noqa: E731
    return Terms(*map(by_heads, terms)), {name: by_heads(x) for name, x in after._asdict().items()}


def _ssm_slab(
    memory: Terms, kernels: int, delta, b, c, log_delta, log_b, log_c, opens, v, f, a, skip, beta
) -> tuple[Terms, Terms, int] | None:
    """What a slab reads, by sums of [v | e | 1] in every state, the memory after it, and 0 entries; None where it is in
    doubt. Waits for the device."""
    (into, heaviest), (out, most) = _scaled(b, log_b), _scaled(c, log_c)
    heights = (log(delta) if log_delta is None else log_delta).detach() + heaviest
    highest = f.detach().amax(1, keepdim=True)
    shift = shift_for(memory, highest, heights.amax(1, keepdim=True), beta, light=0.0).about(f, beta, 1)
    relative = heaviest - shift.weight
    weight = delta * relative.exp() if log_delta is None else (log_delta + relative).exp()
    energy = shift.exponent(f, beta).exp()
    items = Sums(beside(weight, v) * v, beside(weight, f) * energy, weight)
    columns, first = torch.cat(items, -1), torch.cat(entering(memory, shift, beta), -1)
    if kernels == STATELESS and opens is None and found("mamba_ssm"):
        rows, last = _by_mamba(columns, delta, weight, a, into, out), first
    elif kernels:
        from fem.ops.ssm.sequential import sequential_scan  # by Triton, which the library does not require

        rows, last = sequential_scan(delta, a, into, out, columns, opens, first)
    else:
        rows, last = state_scan(delta, a, into, out, columns, opens, first, skip is not None)
    widths = [x.shape[-1] for x in items]
    rows, last = (Sums(*x.split_with_sizes(widths, -1)) for x in (rows, last))
    at = shift.weight + most  # (B, T, D), the logarithm of the weights that rows are relative to
    if skip is not None:
        own = torch.maximum(at, log(skip.detach()))
        at, own = own.clamp_min(LEAST_SHIFT), (at - own.clamp_min(LEAST_SHIFT)).exp()
        itself = skip * (-at).exp()
        pairs = zip(rows, (v, energy, torch.ones_like(weight)))
        rows = Sums(*(beside(own, x) * x + beside(itself, x) * y for x, y in pairs))
    goes_on = kernels != STATELESS  # else the last states, which mamba-ssm does not return, are read by nobody
    suspicion = suspect(rows) | suspect(last) if goes_on else suspect(rows)
    suspected = looked_at(suspicion, f, beta, kernels)
    if suspected is None:
        return None
    read, doubt = leaving(rows, shift._replace(weight=at), beta, suspected=suspected)
    after, lost = leaving(last, shift, beta, suspected=suspected) if goes_on else (memory, None)
    if doubt is not None:
        entered = (memory.log_weight > NO_WEIGHT).any(1, keepdim=True) | ((weight > 0).cumsum(1) > 0)
        alive = (out > 0).any(-1, keepdim=True) & entered
        if bool((doubt & (alive if skip is None else alive | (skip > 0))).any()):
            return None
    if lost is not None:
        entered = (into > 0).any(1).unsqueeze(-1) & (weight > 0).any(1, keepdim=True)
        if bool((lost & ((memory.log_weight > NO_WEIGHT) | entered)).any()):
            return None
    return read, after, 0


def _scaled(x: Tensor | None, log_x: Tensor | None) -> tuple[Tensor, Tensor]:
    """x in units of each token's largest entry, and the logarithm of that, (B, T, 1), which has no gradient.

    Of a token whose entries are all 0, whose gradients are not, in units of the others' largest.
    """
    if log_x is None:
        most = x.detach().amax(-1, keepdim=True)
        most = torch.where(most > 0, most, most.amax(1, keepdim=True))
        most = torch.where(most > 0, most, 1)
        return x / most, most.log()
    most = log_x.detach().amax(-1, keepdim=True).clamp_min(NO_WEIGHT)
    return (log_x - most).exp(), most


def mamba_kernel(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y_t = sum_n c_tn h_tn, h_tn = e^{delta_t a_n} h_{t-1,n} + delta_t b_tn u_t, for u, delta, y (B, D, T), a (D, N),
    b and c (B, N, T), by mamba-ssm."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(u, delta, a, b, c)


def _by_mamba(items: Tensor, delta: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y: mamba-ssm's kernel multiplies its inputs by delta, which items have been already."""
    streams = items.shape[-1] // a.shape[-1]
    time_last = lambda x: x.transpose(1, 2).contiguous()  # noqa: E731
    steps = delta.repeat(1, 1, streams)
    u = torch.where(steps > 0, items / torch.where(steps > 0, steps, 1), 0)
    return time_last(mamba_kernel(*map(time_last, (u, steps)), a.T.repeat(streams, 1), *map(time_last, (b, c))))


def _ssm_slab_size(delta, b, c, log_delta, log_b, log_c, opens, v, f, a, skip, beta) -> int:
    """Tokens of a slab; under a compiler a symbol."""
    return torch.sym_max(16, SLAB_STATES // torch.sym_max(1, delta.shape[0] * a.shape[0] * a.shape[1]))


ALONG = ("delta", "b", "c", "log_delta", "log_b", "log_c", "opens", "v", "f")
SSM_SCAN = SlabScan(
    "ssm_scan", ALONG, ("a", "skip", "beta"), _ssm_slab, ssm_step, _ssm_slab_size, exact=ssm_by_prefixes
)
