"""What a chunk of tokens adds to the memory, and what it reads from the memory and from itself.

The memory of a key channel c is itself a read: the weight, mean and free energy of all tokens before, under the
weights with which c kept them. To a query it is one more item beside the chunk's own tokens, so both steps are

    Z_r = sum_i s_ri        mean_rj = sum_i s_ri v_ij / Z_r        F_rj = M_j + (1/beta_j) log(sum_i s_ri e_ij / Z_r)

with e_ij = exp(beta_j (F_ij - M_j)): one matrix product of scores and items [1 | v | e]. What it may have lost by
underflow is doubted, entry by entry; `keyed_scan_tiers` computes the chunk again. y counts chunks, c tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.read import Terms
from fem.ops.linear_attention.scores import (
    NOTHING,
    Decay,
    log,
    log_pair_scores,
    pairs_of,
    since_start,
    since_start_backward,
    until_end,
    until_end_backward,
)

PROOF = {torch.float32: -60.0, torch.float64: -600.0}  # a sum above e^PROOF lost nothing that its digits would show
LIGHT = 30.0  # the logarithm of weights that need no scaling


class Memory(NamedTuple):
    """What each key channel has kept: the read of all tokens before, (y, dk) and twice (y, dk, dv)."""

    log_weight: Float[Tensor, "y dk"]
    mean: Float[Tensor, "y dk dv"]
    free_energy: Float[Tensor, "y dk dv"] | None


class Chunk(NamedTuple):
    """One chunk of one row and head: features, decay, values and the temperature, (y, 1, dv)."""

    q: Float[Tensor, "y c dk"]
    k: Float[Tensor, "y c dk"]
    g: Decay | None
    v: Float[Tensor, "y c dv"]
    beta: Float[Tensor, "y 1 dv"] | None


# --- what a chunk adds -------------------------------------------------------------------------------------------


def remember(chunk: Chunk) -> tuple[Memory, Bool[Tensor, "y dk"]]:
    """The chunk's own contribution to the memory at its end, and the key channels in doubt."""
    kept, items, peak = _kept(chunk)
    terms, doubt = _mix(kept.mT, items, peak, chunk.beta)
    return Memory(*terms), doubt & (chunk.k.amax(1) > 0)


def remember_backward(grad: Memory, chunk: Chunk) -> Chunk:
    kept, items, peak = _kept(chunk)
    d_kept, d_items, d_beta = _mix_backward(grad, kept.mT, items, chunk.beta)
    d_kept = d_kept.mT
    d_v, of_items = _items_backward(d_items, items, chunk.v, peak, chunk.beta)
    d_g = None
    if chunk.g is not None:
        d_g = until_end_backward(_sum_to(d_kept * kept, chunk.g))
        d_kept = d_kept * until_end(chunk.g).exp()
    return Chunk(torch.zeros_like(chunk.q), d_kept, d_g, d_v, _add(d_beta, of_items))


def remember_exactly(chunk: Chunk) -> Memory:
    """`remember` by logarithms: slow, and right wherever the numbers are."""
    scores = log(chunk.k) if chunk.g is None else log(chunk.k) + until_end(chunk.g)
    return Memory(*_log_quotients(scores.mT, chunk.v, chunk.v, chunk.beta))


def _kept(chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | None]:
    kept = chunk.k if chunk.g is None else chunk.k * until_end(chunk.g).exp()
    peak = None if chunk.beta is None else _peak(chunk)
    return kept, _items(chunk.v, peak, chunk.beta), peak


# --- what a chunk reads ------------------------------------------------------------------------------------------


def read(chunk: Chunk, memory: Memory, present: bool) -> tuple[Terms, Bool[Tensor, "y c"]]:
    """What each token of the chunk reads from memory and chunk, and the tokens in doubt."""
    scores, items, scale, peak, _ = _visible(chunk, memory, present)
    terms, doubt = _mix(scores, items, peak, chunk.beta)
    return terms._replace(log_weight=terms.log_weight + scale.squeeze(-1)), doubt & (chunk.q.amax(2) > 0)


def read_backward(grad: Terms, chunk: Chunk, memory: Memory, present: bool) -> tuple[Chunk, Memory]:
    scores, items, scale, peak, pairs = _visible(chunk, memory, present)
    width = chunk.q.shape[-1]
    d_scores, d_items, d_beta = _mix_backward(grad, scores, items, chunk.beta)

    d_items[:, width:, 1 : 1 + chunk.v.shape[-1]] *= (-scale).exp()
    d_v, of_tokens = _items_backward(d_items[:, width:], items[:, width:], chunk.v, peak, chunk.beta)
    d_memory, of_memory = _summaries_backward(d_items[:, :width], items[:, :width], memory, peak, chunk.beta)

    d_left = d_scores[..., :width]
    d_q, d_k, d_g = pairs.backward(d_scores[..., width:])
    if chunk.g is None:
        d_q = d_q + d_left
    else:
        d_g = d_g + since_start_backward(_sum_to(d_left * scores[..., :width], chunk.g))
        d_q = torch.addcmul(d_q, d_left, since_start(chunk.g).exp())
    return Chunk(d_q, d_k, d_g, d_v, _add(d_beta, _add(of_tokens, of_memory))), d_memory


def read_exactly(chunk: Chunk, memory: Memory, present: bool) -> Terms:
    """`read` by logarithms: slow, and right wherever the numbers are."""
    left = log(chunk.q) + memory.log_weight.unsqueeze(1)
    left = left if chunk.g is None else left + since_start(chunk.g)
    scores = torch.cat([left, log_pair_scores(chunk.q, chunk.k, chunk.g, present)], 2)
    values = torch.cat([memory.mean, chunk.v], 1)
    energies = None if chunk.beta is None else torch.cat([memory.free_energy, chunk.v], 1)
    return _log_quotients(scores, values, energies, chunk.beta)


def sees(chunk: Chunk, memory: Memory, present: bool) -> Bool[Tensor, "y c"]:
    """Which tokens of the chunk have anything to read."""
    scores = log_pair_scores(chunk.q, chunk.k, chunk.g, present).amax(2)
    left = log(chunk.q) + memory.log_weight.unsqueeze(1)
    left = left if chunk.g is None else left + since_start(chunk.g)
    return torch.maximum(scores, left.amax(2)) > NOTHING / 2


def adds(chunk: Chunk) -> Bool[Tensor, "y dk"]:
    """Which key channels the chunk has anything for."""
    scores = log(chunk.k) if chunk.g is None else log(chunk.k) + until_end(chunk.g)
    return scores.amax(1) > NOTHING / 2


def _visible(chunk: Chunk, memory: Memory, present: bool) -> tuple:
    """Scores and items of all that the tokens may see, divided by e^scale, the peak M, and the chunk's own pairs."""
    heaviest = memory.log_weight.amax(1, keepdim=True).unsqueeze(-1)
    scale = torch.where(heaviest > LIGHT, heaviest, 0)
    log_weight = memory.log_weight.unsqueeze(-1) - scale
    peak = energy = None
    if chunk.beta is not None:
        lead = memory.free_energy + log_weight / chunk.beta
        peak = torch.maximum(_peak(chunk), lead.amax(1, keepdim=True))
        energy = (chunk.beta * (lead - peak)).exp()
    weight = log_weight.exp()
    summaries = torch.cat([weight, weight * memory.mean] + ([] if energy is None else [energy]), 2)
    items = torch.cat([summaries, _items(chunk.v, peak, chunk.beta) * (-scale).exp()], 1)
    left = chunk.q if chunk.g is None else chunk.q * since_start(chunk.g).exp()
    pairs = pairs_of(chunk.q, chunk.k, chunk.g, present)
    return torch.cat([left, pairs.scores], 2), items, scale, peak, pairs


def _summaries_backward(
    grad: Tensor, summaries: Tensor, memory: Memory, peak: Tensor | None, beta: Tensor | None
) -> tuple[Memory, Tensor | None]:
    width = memory.mean.shape[-1]
    moved = grad * summaries
    d_mean = summaries[..., :1] * grad[..., 1 : 1 + width]
    if beta is None:
        return Memory(moved.sum(-1), d_mean, None), None
    d_energy = moved[..., 1 + width :]
    d_beta = (d_energy * (memory.free_energy - peak)).sum(1, keepdim=True)
    return Memory(moved.sum(-1), d_mean, beta * d_energy), d_beta


# --- items, and how scores mix them ---------------------------------------------------------------------------------


def _peak(chunk: Chunk) -> Tensor:
    """The largest value of a token that has any weight, per channel."""
    there = chunk.k.amax(2, keepdim=True) > 0
    peak = torch.where(there, chunk.v, -torch.inf).amax(1, keepdim=True)
    return torch.where(peak > -torch.inf, peak, 0)


def _items(v: Tensor, peak: Tensor | None, beta: Tensor | None) -> Tensor:
    ones = torch.ones_like(v[..., :1])
    if beta is None:
        return torch.cat([ones, v], -1)
    return torch.cat([ones, v, (beta * (v - peak)).clamp_max_(0).exp_()], -1)


def _items_backward(
    grad: Tensor, items: Tensor, v: Tensor, peak: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of v and beta."""
    width = v.shape[-1]
    d_v = grad[..., 1 : 1 + width]
    if beta is None:
        return d_v, None
    d_energy = grad[..., 1 + width :] * items[..., 1 + width :]
    return torch.addcmul(d_v, beta, d_energy), (d_energy * (v - peak)).sum(1, keepdim=True)


def _mix(scores: Tensor, items: Tensor, peak: Tensor | None, beta: Tensor | None) -> tuple[Terms, Tensor]:
    """The read of the items (y, i, .) with the scores (y, r, i), zeros for no weight, and the rows in doubt."""
    weight, numerator, partition = _columns(scores @ items, beta)
    least = _least(scores)
    seen = weight > 0
    doubt = weight < least
    log_weight = torch.where(seen, weight.log(), NOTHING).squeeze(-1)
    mean = torch.where(seen, numerator / weight, 0)
    if beta is None:
        return Terms(log_weight, mean, None), doubt.squeeze(-1)
    doubt = doubt | (partition < least).any(-1, keepdim=True)
    free_energy = torch.where(seen, peak + (partition / weight).log() / beta, 0)
    return Terms(log_weight, mean, free_energy), doubt.squeeze(-1)


def _mix_backward(
    grad: Terms | Memory, scores: Tensor, items: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of scores, items and beta; rows in doubt pass none, another tier has them.

    With p = s / Z the gradient of a score is (raw - sum_i p_i raw_i) / Z, as in a softmax: where one item has all the
    weight it is exactly 0.
    """
    weight, _, partition = _columns(scores @ items, beta)
    least = _least(scores)
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


def _columns(sums: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if beta is None:
        return sums[..., :1], sums[..., 1:], None
    width = (sums.shape[-1] - 1) // 2
    return sums.split([1, width, width], -1)


def _least(scores: Tensor) -> float:
    return math.exp(PROOF[scores.dtype])


def _log_quotients(scores: Tensor, values: Tensor, energies: Tensor | None, beta: Tensor | None) -> Terms:
    """scores (y, r, i) are logarithms."""
    log_weight = scores.logsumexp(2)
    seen = (log_weight > NOTHING / 2).unsqueeze(-1)
    log_p = scores - log_weight.unsqueeze(-1)
    mean = torch.where(seen, log_p.exp() @ values, 0)
    free_energy = None
    if beta is not None:
        exponent = log_p.unsqueeze(-1) + (beta * energies).unsqueeze(1)
        free_energy = torch.where(seen, exponent.logsumexp(2) / beta, 0)
    return Terms(log_weight.clamp_min(NOTHING), mean, free_energy)


def _sum_to(x: Tensor, like: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) if like.shape[-1] == 1 else x


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None else one + other
