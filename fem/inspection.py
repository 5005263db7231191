"""The tables behind one forward pass of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fem.functional import softmax_read
from fem.ops.common.read import Read
from fem.priors.base import selected
from fem.theory import hidden_temperature, kl_gap, posterior


@dataclass(frozen=True)
class Reading:
    """Everything between the values and the output gate of one layer, for small T. Rows are t, columns i.

    prior p_t(i): (B, H, T, T), or (B, H, d_v, T, T) where every channel has its own; posterior q_tj(i) at beta, the
    beta_max of Eq. 7: (B, H, d_v, T, T). mean, free_energy, lambda_, gate and hidden_beta (the beta* of Eq. 8, in
    nats per unit of v): (B, T, H, d_v); so gap, KL(p_t || q_tj) in nats. beta: one per head and channel, (H, d_v).
    Parts that the layer lacks are None.
    Of split values, mean has the first d_m channels, posterior, free_energy, gap, hidden_beta and beta the last d_f.
    Under value_logexp_cap all but the mean are of the clipped values.
    """

    prior: Float[Tensor, "..."]
    posterior: Float[Tensor, "b h d t i"] | None
    mean: Float[Tensor, "b t h dm"]
    free_energy: Float[Tensor, "b t h d"] | None
    lambda_: Float[Tensor, "b t h dv"] | None
    gate: Float[Tensor, "b t h dv"] | None
    hidden_beta: Float[Tensor, "b t h d"] | None
    beta: Float[Tensor, "..."] | None
    gap: Float[Tensor, "b t h d"] | None


def softmax_tables(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None],
    **options,
) -> Reading:
    """The tables of `softmax_read(q, k, v, beta, **options)` behind gates (lambda, g)."""
    selection = selected(lambda one: softmax_read(q, k, one, None, **options), v)
    return read_tables(softmax_read(q, k, v, beta, **options), beta, gates, selection, False, v.shape[1])


def read_tables(
    read: Read,
    beta: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None],
    selection: tuple[Float[Tensor, "b t h c n"], Float[Tensor, "b t h c n"]],
    per_channel: bool,
    time: int,
) -> Reading:
    """The tables of a read behind gates (lambda, g), of whose `selection` the scores s_t(n) select among the values; n
    runs over `time` tokens, or over (token, channel)."""
    scores, values = selection
    lambda_, gate = (None if x is None else x.expand(*x.shape[:-1], values.shape[3]) for x in gates)
    p = scores.double() / scores.double().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    values = values.double()
    per_token = lambda table: table.unflatten(-1, (time, -1)).sum(-1).permute(0, 2, 3, 1, 4).to(scores.dtype)  # noqa: E731
    shown = per_token(scores)
    if beta is None:
        q = hidden = gap = None
    else:
        heads = scores.shape[2] // beta.shape[0]
        beta = beta.repeat_interleave(heads, 0)
        per_head = beta.double().reshape(beta.shape[0], -1)
        first = values.shape[3] - read.free_energy.shape[-1]  # channels that read the mean only
        p, values = p[..., first:, :], values[..., first:, :]
        q = per_token(posterior(p, values, per_head))
        gap = kl_gap(p, values, per_head).to(scores.dtype)
        lam = torch.ones_like(read.free_energy) if lambda_ is None else lambda_
        hidden = hidden_temperature(p, values, lam.double(), per_head.expand(lam.shape)).to(scores.dtype)
    return Reading(shown if per_channel else shown[:, :, 0], q, *read, lambda_, gate, hidden, beta, gap)
