"""Rotary position embedding against complex multiplication in float64."""

import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fem.ops.common.rope import frequencies, rotate_all


def rotate(x, position, theta=10000.0):
    return rotate_all((x,), position, frequencies(x.shape[-1], theta, x.device))[0]


def by_complex_numbers(x, position, theta):
    """z_j = x_j + i x_{j + d/2} turned by exp(i position theta^(-2j/d))."""
    batch, time, heads, width = x.shape
    y = torch.empty_like(x, dtype=torch.float64)
    for b, t, h, j in [
        (b, t, h, j) for b in range(batch) for t in range(time) for h in range(heads) for j in range(width // 2)
    ]:
        place = int(position[t] if position.dim() == 1 else position[b, t])
        z = complex(x[b, t, h, j], x[b, t, h, j + width // 2]) * cmath.exp(1j * place * theta ** (-2 * j / width))
        y[b, t, h, j], y[b, t, h, j + width // 2] = z.real, z.imag
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [torch.arange(5), torch.tensor([[0, 1, 2, 0, 1], [7, 90000, 3, 3, 12]])])
def test_rotation_and_its_gradient(dtype, position):
    x = torch.randn(2, 5, 3, 6, dtype=dtype, requires_grad=True)
    y = rotate(x, position, 100.0)
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (y - by_complex_numbers(x.detach(), position, 100.0)).abs().max() <= 8 * eps * (1 + x.abs().max())
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad)
    assert (found - by_complex_numbers(grad, -position, 100.0)).abs().max() <= 8 * eps * (1 + grad.abs().max())


@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 10**6), second=st.integers(0, 10**6), shift=st.integers(0, 10**6))
def test_scores_depend_on_the_distance_alone(first, second, shift):
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    score = lambda t, i: (rotate(q, torch.tensor([t])) * rotate(k, torch.tensor([i]))).sum()  # noqa: E731
    torch.testing.assert_close(score(first, second), score(first + shift, second + shift), rtol=0, atol=1e-8)


def test_position_zero_changes_nothing():
    x = torch.randn(2, 3, 2, 4)
    assert torch.equal(rotate(x, torch.zeros(3, dtype=torch.long)), x)


def test_halves_pair_as_in_transformers():
    x = torch.zeros(1, 1, 1, 4)
    x[..., 0] = 1.0
    y = rotate(x, torch.tensor([1]))
    assert y[0, 0, 0].nonzero().flatten().tolist() == [0, 2]


def test_an_odd_width_is_named():
    with pytest.raises(ValueError, match="width must be even, got 5"):
        rotate(torch.randn(1, 2, 1, 5), torch.arange(2))


def test_a_compiled_train_step_makes_its_table_of_angles_once(as_users_run):
    """In float64, which a GPU computes slowly, and not for every head and layer, as a kernel of q or k would."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def layers(q, k):
        for _ in range(2):
            position = torch.arange(q.shape[1])
            frequency = 0.5 ** torch.arange(2, dtype=torch.float64)
            q, k = rotate_all((q, k), position, frequency)
        return q, k

    q, k = torch.randn(2, 1, 5, 2, 4, requires_grad=True)
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    for one, other in zip(torch.compile(layers, backend=backend)(q, k), layers(q, k)):
        assert torch.equal(one, other)
    targets = graphs[0]
    assert targets.count("fem.rotary_table.default") == 1
    assert not any("cos" in target or "sin" in target for target in targets)
