"""Kernels in Triton's interpreter: of flash-linear-attention and around them, of channels and state spaces, of one
token and of the conditioner, and which calls these read.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import needs_triton, printed, run_cases
from torch import nn

from fem.ops.conditioner.fused_conditioner import fits

pytestmark = needs_triton
SPILLED = {"ssm_backward_kernel of 64 states, False": 24}


def cases_of(what: str) -> Path:
    return Path(__file__).with_name(f"{what}_cases.py")


def test_programs_that_would_meet_on_a_card_are_found():
    run_cases(cases_of("memory"), "test")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ["scan", "channel_and_state", "conditioner", "token"])
def test_scans_the_conditioner_and_one_token_are_read_as_the_definition_says(what):
    run_cases(cases_of(what), "test")


@pytest.mark.slow
@pytest.mark.parametrize("whose, least", [("conditioner", 8), ("scans", 0)])
def test_registers_of_an_h100_hold_a_tile_and_what_a_cell_of_a_scan_remembers(whose, least):
    """Compiled for sm_90 without a card: the conditioner's kernels spill at most two numbers of a thread."""
    found = json.loads(printed("-m", "registers", whose))
    assert not {name: kernel for name, kernel in found.items() if kernel["spilled"] > SPILLED.get(name, least)}


# Two things need help there: the autotuner, which has no driver to time with, takes the first configuration;
# and Python's `range` gives integers without `.to`.
FLA = """
import builtins, importlib, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton.runtime.autotuner as autotuner
autotuner.Autotuner._bench = lambda self, *arguments, config=None, **options: [0.0, 0.0, 0.0]
class Index(int):
    def to(self, *_): return self
plain = lambda x: int(x.handle.data.item()) if hasattr(x, "handle") else int(x)
NAMES = "common.chunk_h common.chunk_o common.fused_recurrent gla.chunk hgrn.chunk hgrn.fused_recurrent utils.cumsum"
for name in NAMES.split():
    module = importlib.import_module(f"fla.ops.{name}")
    module.range = lambda *a: (Index(i) for i in builtins.range(*map(plain, a)))
from fem.ops.linear_attention import fla_read
from fem.functional import decay_scan, keyed_scan_read
torch.manual_seed(0)
torch.set_num_threads(1)
time, documents = 70, sys.argv[2] == "documents"
ids = {"segment_ids": torch.arange(time)[None] // 30} if documents else {}
def in_pieces(call, backend):
    reads, state, first, cut = [], None, 0, lambda x: None if x is None else x[:, first : first + size]
    for size in [time] if backend == "plain" else [40, 26, 1, 1, 1, 1]:  # two chunks, then tokens
        marks = {n: cut(x) for n, x in ids.items()}
        read, state = call(cut, backend=backend, initial_state=state, return_state=True, **marks)
        reads.append(read)
        first += size
    return [torch.cat(parts, 1) for parts in zip(*reads)]
def results(dtype, backend):
    torch.manual_seed(0)
    leaf = lambda x: x.to(dtype).requires_grad_()
    q, k, v = leaf(torch.rand(1, time, 2, 16)), leaf(torch.rand(1, time, 2, 16)), leaf(torch.randn(1, time, 2, 8))
    beta, g = leaf(torch.rand(2, 8) + 0.5), leaf(-torch.rand(1, time, 2, 8) / 8)
    if sys.argv[1] == "sum":
        leaves, ends = [v, g], torch.arange(time).eq(30)[:, None] & documents  # where the sum is forgotten
        found = [decay_scan(g.flatten(2).masked_fill(ends, -torch.inf), v.flatten(2), backend=backend)]
    else:
        shape = {"linear": None, "key": (1, time, 2, 16)}.get(sys.argv[1], (1, time, 2))
        fla_read.miscompiled = lambda device: sys.argv[1] == "head in channels"
        g = None if shape is None else leaf(-torch.rand(shape) / 8)
        leaves = [x for x in (q, k, v, beta, g) if x is not None]
        found = in_pieces(lambda cut, **go_on: keyed_scan_read(cut(q), cut(k), cut(v), beta, cut(g), **go_on), backend)
    return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), leaves)]
for found, wanted in zip(results(torch.float32, "triton"), results(torch.float64, "plain"), strict=True):
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert error < 1e-5, error
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fla") is None, reason="needs fla-core")
@pytest.mark.parametrize("documents", ["one", "documents"])
@pytest.mark.parametrize("scan", ["linear", "head", "head in channels", "key", "sum"])
def test_the_kernels_read_what_the_definition_says(scan, documents):
    assert printed("-c", FLA, scan, documents).endswith("equal\n")


class Watched(nn.LayerNorm):
    pass


def hooked() -> nn.LayerNorm:
    norm = nn.LayerNorm(8)
    norm.register_forward_hook(lambda *_: None)
    return norm


@pytest.mark.parametrize(
    "why, given",
    [
        ("the user asks for plain operations", {"backend": "plain"}),
        ("a CPU without the interpreter's asking", {"backend": "auto"}),
        ("float64", {"dtype": torch.float64}),
        ("more channels than a program holds", {"width": 129}),
        ("the same in 16 bits", {"width": 257, "dtype": torch.bfloat16}),
        ("no token", {"time": 0}),
        ("somebody watches the norm", {"norm": hooked()}),
        ("somebody watches the first norm", {"norm_in": hooked()}),
        ("an adapter", {"project": nn.Sequential(nn.Linear(8, 24))}),
        ("another norm", {"norm": Watched(8)}),
        ("a norm without weights", {"norm": nn.LayerNorm(8, elementwise_affine=False)}),
    ],
)
def test_the_plain_form_takes(why, given, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    usual = {"backend": "triton", "width": 8, "time": 3, "dtype": torch.float32}

    def taken(backend, width, time, dtype, norm=None, norm_in=None, project=None):
        maps = norm_in or nn.LayerNorm(8), project or nn.Linear(8, 3 * width), norm or nn.LayerNorm(width)
        return fits(backend, torch.zeros(1, time, 8, dtype=dtype), None, *maps)

    assert taken(**usual)
    assert not taken(**usual | given), why


def test_the_plain_form_takes_what_is_transformed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = []

    def call(x):
        found.append(fits("triton", x, None, nn.Identity(), nn.Linear(8, 24), nn.LayerNorm(8)))
        return x.sum()

    torch.func.grad(call)(torch.zeros(1, 3, 8))
    assert found == [False]
