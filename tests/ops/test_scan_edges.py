"""Scans at their edges: rows without weight, factors of exactly 0, calls without tokens, values that are refused."""

import pytest
import torch

from fem.functional import channel_scan_read, keyed_scan_read, ssm_read


def gradients(read, leaves, **options):
    return torch.autograd.grad(sum(x.square().sum() for x in read), leaves, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decays", [True, False])
def test_a_row_without_weight_has_gradients_of_zero(causal, decays):
    """In float32, and with values for which the scan runs in float64: what it keeps is rounded."""
    x, v, a = torch.randn(2, 7, 1, 2), 50 * torch.randn(2, 7, 1, 2), -torch.rand(2, 7, 1, 2)
    x[0] = -torch.inf
    leaves = [one.requires_grad_() for one in (x, v, *([a] if decays else []))]
    found = gradients(channel_scan_read(x, v, torch.ones(1, 2), a if decays else None, causal), leaves)
    for one in found:
        assert one.isfinite().all()
        assert not one[0].any()
        assert one[1].any()


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
def test_second_derivatives_of_a_masked_state_space_are_those_of_the_kept_tokens(mask):
    shape = {"delta": (1, 5, 1, 2), "A": (1, 2, 3), "B": (1, 5, 3), "C": (1, 5, 3), "D": (1, 2), "v": (1, 5, 1, 2)}
    given = {name: torch.rand(*size, dtype=torch.float64) for name, size in shape.items()}
    given["A"] = -given["A"]
    kept = torch.tensor(mask).bool()
    results = []
    for only in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        inputs = {name: x[:, kept] if only and name not in "AD" else x for name, x in leaves.items()}
        read = ssm_read(**inputs, beta=torch.ones(1, 2).double(), key_mask=None if only else kept.long()[None])
        first = gradients(read, list(leaves.values()), create_graph=True)
        results.append(gradients(first, list(leaves.values())))
    for masked, alone in zip(*results):
        torch.testing.assert_close(masked, alone)


@pytest.mark.parametrize("spread", [1.0, 330.0, 900.0])
def test_a_value_of_no_weight_has_no_gradient(spread):
    """Its feature is exactly 0, and its value is far above those that are read."""
    q, k = torch.ones(1, 2, 1, 1, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1, 1)
    v, beta = torch.tensor([0.0, spread], dtype=torch.float64).view(1, 2, 1, 1), torch.ones(1, 1, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, beta)]
    read = keyed_scan_read(*leaves).free_energy[0, 1].sum()
    *_, dv, dbeta = torch.autograd.grad(read, leaves)
    torch.testing.assert_close(dv.flatten(), torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(dbeta, torch.zeros_like(dbeta), rtol=0, atol=1e-12)


def test_a_row_without_weight_reads_nothing_token_by_token():
    """Neither its own value nor the document before it."""
    x, v, beta = torch.tensor([0.0, -torch.inf]), torch.tensor([5.0, -3.0]), torch.ones(1, 1)
    x, v, segments, state = x.view(1, 2, 1, 1), v.view(1, 2, 1, 1), torch.tensor([[0, 1]]), None
    for now in (slice(0, 1), slice(1, 2)):
        call = {"segment_ids": segments[:, now], "initial_state": state, "return_state": True}
        read, state = channel_scan_read(x[:, now], v[:, now], beta, **call)
    assert read.mean == read.free_energy == 0
    slope = torch.func.grad(lambda v: channel_scan_read(torch.full_like(v, -torch.inf), v, beta).free_energy.sum())
    assert not slope(v).any()


def test_transforms_of_a_state_space_in_both_directions_pass_rows_without_weight():
    shape = {"delta": (8, 5, 1, 2), "A": (1, 2, 16), "B": (8, 5, 16), "C": (8, 5, 16), "D": (1, 2), "v": (8, 5, 1, 2)}
    given = {name: torch.rand(*size) for name, size in shape.items()}
    given |= {"A": -given["A"], "v": 3 * torch.randn(8, 5, 1, 2), "key_mask": torch.tensor([[0, 0, 1, 1, 1]] * 8)}
    read = lambda beta: ssm_read(**given, beta=beta, causal=False).free_energy.square().sum()  # noqa: E731
    beta = torch.ones(1, 2, requires_grad=True)
    wanted = torch.autograd.grad(read(beta), beta)[0]
    torch.testing.assert_close(torch.func.grad(read)(beta.detach()), wanted, rtol=1e-4, atol=1e-4)
