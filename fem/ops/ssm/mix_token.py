"""The read of one token over pairs of token and channel by a Triton kernel, as `mix_channels`."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.launch import cdiv, launched, next_power_of_2
from fem.ops.common.merge_kernels import LOG_ZERO, NO_WEIGHT, NUMBERS, expm1, log1p
from fem.ops.common.read import Terms

LEAST = tl.constexpr(1.1754943508222875e-38)


@launched
def mix_token_kernel(
    mixing, weight, mean, free, beta, weight_mixed, mean_mixed, free_mixed, beta_head, beta_channel,
    heads: tl.constexpr, WIDTH: tl.constexpr, FREE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of BLOCK channels j of a head of a row: W_j = sum_k M_jk w_k, sum_k M_jk w_k mean_k / W_j, and F likewise."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, there = k < WIDTH, j < WIDTH
    at, head = row * WIDTH + k, row % heads
    rates = beta + head * beta_head
    table = mixing + (head * WIDTH + j[None]) * WIDTH + k[:, None]
    m = tl.load(table, exists[:, None] & there[None], other=0.0)
    log_w = tl.where(exists, tl.maximum(tl.load(weight + at, exists, other=LOG_ZERO), LOG_ZERO), float("-inf"))
    peak = tl.max(log_w, 0)
    w = tl.exp(log_w - peak)
    total = tl.sum(m * w[:, None], 0)
    summed = tl.sum(m * (w * tl.load(mean + at, exists, other=0.0))[:, None], 0)
    to, total = row * WIDTH + j, tl.where(there, total, 1.0)
    tl.store(mean_mixed + to, summed / total, there)
    tl.store(weight_mixed + to, tl.where(peak > NO_WEIGHT, tl.log(total) + peak, float("-inf")), there)
    if FREE > 0:
        lift = tl.load(rates + k * beta_channel, exists, other=1.0) * tl.load(free + at, exists, other=0.0)
        top = tl.max(tl.where(exists, lift, float("-inf")), 0)
        z = tl.where(exists, lift - top, 0.0)
        energy = log_w - peak + z
        highest = tl.max(energy, 0)
        near = log1p(tl.sum(m * (w * expm1(tl.maximum(z, -1.0)))[:, None], 0) / total)
        far = tl.log(tl.maximum(tl.sum(m * tl.exp(energy - highest)[:, None], 0) / total, LEAST)) + highest
        rate = tl.load(rates + j * beta_channel, there, other=1.0)
        tl.store(free_mixed + to, (top + tl.where(tl.min(z, 0) >= -1.0, near, far)) / rate, there)


def mix_token(mixing: Tensor, terms: Terms, beta: Tensor) -> Terms:
    """`mix_channels` of float32 terms (B, 1, H, d_v) without gradients."""
    (batch, _, heads, width), free = terms.mean.shape, beta.shape[-1]
    given = [x.contiguous() for x in (mixing, *terms)]
    mixed = Terms(*(x.new_empty(x.shape) for x in terms))
    channels = next_power_of_2(width)
    block = min(channels, max(1, NUMBERS // channels))
    with on(mixing.device):
        mix_token_kernel[batch * heads, cdiv(width, block)](
            *given, beta, *mixed, *beta.stride(), heads=heads, WIDTH=width, FREE=free, CHANNELS=channels, BLOCK=block
        )
    return mixed
