"""The cached form of the softmax read, [v | e] with a fixed shift, against float64 definitions."""

import pytest
import torch
import torch.nn.functional as F

from fem.functional import softmax_read
from fem.ops.softmax import cached

TIME, HEADS, KEY, VALUE = 33, 2, 16, 8


def draw(beta=2.0, size=1.0, offset=0.0):
    q, k = (torch.randn(2, TIME, HEADS, KEY) for _ in range(2))
    v = torch.randn(2, TIME, HEADS, VALUE) * size + offset
    return q, k, v, torch.full((HEADS, VALUE), float(beta))


def attend(q, k, packed, mask=None):
    q, k, packed = (x.transpose(1, 2) for x in (q, k, packed))
    return F.scaled_dot_product_attention(q, k, packed, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def read(q, k, v, beta, shift, dtype=torch.float32):
    how = cached.fixed_packing(beta, shift)
    out = attend(q.to(dtype), k.to(dtype), cached.pack(v.to(dtype), v.to(dtype), how))
    return cached.unpack(out, how)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.05, 0.099, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("shift", [0.0, -1.0, 3.0])
def test_the_free_energy_keeps_its_digits_at_any_temperature(beta, shift):
    q, k, v, beta = draw(beta)
    mean, free_energy = read(q, k, v, beta, torch.full_like(beta, shift))
    exact = softmax_read(*(x.double() for x in (q, k, v, beta)), backend="reference")
    unit = 16 * torch.finfo(torch.float32).eps * (1 + v.abs().max())
    assert (mean - exact.mean).abs().max() <= unit
    assert (free_energy - exact.free_energy).abs().max() <= unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_whole_reach_of_a_dtype_is_right_and_clipped_beyond(dtype):
    reach, beta = cached.REACH[dtype], torch.ones(1, dtype=torch.float64)
    inside = torch.linspace(-reach, reach, 41, dtype=torch.float64).to(dtype)[:, None]
    inside = inside.clamp(-reach, reach).where(inside.abs() <= reach, 0)
    how = cached.fixed_packing(beta, torch.zeros(1))
    e = cached.pack(inside, inside, how)[:, 1:]
    assert (e.double().log() - inside.double()).abs().max() <= 2 * torch.finfo(dtype).eps
    beyond = torch.tensor([[-10 * reach], [10 * reach]], dtype=dtype)
    packed = cached.pack(beyond, beyond, how)
    assert torch.equal(packed[:, :1], beyond)
    assert packed.isfinite().all()
    assert (packed[:, 1:] > 0).all()


@pytest.mark.parametrize("case", ["spike", "dip", "later spike", "small beta", "weight lost to underflow"])
@torch.no_grad()
def test_what_is_not_exact_is_not_proven(case):
    """One query over a packed cache: by attention where that is exact, else as if the cache held values."""
    q, k, v, beta = draw(0.05 if case == "small beta" else 2.0)
    if case == "dip":
        v -= 40
    elif case == "small beta":
        v *= 200
    elif case == "weight lost to underflow":  # p = e^-95 of the first key, in float32 nothing, carries much of R
        q, k[:, :1], k[:, 1:] = torch.ones_like(q), -95 / KEY**0.5, 0.0
        v, beta = torch.zeros_like(v), torch.ones_like(beta)
        v[:, 0] = 95
    else:
        v[:, TIME - 1 if case == "later spike" else 0] += 20
    how = cached.fixed_packing(beta[None, :, None], torch.zeros(2, HEADS, 1, VALUE))
    keys, values = k.transpose(1, 2), cached.pack_exactly(v.transpose(1, 2), None, how)
    assert cached._packed_step(q[:, -1], keys, values, how, None, KEY**-0.5) is None
    mean, free_energy = cached.cached_read(q[:, -1:], keys, values, beta, how)
    exact = softmax_read(*(x.double() for x in (q[:, -1:], k, v, beta)), backend="reference")
    unit = 16 * torch.finfo(torch.float32).eps * (1 + v.abs().max())
    assert (mean - exact.mean).abs().max() <= unit
    assert (free_energy - exact.free_energy).abs().max() <= unit


@pytest.mark.parametrize("beta", [0.01, 2.0])
def test_rows_without_keys_read_0(beta):
    how = cached.fixed_packing(torch.full((VALUE,), beta), torch.full((VALUE,), 3.0))
    assert all(x.eq(0).all() for x in cached.unpack(torch.zeros(2, 2 * VALUE), how))


def test_bfloat16_is_off_by_its_own_digits_over_beta():
    q, k, v, beta = draw()
    q, k, v = (x.bfloat16() for x in (q, k, v))
    free_energy = read(q, k, v, beta, torch.zeros_like(beta), torch.bfloat16).free_energy
    exact = softmax_read(*(x.double() for x in (q, k, v, beta)), backend="reference").free_energy
    assert ((free_energy - exact) * beta).abs().max() <= 5 * 2**-9  # of e, of P, of R, and of scores
