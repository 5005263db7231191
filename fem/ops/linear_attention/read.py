"""The read of the priors `linear` and `gla`: linear attention, gated by a decay where there is one."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import scan_backend, widest
from fem.ops.common.composed import fused
from fem.ops.common.naive_rows import by_definition
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import LOG_ZERO, Read, Terms, connected_zeros, merge, read_of
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
    causal: bool = True,
    tokens: Tokens | None = None,
    initial_state: dict[str, Tensor] | None = None,
    return_state: bool = False,
    normalize: bool = True,
    backend: str = "auto",
) -> Read | tuple[Read, dict[str, Tensor]]:
    """`fem.functional.keyed_scan_read` of checked arguments, with `tokens` in the place of masks and documents.

    state: what each key channel has kept, as the read of all tokens before under its own weights, batch first:
    log_weight (B, H, d_k), mean (B, H, d_k, d_v) and free_energy (B, H, d_k, d_f), in fp32 (float64 for float64).
    """
    backend = scan_backend(backend, v.device, widest(v, log_decay))
    if backend == "reference" and 0 not in v.shape[:2]:
        loops = partial(naive_linear_attention_read, q, k, v, beta, log_decay)
        options = {"normalize": normalize, "free_values": free_values}
        return by_definition(loops, v.dtype, causal, tokens, initial_state, return_state, **options)
    if backend == "triton" and fused(causal, initial_state, return_state, q, k, v, beta, log_decay, free_values):
        terms = Terms(*composed(*_kept(tokens, q, k, v, free_values, beta, log_decay)))
        return read_of(terms, beta, normalize, v.dtype)
    terms, state = linear_attention_terms(
        q, k, v, beta, log_decay, free_values=free_values, tokens=tokens, initial_state=initial_state
    )
    if not causal:
        later = linear_attention_terms(
            *(_reversed(x) for x in (q, k, v)),
            beta,
            _reversed(log_decay),
            free_values=_reversed(free_values),
            tokens=None if tokens is None else tokens.reversed(),
            present=False,
        )[0]
        terms = merge(terms, Terms(*(_reversed(x) for x in later)), None if beta is None else beta.to(later.mean.dtype))
    read = read_of(terms, beta, normalize, v.dtype)
    return (read, state) if return_state else read


def linear_attention_terms(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    free_values: Float[Tensor, "b t h df"] | None = None,
    *,
    tokens: Tokens | None = None,
    initial_state: dict[str, Tensor] | None = None,
    present: bool = True,
) -> tuple[Terms, dict[str, Tensor]]:
    """The causal read with its total weight, log_weight (B, T, H, 1), and the state after the last token.

    Without `present` a token sees only those before it.
    """
    sums = compute_dtype(v)
    q, k, v = (x.to(sums) for x in (q, k, v))
    free, beta, g = (None if x is None else x.to(sums) for x in (free_values, beta, log_decay))
    g = None if g is None else g.masked_fill(g < LOG_ZERO, LOG_ZERO)  # clamp would keep g itself for the gradient
    g = g.unsqueeze(-1) if g is not None and g.ndim == 3 else g
    if tokens is not None and 0 not in v.shape[:2]:
        q, k, v, free, g = _only_kept(tokens.keep, q, k, v, free, g)
        g = forget(q, g, tokens.start)
    start = State(**{"free_energy": None} | (initial_state or _empty_state(k, v, v if free is None else free, beta)))
    if 0 in v.shape[:2]:
        zeros = connected_zeros(v, (*q.shape[:3], 1), q, k, v, free, beta, g, *start)
        energies = None if beta is None else zeros.expand(*v.shape[:3], len(beta[0]))
        terms, last = Terms(zeros, zeros.expand_as(v), energies), start
    elif portable() or transformed(q, k, v, free, beta, g, *start):
        terms, last = by_steps(q, k, v, free, beta, g, start, present)
    elif q.shape[1] == 1 and present and not differentiated(q, k, v, free, beta, g, *start):
        terms, last = step(q, k, v, free, beta, g, start)
    else:
        results = scan(q, k, v, free, beta, g, *start, present)
        terms, last = Terms(*results[:3]), State(*results[3:6])
    if beta is None:
        terms, last = terms._replace(free_energy=None), last._replace(free_energy=None)
    return terms, {name: x for name, x in last._asdict().items() if x is not None}


def _kept(tokens: Tokens | None, q, k, v, free, beta, log_decay) -> tuple[Tensor | None, ...]:
    """The inputs of `composed`."""
    g = None if log_decay is None else log_decay.float().clamp_min(LOG_ZERO)
    g = g.unsqueeze(-1) if g is not None and g.ndim == 3 else g
    beta = None if beta is None else beta.float()
    if tokens is None:
        return q, k, v, free, beta, g, None
    q, k, v, free, g = _only_kept(tokens.keep, q, k, v, free, g)
    return q, k, v, free, beta, g, tokens.start


def _only_kept(keep: Tensor | None, q: Tensor, k: Tensor, v: Tensor, free: Tensor | None, g: Tensor | None):
    """Inputs in which masked tokens read, add and decay nothing."""
    if keep is not None:
        keep = keep[:, :, None, None]
        v, free = _filled(v, keep), None if free is None else _filled(free, keep)
        q, k, g = (None if x is None else torch.where(keep, x, 0) for x in (q, k, g))
    return q, k, v, free, g


def _filled(v: Tensor, keep: Tensor) -> Tensor:
    """Values in which masked tokens have the least of the others, so that they raise no chunk's peak."""
    lowest = torch.where(keep, v.detach(), torch.inf).amin(1, keepdim=True)
    return torch.where(keep, v, torch.where(lowest < torch.inf, lowest, 0))


def _empty_state(k: Tensor, v: Tensor, free: Tensor, beta: Tensor | None) -> dict[str, Tensor]:
    batch, _, heads, width = k.shape
    zeros = lambda x: x.new_zeros(batch, heads, width, x.shape[-1])  # noqa: E731
    state = {"log_weight": k.new_full((batch, heads, width), LOG_ZERO), "mean": zeros(v)}
    return state if beta is None else state | {"free_energy": zeros(free)}


def _reversed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flip(1)
