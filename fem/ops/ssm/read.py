"""The prior of a selective state space model (Mamba): per value channel, N decaying states that a token reads."""

from __future__ import annotations

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import scan_backend
from fem.ops.common.composed import fused
from fem.ops.common.naive_rows import by_definition
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import LOG_ZERO, Read, Terms, nothing_read
from fem.ops.common.scaled_sums import Sums, start_of, state_of
from fem.ops.common.scan import ScanCall, read_pair, split_channels
from fem.ops.common.tokens import Tokens
from fem.ops.ssm.composed import MOST_STATES, composed
from fem.ops.ssm.inputs import Inputs
from fem.ops.ssm.naive import naive_ssm_read
from fem.ops.ssm.plain import ssm_scan

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

    The state is that of `channel_scan_read` for each of the N states, (B, N, H, d_v).
    logs: log delta, log B and log C, exact where delta, B or C themselves have underflowed.
    Training keeps the states of every 64th token and computes the others again: memory O(T d_v), not O(T d_v N).
    """
    if free_values is not None:
        widths = v.shape[-1], free_values.shape[-1]
        delta, D, log_delta = (split_channels(x, widths) for x in (delta, D, None if logs is None else logs[0]))
        A = split_channels(A, widths, 1)
        logs = [None if logs is None else (log, *logs[1:]) for log in log_delta]
        reads = [
            partial(ssm_read, delta[n], A[n], B, C, D[n], values, temperature, logs=logs[n])
            for n, (values, temperature) in enumerate(((v, None), (free_values, beta)))
        ]
        return read_pair(reads, v, free_values, call)
    if call.backend == "reference" and 0 not in v.shape[:2]:
        loops = partial(naive_ssm_read, delta, A, B, C, D, v, beta)
        return by_definition(loops, v.dtype, call)
    terms, state = ssm_terms(delta, A, B, C, D, v, beta, logs, call)
    return call.result(terms, state, beta, v.dtype)


def ssm_terms(delta, A, B, C, D, v, beta, logs, call: ScanCall) -> tuple[Terms, dict[str, Tensor] | None]:
    """`ssm_read` as normalised terms with the logarithm of their total weight, and the state, if wanted."""
    backend = scan_backend(call.backend, v.device, compute_dtype(v, delta, A, B, C, D), "triton")
    if backend == "triton" and A.shape[-1] <= MOST_STATES and fused(call, delta, A, B, C, D, v, beta, *(logs or ())):
        inputs = _inputs(A, D, delta, B, C, v, *(logs or (None, None, None)), beta, call.tokens)
        return _masked(Terms(*composed(*inputs)), v.shape, call.tokens), None
    inputs = (delta, B, C, v, *(logs or (None, None, None)))
    return call.both_ways(partial(_one_way, A, D, call.return_state), inputs, beta)


def _inputs(A, D, delta, B, C, v, log_delta, log_b, log_c, beta, tokens) -> Inputs:
    """In one dtype, with the heads' channels side by side; masked tokens weigh nothing."""
    logs = (log_delta, log_b, log_c)
    dtype = compute_dtype(delta, A, B, C, D, v)
    delta, v = delta.flatten(2), v.flatten(2)
    opens = None
    if tokens is not None:
        opens = tokens.start
        if tokens.keep is not None:
            delta, B, C, v = (torch.where(tokens.keep[..., None], x, 0) for x in (delta, B, C, v))
    if log_delta is not None:
        logs = tuple(log.to(dtype).flatten(2) for log in logs)
        if tokens is not None and tokens.keep is not None:
            logs = tuple(torch.where(tokens.keep[..., None], log, -math.inf) for log in logs)
    A = A.to(dtype).flatten(0, 1).T.contiguous()
    D, beta = (None if x is None else x.to(dtype).flatten() for x in (D, beta))
    return Inputs(*(x.to(dtype) for x in (delta, A, B, C)), D, v.to(dtype), beta, opens, *logs)


def _masked(terms: Terms, shape: torch.Size, tokens: Tokens | None) -> Terms:
    """The terms by heads. A masked token does not even see itself through D."""
    terms = [None if part is None else part.view(shape) for part in terms]
    if tokens is not None and tokens.keep is not None:
        keep, nothing = tokens.keep[..., None, None], (LOG_ZERO, 0, 0)
        terms = [None if x is None else x.where(keep, of_none) for x, of_none in zip(terms, nothing)]
    return Terms(*terms)


def _one_way(A, D, return_state: bool, delta, B, C, v, log_delta, log_b, log_c, beta, tokens, state, present: bool):
    """The read of the tokens up to each (before each, unless `present`), and the state after the last, if wanted."""
    shape, rank = v.shape, A.shape[-1]
    inputs = _inputs(A, D, delta, B, C, v, log_delta, log_b, log_c, beta, tokens)
    inputs = inputs if present else inputs._replace(skip=None)
    like = inputs.v.new_empty(shape[0], A.numel())
    start = start_of(state, None if beta is None else inputs.beta.view(shape[2:]), like)
    if 0 in shape[:2]:
        terms, end = nothing_read(inputs.v, inputs.v.shape, inputs.beta, *inputs[:6], *start), start
    else:
        terms, end = ssm_scan(inputs, start, stateless=state is None and not return_state)
    terms = _masked(terms, shape, tokens)
    if not return_state:
        return terms, None
    peak, sums, *free_energy = (part.unflatten(-1, (rank, *shape[2:])) for part in end)
    return terms, state_of(Sums(peak, sums), *free_energy)
