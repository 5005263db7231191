"""The kernels of flash-linear-attention themselves, in Triton's interpreter: small scans, forward and backward."""

from importlib.util import find_spec

import pytest
from processes import printed

# Two things need help there: the autotuner, which has no driver to time with, takes the first configuration;
# and Python's `range` gives integers without `.to`.
SCRIPT = """
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
@pytest.mark.skipif(find_spec("fla") is None or find_spec("triton") is None, reason="needs fla-core and Triton")
@pytest.mark.parametrize("documents", ["one", "documents"])
@pytest.mark.parametrize("scan", ["linear", "head", "head in channels", "key", "sum"])
def test_the_kernels_read_what_the_definition_says(scan, documents):
    assert printed("-c", SCRIPT, scan, documents).endswith("equal\n")
