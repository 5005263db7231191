"""The gates of Eq. 11 against their formula, element by element."""

import math

import pytest
import torch

from fem.ops.common.gated_read import gated_read

SHAPE = (2, 131, 3, 5)  # more than one cache block is tested by shrinking the block


def by_loops(mean, free_energy, inner, outer, eps):
    out = torch.empty_like(mean)
    width = mean.shape[-1]
    for b, t, h in [
        (b, t, h) for b in range(mean.shape[0]) for t in range(mean.shape[1]) for h in range(mean.shape[2])
    ]:
        u = mean[b, t, h] if free_energy is None else free_energy[b, t, h]
        if inner is not None:
            lam = 1 / (1 + torch.exp(-inner[b, t, h]))
            u = (1 - lam) * mean[b, t, h] + lam * free_energy[b, t, h]
        if outer is not None:
            g = torch.log(1 + torch.exp(outer[b, t, h]))
            u = u * g / torch.sqrt((g * g).sum() / width + eps)
        out[b, t, h] = u
    return out


@pytest.mark.parametrize("parts", ["mean", "free_energy", "inner", "outer", "free_energy outer", "inner outer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gates_and_their_gradients(parts, dtype, monkeypatch):
    monkeypatch.setattr("fem.ops.common.gated_read._BLOCK", 200)
    draw = lambda: torch.randn(SHAPE, dtype=torch.float64).to(dtype)  # noqa: E731
    mean, weight = draw(), draw().double()
    free_energy = draw() if "free" in parts or "inner" in parts else None
    inner = draw() if "inner" in parts else None
    outer = draw() if "outer" in parts else None
    results = []
    for function, kind in ((gated_read, dtype), (by_loops, torch.float64)):
        leaves = [None if x is None else x.to(kind).clone().requires_grad_() for x in (mean, free_energy, inner, outer)]
        out = function(*leaves, 1e-6)
        assert out.dtype == kind
        (out.double() * weight).sum().backward()
        results.append([out, *(None if x is None or x.grad is None else x.grad for x in leaves)])
    eps = torch.finfo(dtype).eps
    for got, wanted in zip(*results, strict=True):
        assert (got is None) == (wanted is None) or wanted is None
        if wanted is not None:
            assert (got.double() - wanted).abs().max() <= 16 * eps * (1 + wanted.abs().max())


def test_gates_at_zero_average_mean_and_free_energy():
    one = torch.ones(1, 1, 1, 4)
    out = gated_read(one, 3 * one, 0 * one, 0 * one, 0.0)
    assert math.isclose(out.mean(), 2.0, rel_tol=1e-6)
