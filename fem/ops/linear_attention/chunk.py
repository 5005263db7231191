"""What a chunk of tokens adds to the state, and what it reads from the state and from itself.

The state of a key channel c is itself a read: the weight, mean and free energy of all tokens before, under the
weights with which c kept them. To a query it is one more item beside the chunk's own tokens, so both steps are

    Z_r = sum_i s_ri        mean_rj = sum_i s_ri v_ij / Z_r        F_rj = M_j + (1/beta_j) log(sum_i s_ri e_ij / Z_r)

with e_ij = exp(beta_j (F_ij - M_j)): one matrix product of scores and items [1 | v | e]. Rows in which underflow may
have lost digits are reported as in doubt; `fallback` computes their chunk again. y counts chunks, c tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms
from fem.ops.linear_attention.scores import (
    Decay,
    log,
    log_pair_scores,
    pair_scores,
    since_start,
    until_end,
)

LIGHT = 30.0  # weights up to e^30 need no scaling


class State(NamedTuple):
    """What each key channel has kept: the read of all tokens before."""

    log_weight: Float[Tensor, "y dk"]
    mean: Float[Tensor, "y dk dv"]
    free_energy: Float[Tensor, "y dk dv"] | None = None


class Chunk(NamedTuple):
    """One chunk of one row and head: features, decay, values and the temperature, (y, 1, dv)."""

    q: Float[Tensor, "y c dk"]
    k: Float[Tensor, "y c dk"]
    g: Decay | None
    v: Float[Tensor, "y c dv"]
    beta: Float[Tensor, "y 1 dv"] | None


# --- items, and how scores mix them ---------------------------------------------------------------------------------


def _items(v: Tensor, peak: Tensor | None, beta: Tensor | None) -> Tensor:
    ones = torch.ones_like(v[..., :1])
    if beta is None:
        return torch.cat([ones, v], -1)
    return torch.cat([ones, v, (beta * (v - peak)).exp()], -1)


def mix_by_steps(
    scores: Tensor, items: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Bool[Tensor, "y r"]]:
    """Log-weight, mean and F - M of the items (y, i, .) under the scores (y, r, i), and which rows are in doubt.

    Those rows are 0. By steps that PyTorch can differentiate any number of times.
    """
    return _quotients(scores @ items, _least(scores), beta)


def _quotients(sums: Tensor, least: float, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    weight, numerator, partition = _columns(sums, beta)
    doubt = weight < least
    weight = torch.where(doubt, 1, weight)
    log_weight = torch.where(doubt, LOG_ZERO, weight.log()).squeeze(-1)
    mean = torch.where(doubt, 0, numerator / weight)
    if beta is None:
        return log_weight, mean, None, doubt.squeeze(-1)
    lost = doubt | (partition < least)
    gain = torch.where(lost, 0, (torch.where(lost, 1, partition) / weight).log() / beta)
    return log_weight, mean, gain, lost.any(-1)


def _sure_quotients(sums: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`_quotients` where no row is in doubt."""
    weight, numerator, partition = _columns(sums, beta)
    gain = None if beta is None else (partition / weight).log_().div_(beta)
    doubt = torch.zeros(weight.shape[:2], dtype=torch.bool, device=weight.device)
    return weight.log().squeeze(-1), numerator / weight, gain, doubt


class _Mix(torch.autograd.Function):
    """`mix_by_steps` with the gradient of a softmax: with p = s / Z that of a score is (raw - sum_i p_i raw_i) / Z.

    Where one item has all the weight it is exactly 0, however small Z is. Rows in doubt pass none.
    """

    @staticmethod
    def forward(scores, items, beta):
        """As `mix_by_steps`, followed by the sums that the gradient needs."""
        sums = scores @ items
        weight, _, partition = _columns(sums, beta)
        lightest = weight.amin() if beta is None else torch.minimum(weight.amin(), partition.amin())
        if lightest >= _least(scores):
            return *_sure_quotients(sums, beta), weight, partition
        return *_quotients(sums, _least(scores), beta), weight, partition

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output[4:])
        ctx.mark_non_differentiable(*(x for x in output[3:] if x is not None))

    @staticmethod
    def backward(ctx, d_log_weight, d_mean, d_gain, *_):
        scores, items, beta, weight, partition = ctx.saved_tensors
        least = _least(scores)
        sure = weight >= least
        weight = torch.where(sure, weight, torch.inf)
        d_sums, d_beta = d_mean, None
        if beta is not None:
            sure = sure & (partition >= least)
            per_nat = torch.where(sure, d_gain, 0) / beta
            ratio = torch.where(sure, partition / weight, 1)
            d_beta = -(per_nat * ratio.log() / beta).sum(1, keepdim=True)
            d_sums = torch.cat([d_sums, per_nat / ratio], -1)
        raw = d_sums @ items[..., 1:].mT
        p = scores / weight
        d_weight = d_log_weight.unsqueeze(-1) - torch.linalg.vecdot(p, raw).unsqueeze(-1)
        d_items = p.mT @ torch.cat([d_weight, d_sums], -1)
        return raw.addcmul_(d_weight, items[..., :1].mT).div_(weight), d_items, d_beta


class MixForGradients(_Mix):
    """`_Mix` for a backward pass: what it returns has the right shapes, but only the gradients are right."""

    @staticmethod
    def forward(scores, items, beta):
        weight, numerator, partition = _columns(scores @ items, beta)
        doubt = torch.zeros(weight.shape[:2], dtype=torch.bool, device=weight.device)
        gain = None if beta is None else partition[:]
        return weight.squeeze(-1), numerator, gain, doubt, weight, partition


def _lifted(gain: Tensor | None, peak: Tensor | None, log_weight: Tensor) -> Tensor | None:
    """F from F - M; 0 in rows without weight."""
    return None if gain is None else torch.where(log_weight.unsqueeze(-1) > NO_WEIGHT, peak + gain, 0)


def _columns(sums: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if beta is None:
        return sums[..., :1], sums[..., 1:], None
    width = (sums.shape[-1] - 1) // 2
    return sums.split([1, width, width], -1)


def _least(scores: Tensor) -> float:
    return LEAST_PROVEN[scores.dtype]


# --- what a chunk adds -------------------------------------------------------------------------------------------


def remember(chunk: Chunk, mix=_Mix.apply) -> tuple[State, Bool[Tensor, "y dk"]]:
    """The chunk's own contribution to the state at its end, and the key channels in doubt."""
    kept = chunk.k if chunk.g is None else chunk.k * until_end(chunk.g).exp()
    peak = None if chunk.beta is None else chunk.v.detach().amax(1, keepdim=True)
    log_weight, mean, gain, doubt, *_ = mix(kept.mT, _items(chunk.v, peak, chunk.beta), chunk.beta)
    return State(log_weight, mean, _lifted(gain, peak, log_weight)), doubt & (chunk.k.amax(1) > 0)


def remember_exactly(chunk: Chunk) -> State:
    """`remember` by logarithms: slow, but exact at any magnitude."""
    scores = log(chunk.k) if chunk.g is None else log(chunk.k) + until_end(chunk.g)
    return State(*_log_quotients(scores.mT, chunk.v, chunk.v, chunk.beta))


# --- what a chunk reads ------------------------------------------------------------------------------------------


def read(chunk: Chunk, state: State, present: bool, mix=_Mix.apply) -> tuple[Terms, Bool[Tensor, "y c"]]:
    """What each token of the chunk reads from state and chunk, and the tokens in doubt."""
    scores, items, scale, peak = _visible(chunk, state, present)
    log_weight, mean, gain, doubt, *_ = mix(scores, items, chunk.beta)
    terms = Terms(log_weight + scale.squeeze(-1), mean, _lifted(gain, peak, log_weight))
    return terms, doubt & (chunk.q.amax(2) > 0)


def read_exactly(chunk: Chunk, state: State, present: bool) -> Terms:
    """`read` by logarithms: slow, but exact at any magnitude."""
    left = log(chunk.q) + state.log_weight.unsqueeze(1)
    left = left if chunk.g is None else left + since_start(chunk.g)
    scores = torch.cat([left, log_pair_scores(chunk.q, chunk.k, chunk.g, present)], 2)
    values = torch.cat([state.mean, chunk.v], 1)
    energies = None if chunk.beta is None else torch.cat([state.free_energy, chunk.v], 1)
    return _log_quotients(scores, values, energies, chunk.beta)


def sees(chunk: Chunk, state: State, present: bool) -> Bool[Tensor, "y c"]:
    """Which tokens of the chunk see any weight."""
    scores = log_pair_scores(chunk.q, chunk.k, chunk.g, present).amax(2)
    left = log(chunk.q) + state.log_weight.unsqueeze(1)
    left = left if chunk.g is None else left + since_start(chunk.g)
    return torch.maximum(scores, left.amax(2)) > NO_WEIGHT


def adds(chunk: Chunk) -> Bool[Tensor, "y dk"]:
    """Which key channels get any weight from the chunk."""
    scores = log(chunk.k) if chunk.g is None else log(chunk.k) + until_end(chunk.g)
    return scores.amax(1) > NO_WEIGHT


def _visible(chunk: Chunk, state: State, present: bool) -> tuple:
    """Scores and items of all that the tokens may see, the items divided by e^scale; scale; and the peak M."""
    heaviest = state.log_weight.detach().amax(1, keepdim=True).unsqueeze(-1)
    scale = torch.where(heaviest > LIGHT, heaviest, 0)
    log_weight = state.log_weight.unsqueeze(-1) - scale
    peak = energy = None
    if chunk.beta is not None:
        lead = state.free_energy + log_weight.clamp_max(0) / chunk.beta  # M has to be near F for beta's gradient
        peak = torch.maximum(*(x.detach().amax(1, keepdim=True) for x in (chunk.v, lead)))
        energy = (chunk.beta * (state.free_energy - peak) + log_weight).exp()
    weight = log_weight.exp()
    summaries = torch.cat([weight, weight * state.mean] + ([] if energy is None else [energy]), 2)
    items = torch.cat([summaries, _items(chunk.v, peak, chunk.beta) * (-scale).exp()], 1)
    left = chunk.q if chunk.g is None else chunk.q * since_start(chunk.g).exp()
    pairs = pair_scores(chunk.q, chunk.k, chunk.g, present)
    return torch.cat([left, pairs], 2), items, scale, peak


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
