"""Channels and state spaces by our own kernels in Triton's interpreter, beside float64: `test_kernels.py` runs this
file.
"""

import interpreted  # noqa: F401  (before any kernel)

# isort: split

from dataclasses import replace

import pytest
import torch
from reads import gradients_of, make

from fem.ops.channel_scan import channel_kernels
from fem.ops.ssm import fused_ssm

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # fresh memory is NaN: what nobody wrote shows
BOTH = {
    "usual": {},
    "documents and masks": {"documents": True, "masked": True},
    "marks in float16": {"documents": True, "masked": True, "dtype": torch.float16},
    "documents in pieces": {"pieces": True, "documents": True},
    "in pieces": {"pieces": True},
    "one token": {"time": 1},
    "both directions": {"rows": 1, "causal": False},
    "documents and masks in both directions": {"causal": False, "documents": True, "masked": True},
    "spikes of 300": {"rows": 1, "spike": 300.0},
    "spans of 1,000": {"rows": 1, "spread": 400.0},
    "weights of 60": {"rows": 1, "weights": 60.0},
    "fast decays": {"rows": 1, "decay": 20.0},
    "values that hardly differ": {"rows": 1, "near": 1e-4},
    "small beta": {"rows": 1, "beta": 1e-3},
    "other free values": {"rows": 1, "free": 6},
    "columns of wider tensors": {"columns": True},
}
CASES = {
    "channels": {
        "no decay": {"rows": 1, "name": "aft"},
        "several blocks of channels": {"width": 35, "time": 5},
        "masks without decay": {"name": "aft", "masked": True},
        "spikes of 300 without decay": {"rows": 1, "name": "aft", "spike": 300.0},
        "pieces without decay": {"name": "aft", "pieces": True},
    },
    "states": {
        "several kept states": {"time": 19},
        "one state": {"rank": 1},
        "several blocks of channels": {"width": 15, "rank": 17, "time": 5},
    },
}
SIZES = {"channels": {"name": "decay", "width": 4}, "states": {"name": "ssm", "rank": 5}}
# float32's rounding; that of beta f, which is hundreds of nats high; that of a difference that is divided by beta
LIMIT = 2e-6
LOOSE = {
    "spikes of 300": 3e-4,
    "spikes of 300 without decay": 3e-4,
    "spans of 1,000": 3e-4,
    "states, one state": 1e-5,  # of a sum over tokens that nearly cancels
    "channels, small beta": 4e-4,
    "values that hardly differ": 3e-5,
    "marks in float16": 3e-3,  # its rounding
}


def results(call, marks, dtype, backend, pieces, columns=False):
    mine = replace(call.leaves(dtype), rules=call.rules | {"backend": backend})
    if columns:
        heads = {name: x.detach() for name, x in mine.arguments.items() if x is not None and x.dim() == 4}
        wide = {name: torch.cat([x, x], 2) for name, x in heads.items()}
        mine = mine.set(**{name: x[:, :, : x.shape[2] // 2].requires_grad_() for name, x in wide.items()})
    read = mine.in_pieces(*pieces, **marks) if pieces else mine.read(**marks)
    torch.manual_seed(1)
    cotangents = [torch.randn(x.shape) for x in read]
    return [*read, *gradients_of(mine, read, cotangents).values()]


def error(
    name, time=9, rows=2, spike=0.0, near=None, documents=False, masked=False, pieces=False, columns=False, dtype=None,
    **options,
) -> float:  # fmt: skip
    """Of reads and gradients, the largest, of its norm or of 1 where that is less."""
    call, marks = make(name, time, batch=rows, **options), {}
    if near is not None:
        call = call.set(v=3 + near * call.arguments["v"])
    call = call.spiked(spike, time // 4)
    if documents:
        marks["segment_ids"] = (torch.arange(time) // (time // 3 + 1))[None].expand(rows, time)
    if masked:
        marks["key_mask"] = torch.ones(rows, time, dtype=torch.bool)
        marks["key_mask"][0, :5] = marks["key_mask"][1, 7] = False
    sizes = (time // 2 - 2, time // 2, 1, 1, 1) if pieces else None
    wanted = results(call, marks, torch.float64, "plain", None)
    found = results(call, marks, dtype, "triton", sizes, columns)
    return max(((a - b).norm() / b.norm().clamp_min(1.0)).item() for a, b in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch):
    """Rows have pieces."""
    for module, constant in ((channel_kernels, "SHORTEST"), (fused_ssm, "CHUNK")):
        monkeypatch.setattr(module, constant, 2)


@pytest.mark.parametrize("kind, case", [(kind, case) for kind in SIZES for case in BOTH | CASES[kind]])
def test_reads_and_gradients_are_those_of_float64(kind, case):
    options = SIZES[kind] | (BOTH | CASES[kind])[case]
    assert error(**options) < LOOSE.get(case, LOOSE.get(f"{kind}, {case}", LIMIT))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("beta", [1e-3, 1.0])
def test_a_later_token_changes_no_bit_of_what_is_read_before_it(kind, beta):
    call = make(SIZES[kind]["name"], 9, beta=beta)
    later = call.set(v=torch.cat([call.arguments["v"][:, :7], 1e4 + call.arguments["v"][:, 7:]], 1))
    one, other = (x.read(backend="triton") for x in (call, later))
    assert all(torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_without_weight_read_0():
    call = make("aft", 9, width=4)
    call.arguments["log_weight"][:, :4] = -torch.inf
    assert not any(x[:, :4].any() for x in call.read(backend="triton"))


@pytest.mark.parametrize("name", ["ssm", "aft with decay"])
def test_second_derivatives_are_those_of_float64(name):
    call, found = make(name, 9, width=4), []
    for dtype, backend in ((None, "triton"), (torch.float64, "plain")):
        leaves = call.leaves(dtype)
        loss = sum(x.square().sum() for x in leaves.read(backend=backend))
        first = torch.autograd.grad(loss, leaves.tensors(), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves.tensors()))
    assert all((a - b).norm() < LIMIT * b.norm() for a, b in zip(*found, strict=True))
