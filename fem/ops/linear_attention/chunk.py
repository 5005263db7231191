"""What a chunk of tokens adds to the state, and what it reads from the state and from itself.

The state of a key channel c is itself a read: the weight, mean and free energy of all tokens before, under the
weights with which c kept them. To a query it is one more item beside the chunk's own tokens, so both steps are

    Z_r = sum_i s_ri        mean_rj = sum_i s_ri v_ij / Z_r        F_rj = M_j + (1/beta_j) log(sum_i s_ri e_ij / Z_r)

with e_ij = exp(beta_j (F_ij - M_j)), where a token's F is its free value f, or v itself where f is None: one matrix
product of scores and items [1 | v | e]. Rows in which underflow may have lost digits are reported as in doubt;
`fallback` computes their chunk again. y counts chunks, c tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, log
from fem.ops.linear_attention.scores import (
    Decay,
    log_pair_scores,
    pair_scores,
    pair_scores_backward,
    since_start,
    since_start_backward,
    until_end,
    until_end_backward,
)

LIGHT = 30.0  # weights up to e^30 need no scaling


class State(NamedTuple):
    """What each key channel has kept: the read of all tokens before."""

    log_weight: Float[Tensor, "y dk"]
    mean: Float[Tensor, "y dk dv"]
    free_energy: Float[Tensor, "y dk df"] | None = None

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, free: Tensor | None, beta: Tensor | None) -> State:
        """(B, H, d_k, ..), before the first token of inputs (B, T, H, d)."""
        batch, _, heads, width = k.shape
        zeros = lambda x: x.new_zeros(batch, heads, width, x.shape[-1])  # noqa: E731
        energies = None if beta is None else zeros(v if free is None else free)
        return cls(k.new_full((batch, heads, width), LOG_ZERO), zeros(v), energies)


class Chunk(NamedTuple):
    """One chunk of one row and head: features, decay, values and the temperature.

    free: the values whose free energy is read; None: v.
    """

    q: Float[Tensor, "y c dk"]
    k: Float[Tensor, "y c dk"]
    g: Decay | None
    v: Float[Tensor, "y c dv"]
    free: Float[Tensor, "y c df"] | None
    beta: Float[Tensor, "y 1 df"] | None

    def energies(self) -> Tensor:
        return self.v if self.free is None else self.free


# --- items, and how scores mix them ---------------------------------------------------------------------------------


def _items(chunk: Chunk, peak: Tensor | None) -> Tensor:
    ones = chunk.v.new_ones(*chunk.v.shape[:2], 1)
    if chunk.beta is None:
        return torch.cat([ones, chunk.v], -1)
    return torch.cat([ones, chunk.v, (chunk.beta * (chunk.energies() - peak)).exp()], -1)


def _items_backward(
    grad: Tensor, items: Tensor, chunk: Chunk, peak: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of v, free and beta."""
    width = chunk.v.shape[-1]
    d_v = grad[..., 1 : 1 + width]
    if chunk.beta is None:
        return d_v, None, None
    d_exponent = grad[..., 1 + width :] * items[..., 1 + width :]
    d_beta = (d_exponent * (chunk.energies() - peak)).sum(1, keepdim=True)
    if chunk.free is None:
        return torch.addcmul(d_v, chunk.beta, d_exponent), None, d_beta
    return d_v, chunk.beta * d_exponent, d_beta


def _mix(scores: Tensor, items: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Log-weight, mean and F - M of the items (y, i, .) under the scores (y, r, i), and the rows in doubt, (y, r).

    Those rows are 0. Reads a value back from the device: masks are needed only where a row is in doubt.
    """
    sums, least = scores @ items, LEAST_PROVEN[scores.dtype]
    weight, numerator, partition = _columns(sums, beta)
    lightest = weight.amin() if beta is None or not beta.numel() else torch.minimum(weight.amin(), partition.amin())
    sure = bool(lightest >= least)
    doubt = lost = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    if not sure:
        doubt = lost = weight < least
        weight, numerator = torch.where(doubt, 1, weight), torch.where(doubt, 0, numerator)
    if not sure and beta is not None:
        lost = doubt | (partition < least)
        partition = torch.where(lost, weight, partition)
    log_weight = weight.log() if sure else torch.where(doubt, LOG_ZERO, weight.log())
    gain = None if beta is None else (partition / weight).log_().div_(beta)
    return log_weight.squeeze(-1), numerator / weight, gain, doubt.squeeze(-1) | lost.any(-1)


def _mix_backward(
    grad: Terms | State, scores: Tensor, items: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of scores, items and beta; rows in doubt pass none.

    As of a softmax, with p = s / Z that of a score is (raw - sum_i p_i raw_i) / Z: exactly 0 where one item has all the
    weight, however small Z is.
    """
    weight, _, partition = _columns(scores @ items, beta)
    least = LEAST_PROVEN[scores.dtype]
    sure = weight >= least
    weight = torch.where(sure, weight, torch.inf)
    d_sums, d_beta = grad.mean, None
    if beta is not None:
        sure = sure & (partition >= least)
        per_nat = torch.where(sure, grad.free_energy, 0) / beta
        ratio = torch.where(sure, partition / weight, 1)
        d_beta = -(per_nat * ratio.log() / beta).sum(1, keepdim=True)
        d_sums = torch.cat([d_sums, per_nat / ratio], -1)
    raw = d_sums @ items[..., 1:].mT
    p = scores / weight
    d_weight = grad.log_weight.unsqueeze(-1) - torch.linalg.vecdot(p, raw).unsqueeze(-1)
    d_items = p.mT @ torch.cat([d_weight, d_sums], -1)
    return raw.addcmul_(d_weight, items[..., :1].mT).div_(weight), d_items, d_beta


def _lifted(gain: Tensor | None, peak: Tensor | None, log_weight: Tensor) -> Tensor | None:
    """F from F - M; 0 in rows without weight."""
    return None if gain is None else torch.where(log_weight.unsqueeze(-1) > NO_WEIGHT, peak + gain, 0)


def _columns(sums: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if beta is None:
        return sums[..., :1], sums[..., 1:], None
    free = beta.shape[-1]
    return sums.split([1, sums.shape[-1] - 1 - free, free], -1)


# --- what a chunk adds -------------------------------------------------------------------------------------------


def contribution(chunk: Chunk) -> tuple[State, Bool[Tensor, "y dk"]]:
    """The chunk's own contribution to the state at its end, and the key channels in doubt."""
    kept, items, peak = _kept(chunk)
    log_weight, mean, gain, doubt = _mix(kept.mT, items, chunk.beta)
    return State(log_weight, mean, _lifted(gain, peak, log_weight)), doubt & (chunk.k.amax(1) > 0)


def contribution_backward(grad: State, chunk: Chunk) -> tuple[Chunk]:
    """Gradients of the chunk from that of `contribution`; channels in doubt pass none."""
    kept, items, peak = _kept(chunk)
    d_kept, d_items, d_beta = _mix_backward(grad, kept.mT, items, chunk.beta)
    d_kept = d_kept.mT
    d_v, d_free, of_items = _items_backward(d_items, items, chunk, peak)
    d_g = None
    if chunk.g is not None:
        d_g = until_end_backward(_sum_to(d_kept * kept, chunk.g))
        d_kept = d_kept * until_end(chunk.g).exp()
    d_beta = None if d_beta is None else d_beta + of_items
    return (Chunk(torch.zeros_like(chunk.q), d_kept, d_g, d_v, d_free, d_beta),)


def contribution_exactly(chunk: Chunk) -> State:
    """`contribution` by logarithms: slow, but exact at any magnitude."""
    return State(*_log_quotients(_log_kept(chunk).mT, chunk.v, chunk.energies(), chunk.beta))


def _kept(chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys as they are left at the end of the chunk, the items, and the peak M."""
    kept = chunk.k if chunk.g is None else chunk.k * until_end(chunk.g).exp()
    peak = None if chunk.beta is None else chunk.energies().detach().amax(1, keepdim=True)
    return kept, _items(chunk, peak), peak


# --- what a chunk reads ------------------------------------------------------------------------------------------


def read(chunk: Chunk, state: State, present: bool) -> tuple[Terms, Bool[Tensor, "y c"]]:
    """What each token of the chunk reads from state and chunk, and the tokens in doubt."""
    scores, items, scale, peak = _visible(chunk, state, present)
    log_weight, mean, gain, doubt = _mix(scores, items, chunk.beta)
    terms = Terms(log_weight + scale.squeeze(-1), mean, _lifted(gain, peak, log_weight))
    return terms, doubt & (chunk.q.amax(2) > 0)


def read_backward(grad: Terms, chunk: Chunk, state: State, present: bool) -> tuple[Chunk, State]:
    """Gradients of chunk and state from that of `read`; tokens in doubt pass none."""
    scores, items, scale, peak = _visible(chunk, state, present)
    width = chunk.q.shape[-1]
    d_scores, d_items, d_beta = _mix_backward(grad, scores, items, chunk.beta)
    d_items[:, width:, 1 : 1 + chunk.v.shape[-1]] *= (-scale).exp()  # the other items are what they were scaled to
    d_v, d_free, of_tokens = _items_backward(d_items[:, width:], items[:, width:], chunk, peak)
    d_state, of_state = _summaries_backward(d_items[:, :width], items[:, :width], state, peak, chunk.beta)
    d_left = d_scores[..., :width]
    d_q, d_k, d_g = pair_scores_backward(d_scores[..., width:], chunk.q, chunk.k, chunk.g, present)
    if chunk.g is None:
        d_q = d_q + d_left
    else:
        d_g = d_g + since_start_backward(_sum_to(d_left * scores[..., :width], chunk.g))
        d_q = torch.addcmul(d_q, d_left, since_start(chunk.g).exp())
    d_beta = None if d_beta is None else d_beta + of_tokens + of_state
    return Chunk(d_q, d_k, d_g, d_v, d_free, d_beta), d_state


def read_exactly(chunk: Chunk, state: State, present: bool) -> Terms:
    """`read` by logarithms: slow, but exact at any magnitude."""
    values = torch.cat([state.mean, chunk.v], 1)
    energies = None if chunk.beta is None else torch.cat([state.free_energy, chunk.energies()], 1)
    return _log_quotients(_log_visible(chunk, state, present), values, energies, chunk.beta)


def sees(chunk: Chunk, state: State, present: bool) -> Bool[Tensor, "y c"]:
    """Which tokens of the chunk see any weight."""
    return _log_visible(chunk, state, present).amax(2) > NO_WEIGHT


def adds(chunk: Chunk) -> Bool[Tensor, "y dk"]:
    """Which key channels get any weight from the chunk."""
    return _log_kept(chunk).amax(1) > NO_WEIGHT


def _log_kept(chunk: Chunk) -> Tensor:
    """The logarithms of the keys as they are left at the end of the chunk."""
    return log(chunk.k) if chunk.g is None else log(chunk.k) + until_end(chunk.g)


def _log_visible(chunk: Chunk, state: State, present: bool) -> Tensor:
    """The logarithms of the scores of all that tokens may see: the key channels of the state, then the chunk."""
    left = log(chunk.q) + state.log_weight.unsqueeze(1)
    left = left if chunk.g is None else left + since_start(chunk.g)
    return torch.cat([left, log_pair_scores(chunk.q, chunk.k, chunk.g, present)], 2)


def _visible(chunk: Chunk, state: State, present: bool) -> tuple:
    """Scores and items of all that the tokens may see, the items divided by e^scale; scale; and the peak M."""
    heaviest = state.log_weight.detach().amax(1, keepdim=True).unsqueeze(-1)
    scale = torch.where(heaviest > LIGHT, heaviest, 0)
    log_weight = state.log_weight.unsqueeze(-1) - scale
    peak = energy = None
    if chunk.beta is not None:
        lead = state.free_energy + log_weight.clamp_max(0) / chunk.beta  # M has to be near F for beta's gradient
        peak = torch.maximum(*(x.detach().amax(1, keepdim=True) for x in (chunk.energies(), lead)))
        energy = (chunk.beta * (state.free_energy - peak) + log_weight).exp()
    weight = log_weight.exp()
    summaries = torch.cat([weight, weight * state.mean] + ([] if energy is None else [energy]), 2)
    items = torch.cat([summaries, _items(chunk, peak) * (-scale).exp()], 1)
    left = chunk.q if chunk.g is None else chunk.q * since_start(chunk.g).exp()
    return torch.cat([left, pair_scores(chunk.q, chunk.k, chunk.g, present)], 2), items, scale, peak


def _summaries_backward(
    grad: Tensor, summaries: Tensor, state: State, peak: Tensor | None, beta: Tensor | None
) -> tuple[State, Tensor | None]:
    """Gradients of state and beta."""
    width = state.mean.shape[-1]
    moved = grad * summaries
    d_mean = summaries[..., :1] * grad[..., 1 : 1 + width]
    if beta is None:
        return State(moved.sum(-1), d_mean, None), None
    d_exponent = moved[..., 1 + width :]
    d_beta = (d_exponent * (state.free_energy - peak)).sum(1, keepdim=True)
    return State(moved.sum(-1), d_mean, beta * d_exponent), d_beta


def _sum_to(x: Tensor, decay: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) if decay.shape[-1] == 1 else x


def _log_quotients(scores: Tensor, values: Tensor, energies: Tensor | None, beta: Tensor | None) -> Terms:
    """scores (y, r, i) are logarithms."""
    log_weight = scores.logsumexp(2)
    seen = (log_weight > NO_WEIGHT).unsqueeze(-1)
    log_p = scores - log_weight.unsqueeze(-1)
    mean = torch.where(seen, log_p.exp() @ values, 0)
    free_energy = None
    if beta is not None:
        exponent = log_p.unsqueeze(-1) + (beta * energies).unsqueeze(1)
        free_energy = torch.where(seen, exponent.logsumexp(2) / beta, 0)
    return Terms(log_weight.clamp_min(LOG_ZERO), mean, free_energy)
