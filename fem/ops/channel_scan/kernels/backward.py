"""The backward of the channel scan. Of the streams it needs the shares alone, which the forward has stored.

With p_t = e^{x_t} / (S_t e^{m_t}) the share of token t in what it reads, q_t that in the energies, h_t = dF_t / beta:

    u_t = h_t + (1 - q_{t+1}) u_{t+1}        g_t = p_t (v_t - mean_t) s_t + (q_t - p_t) u_t        dx_t = p_t w_t + g_t
    s_t = dmean_t + (1 - p_{t+1}) s_{t+1}    dv_t = p_t s_t + beta q_t u_t            da_t = (1 - p_t) w_t - g_t
    w_t = dL_t + da_{t+1}                    dbeta = sum_t q_t u_t v_t - h_t F_t

u, s, w are the gradients of E, of S(v) and of all sums together, each times its sum: so no peak and no logarithm
occurs, only differences of values and of shares. Chunks as in the forward, with w, s, u in the place of states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fem.ops.channel_scan.kernels.forward import load_three, part_at, store_three
from fem.ops.common.kernels.channel_states import EMPTY, part_of, past_of
from fem.ops.common.kernels.decay_steps import chunk_of, load_channels


@triton.jit
def gradient_of(at, place, inside, seen):
    """One of the incoming gradients, 0 where it is None or where there is nothing to read."""
    grad = tl.zeros(inside.shape, tl.float32)
    if at is not None:
        grad = tl.where(seen, load_channels(at + place, inside), 0.0)
    return grad


@triton.jit
def excess(q, p):
    """q - p of two shares, without cancellation."""
    return tl.where((p < 0) == (q < 0), q - p, part_of(q) - part_of(p))


@triton.jit
def shares_of(share, energy_share, place, inside):
    """p, q and q - p of one token; without energies q = p."""
    p = load_channels(share + place, inside)
    q = p
    if energy_share is not None:
        q = load_channels(energy_share + place, inside)
    return p, q, excess(q, p)


@triton.jit
def channel_gradient_sums(
    d_log_weight, d_mean, d_free, v, beta, mean, share, energy_share, through, flows,
    time, channels, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each chunk, w, s, u at the token before it from its own gradients, and the factors of those from behind it.

    through (4, B, chunks, C): the factor of w and of s, that of u, those of s and of u in w.
    """
    first, end, place, columns, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    place += (end - 1 - first) * channels
    zero = tl.zeros([BLOCK], tl.float32)
    w, s, u, s_to_w, u_to_w = zero, zero, zero, zero, zero
    lets, energy_lets = zero + 1.0, zero + 1.0
    if beta is not None:
        rate = tl.load(beta + columns, mask=inside, other=1.0)
    for _ in range(first, end):
        p, q, more = shares_of(share, energy_share, place, inside)
        w += gradient_of(d_log_weight, place, inside, p < EMPTY)
        s += gradient_of(d_mean, place, inside, p < EMPTY)
        if beta is not None:
            u += gradient_of(d_free, place, inside, p < EMPTY) / rate
        away = part_of(p) * (load_channels(v + place, inside) - load_channels(mean + place, inside))
        w = past_of(w, p) - away * s - more * u
        s_to_w = past_of(s_to_w, p) - away * lets
        u_to_w = past_of(u_to_w, p) - more * energy_lets
        s, lets, u, energy_lets = past_of(s, p), past_of(lets, p), past_of(u, q), past_of(energy_lets, q)
        place -= channels
    store_three(flows, of_chunk, size, inside, w, s, u)
    store_three(through, of_chunk, size, inside, lets, energy_lets, s_to_w)
    tl.store(part_at(through, 3, size) + of_chunk, u_to_w, mask=inside)


@triton.jit
def channel_gradient_carry(through, flows, start, chunks, channels, size, start_size, BLOCK: tl.constexpr):
    """w, s, u that enter each chunk from behind, in place of its own in `flows`. start (3, B, C): behind the last."""
    columns, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside, place = columns < channels, (batch + 1) * chunks * channels + columns
    w, s, u = load_three(start, batch * channels + columns, start_size, inside)
    for _ in range(chunks):
        place -= channels
        own_w, own_s, own_u = load_three(flows, place, size, inside)
        lets, energy_lets, s_to_w = load_three(through, place, size, inside)
        u_to_w = load_channels(part_at(through, 3, size) + place, inside)
        store_three(flows, place, size, inside, w, s, u)
        w = own_w + w * lets + s * s_to_w + u * u_to_w
        s, u = own_s + s * lets, own_u + u * energy_lets


@triton.jit
def channel_gradients(
    d_log_weight, d_mean, d_free, v, beta, mean, free_energy, share, energy_share, entering,
    d_x, d_v, d_decay, d_beta, d_start, time, channels, size, start_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx and da (each unless None), dv, each chunk's part of dbeta (B, chunks, C), and w, s, u of the start."""
    first, end, place, columns, inside, of_chunk = chunk_of(time, channels, CHUNK, BLOCK)
    place += (end - 1 - first) * channels
    w, s, u = load_three(entering, of_chunk, size, inside)
    of_beta = tl.zeros([BLOCK], tl.float32)
    if beta is not None:
        rate = tl.load(beta + columns, mask=inside, other=1.0)
    for _ in range(first, end):
        p, q, more = shares_of(share, energy_share, place, inside)
        value = load_channels(v + place, inside)
        w += gradient_of(d_log_weight, place, inside, p < EMPTY)
        s += gradient_of(d_mean, place, inside, p < EMPTY)
        of_v = part_of(p) * s
        g = of_v * (value - load_channels(mean + place, inside))
        if beta is not None:
            h = gradient_of(d_free, place, inside, p < EMPTY) / rate
            u += h
            of_z = part_of(q) * u
            of_v, g = of_v + rate * of_z, g + more * u
            of_beta += of_z * value - h * load_channels(free_energy + place, inside)
            u = past_of(u, q)
        tl.store(d_v + place, of_v, mask=inside)
        if d_x is not None:
            tl.store(d_x + place, part_of(p) * w + g, mask=inside)
        w, s = past_of(w, p) - g, past_of(s, p)
        if d_decay is not None:
            tl.store(d_decay + place, w, mask=inside)
        place -= channels
    if beta is not None:
        tl.store(d_beta + of_chunk, of_beta, mask=inside)
    if tl.program_id(1) == 0:
        of_row = tl.program_id(2).to(tl.int64) * channels + columns
        store_three(d_start, of_row, start_size, inside, w, s, u)
