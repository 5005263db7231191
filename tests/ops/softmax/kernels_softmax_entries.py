"""The kernels that compute doubtful entries of the free energy again: run as kernels_channel_scan.py is.

python -m pytest tests/ops/softmax/kernels_softmax_entries.py -o addopts=
"""

import pytest
import torch
from interpreter import DEVICE, patch_the_language_once
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from fem.functional import softmax_read
from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.self_check import Kind, difference
from fem.ops.softmax import composed, recompute
from fem.ops.softmax.kernels import launch
from fem.ops.softmax.support import intervals

patch_the_language_once()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_device_in_small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "ROWS", 4)
    monkeypatch.setattr(launch, "_TILE", 64)
    monkeypatch.setattr(launch, "_FLAGS", 2)
    with torch.device(DEVICE):
        yield


def draw(queries, time, heads=4, key_heads=2, key=5, value=3):
    q, k = torch.randn(2, queries, heads, key), torch.randn(2, time, key_heads, key)
    return q, k, 30 * torch.randn(2, time, key_heads, value), torch.rand(key_heads, value) + 0.5


def both(arguments, doubtful, bias=None, seen=None, causal=True):
    """Results and gradients of the kernels, then of the definition in float64."""
    weight = torch.randn(doubtful.shape)
    for backend, dtype in (("triton", torch.float32), ("plain", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in arguments]
        free = torch.ones(doubtful.shape, dtype=dtype)
        added = None if bias is None else bias.to(dtype)
        out = recompute.recompute(free, doubtful, *leaves, added, seen, causal, 0.4, backend)
        yield [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True, materialize_grads=True)]


def check(pair):
    for number, (own, other) in enumerate(zip(*pair)):
        scale = other.abs().max().clamp_min(1e-6)
        assert (own - other).abs().max() <= 1e-5 * scale, number


@pytest.mark.parametrize(("queries", "time", "causal", "window"), [
    (1, 1, True, None), (11, 11, True, None), (3, 11, True, None), (7, 11, False, None), (11, 11, True, 3),
    (11, 11, False, 3),
])  # fmt: skip
def test_entries_and_gradients_are_those_of_the_definition(queries, time, causal, window):
    arguments = draw(queries, time)
    seen = None if window is None else intervals(queries, time, causal, window, None, arguments[0].device)
    doubtful = torch.rand(2, queries, 4, 3) < 0.3
    doubtful[0, 0, 0, 0] = True
    check(both(arguments, doubtful, seen=seen, causal=causal))


@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (1, 4, 1, 9), (1, 1, 9, 1)])
def test_a_bias_is_added_and_may_leave_a_row_nothing(shape):
    bias = torch.randn(shape)
    bias[..., 1 if shape[2] > 1 else 0, :3] = -torch.inf
    if shape[3] == 1:
        bias[0, 0, 1] = -torch.inf
    check(both(draw(9, 9), torch.rand(2, 9, 4, 3) < 0.2, bias=bias))


def test_each_batch_has_its_own_interval_and_views_need_no_copy():
    q, k, v, beta = draw(9, 9)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    start = torch.arange(9) // torch.tensor([[3], [4]]) * torch.tensor([[3], [4]])
    seen = intervals(9, 9, True, None, None, q.device)._replace(first=start.int())
    seen = seen._replace(end=seen.end.expand(2, -1))
    check(both((q, k, v, beta), torch.rand(2, 9, 4, 3) < 0.3, seen=seen))


@pytest.mark.parametrize("row", [5, 18])
def test_a_lonely_entry_is_found(row):
    doubtful = torch.zeros(2, 19, 4, 3, dtype=torch.bool)
    doubtful[1, row, 3, 1] = True
    check(both(draw(19, 19), doubtful))


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_others_are_left_as_they_are_and_runs_repeat_bit_by_bit(share):
    arguments, doubtful = draw(9, 9), torch.rand(2, 9, 4, 3) < share
    torch.manual_seed(1)
    own = next(both(arguments, doubtful))
    torch.manual_seed(1)
    again = next(both(arguments, doubtful))
    assert own[0][~doubtful].eq(1).all()
    assert all(map(torch.equal, own, again))
    if share == 0:
        assert all(x.eq(0).all() for x in own[1:])


def test_scores_of_hundreds_and_other_values_that_are_not_finite():
    q, k, v, beta = draw(9, 9)
    k, v = 100 * k, 10 * v
    v[0, 2, :, 0], v[1, 8] = torch.nan, torch.inf
    doubtful = torch.rand(2, 9, 4, 3) < 0.3
    doubtful[0, 2:, :, 0], doubtful[1, 8] = False, False
    own, exact = both((q, k, v, beta), doubtful)
    torch.testing.assert_close(own[0].double(), exact[0], rtol=1e-6, atol=1e-4)
    for one, other in zip(own[1:], exact[1:]):  # the weights carry the rounding of beta F, here thousands of nats
        assert (one - other).abs().max() <= 5e-4 * other.abs().max()


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.__name__)
        return function(*arguments, **(options or {}))


def test_a_read_and_its_gradients_ask_the_device_nothing(monkeypatch):
    """As on a GPU: no value of a tensor is read on the host, also where entries are in doubt; these are counted."""
    monkeypatch.setattr(recompute, "scan_backend", lambda *arguments: "triton")
    q, k, v, beta = draw(9, 9)
    v = v / 30
    v[:, 4] += 300
    leaves = [x.requires_grad_() for x in (q, k, v, beta)]
    fallbacks.reset()
    with Operations() as seen:
        read = composed.composed_read(*leaves, None, None, None, True, 5**-0.5)
        (read.mean.sum() + read.free_energy.sum()).backward()
    assert not {"_local_scalar_dense.default", "nonzero.default", "item.default"} & set(seen.names)
    assert seen.names.count("softmax_recompute_triton.default") == 1
    assert seen.names.count("softmax_recompute_triton_backward.default") == 1
    assert fallbacks.recomputed == 2 * 4 * 4 * 3
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = softmax_read(*exact, backend="reference")
    (wanted.mean.sum() + wanted.free_energy.sum()).backward()
    torch.testing.assert_close(read.free_energy.double(), wanted.free_energy, rtol=1e-5, atol=1e-3)
    for own, other in zip(leaves, exact):
        assert (own.grad - other.grad).abs().max() <= 1e-4 * (1 + other.grad.abs().max())


def test_the_operators_are_what_they_say_and_count():
    q, k, v, beta = draw(3, 5)
    doubtful = torch.rand(2, 3, 4, 3) < 0.3
    how = None, None, None, True, 0.4
    forward = torch.zeros(2, 3, 4, 3), doubtful, q, k, v, beta, *how
    fallbacks.reset()
    out, normaliser, found = launch.recompute_on_device(*forward)
    assert fallbacks.recomputed == found.sum() == doubtful.sum()
    assert fallbacks.entries == doubtful.numel()
    opcheck(launch.recompute_on_device, forward, test_utils=("test_schema",))
    backward = torch.ones_like(out), doubtful, q, k, v, beta, *how, out, normaliser, found
    opcheck(launch._backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_the_example_of_the_self_check_at_the_sizes_that_ship(monkeypatch):
    monkeypatch.undo()
    kind = Kind("softmax", torch.float32, (16, 16))
    assert difference(kind, torch.device(DEVICE)) is None
    right = launch._backward
    monkeypatch.setattr(launch, "_backward", lambda *x: [1.01 * part for part in right(*x)])
    assert "gradient of q is off by" in difference(kind, torch.device(DEVICE))
