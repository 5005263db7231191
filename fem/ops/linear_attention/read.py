"""The read of the priors `linear` and `gla`: linear attention, gated by a decay where there is one."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import scan_backend
from fem.ops.common.composed import fused
from fem.ops.common.naive_rows import by_definition
from fem.ops.common.precision import compute_dtype, upcast, without_autocast
from fem.ops.common.read import LOG_ZERO, Read, Terms, connected_zeros
from fem.ops.common.scan import ScanCall
from fem.ops.common.steps import portable
from fem.ops.common.tokens import Tokens
from fem.ops.common.transforms import differentiated, transformed
from fem.ops.linear_attention.chunk import State
from fem.ops.linear_attention.composed import composed, forget
from fem.ops.linear_attention.decode import by_steps, step
from fem.ops.linear_attention.naive import naive_linear_attention_read
from fem.ops.linear_attention.plain import scan


def linear_attention_read(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    free_values: Float[Tensor, "b t h df"] | None = None,
    *,
    call: ScanCall,
) -> Read | tuple[Read, dict[str, Tensor]]:
    """`fem.functional.keyed_scan_read` of checked arguments.

    state: what each key channel has kept, as the read of all tokens before under its own weights, batch first:
    log_weight (B, H, d_k), mean (B, H, d_k, d_v) and free_energy (B, H, d_k, d_f), in fp32 (float64 for float64).
    """
    backend = scan_backend(call.backend, v.device, compute_dtype(q, k, v, log_decay))
    if backend == "reference" and 0 not in v.shape[:2]:
        loops = partial(naive_linear_attention_read, q, k, v, beta, log_decay)
        return by_definition(loops, v.dtype, call, free_values=free_values)
    if backend == "triton" and fused(call, q, k, v, beta, log_decay, free_values):
        q, k, v, free, g, opens = _prepared(q, k, v, free_values, log_decay, call.tokens)
        terms = Terms(*composed(q, k, v, free, None if beta is None else beta.float(), g, opens))
        return call.result(terms, None, beta, v.dtype)
    inputs = q, k, v, free_values, log_decay
    return call.result(*call.both_ways(_one_way, inputs, beta), beta, v.dtype)


def _one_way(q, k, v, free, log_decay, beta, tokens, state, present: bool) -> tuple[Terms, dict[str, Tensor]]:
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    q, k, v, free, g, opens = _prepared(q, k, v, free, log_decay, tokens)
    sums = compute_dtype(q, k, v, log_decay)
    q, k, v, free, beta, g = (None if x is None else x.to(sums) for x in (q, k, v, free, beta, g))
    g = forget(q, g, opens)
    start = State.empty(k, v, free, beta) if state is None else State(**state)
    if 0 in v.shape[:2]:
        zeros = connected_zeros(v, (*q.shape[:3], 1), q, k, v, free, beta, g, *start)
        energies = [] if beta is None else [zeros.expand(*v.shape[:3], len(beta[0]))]
        terms, last = Terms(zeros, zeros.expand_as(v), *energies), start
    elif portable() or transformed(q, k, v, free, beta, g, *start):
        with without_autocast(v.device):
            terms, last = by_steps(q, k, v, free, beta, g, start, present)
    elif q.shape[1] == 1 and present and not differentiated(q, k, v, free, beta, g, *start):
        with without_autocast(v.device):
            terms, last = step(q, k, v, free, beta, g, start)
    else:
        parts = [x for x in start if x is not None]
        results = scan(q, k, v, free, beta, g, parts, present)
        terms, last = Terms(*results[: len(parts)]), State(*results[len(parts) : 2 * len(parts)])
    return terms, {name: x for name, x in last._asdict().items() if x is not None}


def _prepared(q, k, v, free, log_decay, tokens: Tokens | None) -> tuple[Tensor | None, ...]:
    """Inputs in which masked tokens read, add and decay nothing, the decay (B, T, H, 1 or d_k), and which tokens open a
    document."""
    g = None if log_decay is None else upcast(log_decay)
    g = None if g is None else g.masked_fill(g < LOG_ZERO, LOG_ZERO)  # clamp would keep g itself for the gradient
    g = g.unsqueeze(-1) if g is not None and g.ndim == 3 else g
    if tokens is None or 0 in v.shape[:2]:
        return q, k, v, free, g, None
    if tokens.keep is not None:
        keep = tokens.keep[:, :, None, None]
        v, free = _filled(v, keep), None if free is None else _filled(free, keep)
        q, k, g = (None if x is None else torch.where(keep, x, 0) for x in (q, k, g))
    return q, k, v, free, g, tokens.start


def _filled(v: Tensor, keep: Tensor) -> Tensor:
    """Values in which masked tokens have the least of the others, so that they raise no chunk's peak."""
    lowest = torch.where(keep, v.detach(), torch.inf).amin(1, keepdim=True)
    return torch.where(keep, v, torch.where(lowest < torch.inf, lowest, 0))
