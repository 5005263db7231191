"""The examples by which a card's kernels are checked, here by the interpreter at the tile sizes that ship, and what
kernels compute with where 32 bits would not do.

python -m pytest tests/ops/recurrent/kernels_self_check.py -o addopts=
"""

import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICE, patch_the_language_once

from fem.ops.channel_scan.kernels.forward import part_at
from fem.ops.common.kernels.decay_steps import chunk_of
from fem.ops.common.self_check import Kind, difference
from fem.ops.decay_scan.kernels import launch as decay_scan_launch
from fem.ops.linear_attention.kernels import launch as keyed_launch
from fem.ops.linear_attention.kernels.tiles import chunk_of as keyed_chunk_of

patch_the_language_once()
pytestmark = pytest.mark.filterwarnings("ignore")
LINEAR_ATTENTION = "linear_attention", torch.float32
DECAYING_SUM = Kind("decay_scan", torch.float32)


@pytest.mark.parametrize(
    "kind",
    [
        DECAYING_SUM,
        Kind(*LINEAR_ATTENTION, (16, 16, None, True)),
        Kind(*LINEAR_ATTENTION, (16, 48, "head", True)),
        Kind(*LINEAR_ATTENTION, (16, 16, "channel", False)),
    ],
    ids=lambda kind: "-".join(map(str, kind.encoded())),
)
def test_the_kernels_at_their_own_tile_sizes_are_the_plain_form(kind):
    assert difference(kind, torch.device(DEVICE)) is None


@pytest.mark.parametrize(
    ("module", "result", "kind", "wrong"),
    [
        (decay_scan_launch, "_forward", DECAYING_SUM, 1.01),
        (decay_scan_launch, "_backward", DECAYING_SUM, float("nan")),
        (keyed_launch, "_backward", Kind(*LINEAR_ATTENTION, (16, 16, None, True)), 1.01),
    ],
)
def test_a_kernel_that_computes_something_else_is_found(monkeypatch, module, result, kind, wrong):
    right = getattr(module, result)

    def scaled(*arguments):
        found = right(*arguments)
        if isinstance(found, torch.Tensor):
            return found * wrong
        return type(found)([found[0] * wrong, *found[1:]])

    monkeypatch.setattr(module, result, scaled)
    assert "is off by" in difference(kind, torch.device(DEVICE))


@triton.jit
def _write_places(out, time, channels, CHUNK: tl.constexpr):
    _, _, place, _, _, of_chunk = chunk_of(time, channels, CHUNK, 1)
    _, of_row, end, _ = keyed_chunk_of(time, CHUNK)
    if tl.program_id(2) == 2:
        tl.store(out + tl.arange(0, 1), place)
        tl.store(out + 1 + tl.arange(0, 1), of_chunk)
        tl.store(out + 2, of_row)
        tl.store(out + 3, end)


def test_tokens_beyond_two_to_the_31_have_their_own_places():
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    time, channels = 2**30, 7
    _write_places[(1, 1, 3)](out, time, channels, CHUNK=64)
    assert out.tolist() == [2 * time * channels, 2 * channels, 2 * time, time]


@triton.jit
def _write_distance(out, states, size, NUMBER: tl.constexpr):
    tl.store(out, part_at(states, NUMBER, size).to(tl.int64) - states.to(tl.int64))


@pytest.mark.parametrize("size", [1, 2**30, 2**31 - 1])
def test_parts_of_states_beyond_two_to_the_31_have_their_own_places(size):
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _write_distance[(1,)](out, torch.zeros(1, device=DEVICE), size, NUMBER=3)
    assert out.item() == 3 * 4 * size
