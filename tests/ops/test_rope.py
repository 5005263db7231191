"""Rotary position embedding against complex multiplication in float64."""

import cmath

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fem.ops.common.rope import frequencies, rotate_all


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
    (y,) = rotate_all((x,), position, frequencies(6, 100.0, x.device))
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (y - by_complex_numbers(x.detach(), position, 100.0)).abs().max() <= 8 * eps * (1 + x.abs().max())
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad)
    assert (found - by_complex_numbers(grad, -position, 100.0)).abs().max() <= 8 * eps * (1 + grad.abs().max())


def test_a_compiled_train_step_makes_its_table_of_angles_once(as_users_run):
    """In float64, which a GPU computes slowly, and not for every head and layer, as a kernel of q or k would."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def layers(q, k):
        for _ in range(2):
            position = torch.arange(q.shape[1])
            q, k = rotate_all((q, k), position, 0.5 ** torch.arange(2, dtype=torch.float64))
        return q, k

    q, k = torch.randn(2, 1, 5, 2, 4, requires_grad=True)
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    assert all(map(torch.equal, torch.compile(layers, backend=backend)(q, k), layers(q, k)))
    targets = graphs[0]
    assert sum(target.startswith("fem.rotary_table_") for target in targets) == 1
    assert not any("cos" in target or "sin" in target for target in targets)
