"""The read of the priors `linear` and `gla`: linear attention, gated by a decay where there is one."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import scan_backend
from fem.ops.common.cells import zero_unseen
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import Read, Terms, read_free
from fem.ops.common.scan import ScanCall, memory_before
from fem.ops.common.tokens import Tokens, filled
from fem.ops.linear_attention.chunked import LINEAR_SCAN
from fem.ops.linear_attention.linear_log_space import LinearInputs


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
    f, rate = read_free(v, free_values, beta)
    one_way = partial(_linear_one_way, backend=backend)
    widen = backend != "triton" or (v.shape[1] == 1 and not call.normalize)  # sums of rounded reads would be off
    terms, state = call.both_ways(one_way, (q, k, v, f, log_decay), rate, widen)
    return call.result(terms, state, rate, v.dtype, beta)


def by_kernels_of_fla(backend: str, x: Tensor) -> bool:
    """Whether kernels of flash-linear-attention read such a tensor's products."""
    return scan_backend(backend, x.device, compute_dtype(x)) == "triton"


def _linear_one_way(
    q, k, v, f, log_decay, beta, tokens: Tokens, state, present: bool, backend: str
) -> tuple[Terms, dict[str, Tensor]]:
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    q, k, v, f, g = _kept(q, k, v, f, log_decay, tokens)
    beta, last = beta.to(compute_dtype(q, k, v, g)), None
    if not present:
        q, k, v, f, g, last = _delayed(q, k, v, f, g, tokens.start)
    cells = k.shape[0], *k.shape[2:]
    memory = memory_before(state, beta, (*cells, 1), (*cells, v.shape[-1]), (*cells, f.shape[-1]))
    x = LinearInputs(q, k, g, tokens.start, v, f, beta)
    terms, after = LINEAR_SCAN(memory, backend, x, stateless=state is None)
    if last is not None:
        terms = zero_unseen(terms._replace(log_weight=terms.log_weight + last))
    return terms, after._replace(log_weight=after.log_weight.squeeze(-1))._asdict()


def _kept(q, k, v, f, log_decay, tokens: Tokens) -> tuple[Tensor | None, ...]:
    """Inputs in which masked tokens read, add and decay nothing, and the decay (B, T, H, 1 or d_k)."""
    g = log_decay.unsqueeze(-1) if log_decay is not None and log_decay.ndim == 3 else log_decay
    if tokens.keep is None:
        return q, k, v, f, g
    keep = tokens.keep[:, :, None, None]
    q, k, g = (None if x is None else torch.where(keep, x, 0) for x in (q, k, g))
    return q, k, filled(v, keep), filled(f, keep), g


def _delayed(q, k, v, f, g, opens) -> tuple[Tensor | None, ...]:
    """Keys and values that each come one token later, and so are never read by their own; nor does a first one read.

    Their decays come later with them, but for that into the row's own token: a factor of the query, of which the most
    that a channel has is returned as a logarithm for the row's weight, since in float32 it may be 0.
    """
    later = lambda x: torch.cat([x[:, :1], x[:, :-1]], 1)  # noqa: E731
    from_zero = lambda x: F.pad(x, (0, 0, 0, 0, 1, 0))  # noqa: E731
    q, k, v, f, last = from_zero(q[:, 1:]), from_zero(k[:, :-1]), later(v), later(f), None
    if g is not None:
        last = g.detach().amax(-1, keepdim=True)
        q, g = q * (g - last).exp(), from_zero(g[:, :-1])
    if opens is not None:
        q, k = (torch.where(opens[:, :, None, None], 0, x) for x in (q, k))
    return q, k, v, f, g, last
