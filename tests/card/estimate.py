"""What a card would take for a layer's train step, by what it is given to do: `.card/run tests/card/estimate.py`.

An estimate, no measurement: the sum over all launches of what the slowest of these takes: its bytes at BANDWIDTH, its
product at PRODUCTS, a Triton kernel's instructions, each as long as it occupies its unit, or LEAST. Attention takes
what it took on an H100, in proportion to its widths. Kernels for doubtful entries end at once. A branch counts whether
it is taken or not, a loop once.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections import Counter

import card
import measure
import torch
from ahead_of_time import said_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fem.ops.softmax.fused import fused_attention

BANDWIDTH, PRODUCTS, LEAST = 2.5e12, 750e12, 2e-6  # bytes and FLOP a second, seconds
FORWARD, BACKWARD = 286e12, 268e12  # FLOP a second of attention over 64 columns, causal, on an H100
ISSUES = 132 * 4 * 1.7e9  # warps' instructions a second: 4 schedulers on each processor
UNITS = {  # cycles of a scheduler that a warp's instruction occupies its unit, by CUDA's throughputs; of others, 1
    8: "MUFU F2F F2I I2F HMMA",
    4: "LDG STG LDS STS LDSM SHFL",
    2: "F2FP I2FP IMAD IADD3 LOP3 ISETP SHF LEA SEL PRMT PLOP3 VIADD IABS",
}
CYCLES = {name: cycles for cycles, names in UNITS.items() for name in names.split()}
SLIM = {"gate_rank": 64}
LAYERS = {  # those that an H100 and an H200 timed, in research/results/cost.csv
    "attention": measure.ATTENTION,
    "softmax": {},
    "softmax, conditioner": {"use_conv": True},
    "softmax, slim": SLIM,
    "softmax, slim, conditioner": SLIM | {"use_conv": True},
    "softmax, split": SLIM | {"free_share": 0.5},
    "linear": {"prior_type": "linear"},
    "gla": {"prior_type": "gla"},
    "gla, channels": {"prior_type": "gla", "decay": "channel"},
}


@functools.cache
def cycles(binary: bytes) -> int:
    """Of a scheduler, for all instructions of a warp."""
    code = said_of(binary, "nvdisasm", "-c")
    names = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9]*)", code, re.MULTILINE)
    return sum(CYCLES.get(name, 1) for name in names)


def size(tensors) -> int:
    """Bytes of what there is once, of tensors on the card."""
    found = {(x.data_ptr(), x.shape, x.stride()): x for x in tensors if isinstance(x, Tensor) and x.is_cuda}
    return sum(x.element_size() * x[tuple(slice(None) if s else 0 for s in x.stride())].numel() for x in found.values())


class Watch(TorchDispatchMode):
    """Seconds of launches, by their names."""

    def __init__(self):
        super().__init__()
        self.seconds = Counter()
        card.watchers.append(self.kernel)
        for name in ("kernel_attention", "kernel_attention_backward"):
            setattr(fused_attention, name, self.attention(getattr(fused_attention, name)))

    def kernel(self, name, binary, warps, grid, arguments) -> None:
        seconds = LEAST
        if not name.startswith("doubtful"):
            issued = cycles(binary) * warps * math.prod(grid) / ISSUES
            seconds = max(size(tree_leaves(arguments)) / BANDWIDTH, issued, LEAST)
        self.seconds[name] += seconds

    def attention(self, call):
        """The call, whose stand-in reads values of the keys' width."""

        def heard(*arguments):
            q, k, values = arguments["backward" in call.__name__ :][:3]
            pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]  # of which causality leaves half
            if "backward" in call.__name__:
                seconds = pairs * (3 * q.shape[3] + 2 * values.shape[3]) / BACKWARD
            else:
                seconds = pairs * (q.shape[3] + values.shape[3]) / FORWARD
            self.seconds["attention"] += seconds
            return call(*arguments)

        return heard

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        with card.record() as events:
            out = function(*arguments, **(options or {}))
        name = function.__name__.split(".")[0]
        if events.launches and "attention" not in name:
            inputs, flop = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)], 0
            if name in ("mm", "addmm"):
                name, (left, right) = "products", [x for x in inputs if x.ndim == 2][:2]
                flop = 2 * left.numel() * right.shape[1]
            self.seconds[name] += max(size([*inputs, *tree_leaves(out)]) / BANDWIDTH, flop / PRODUCTS, LEAST)
        return out

    def taken(self) -> dict[str, float]:
        """Milliseconds by name since the last time."""
        found = {name: 1e3 * seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return found


def row(name: str, watch: Watch) -> dict:
    """Milliseconds of a train step's launches, with bfloat16 parameters."""
    layer = measure.build(**LAYERS[name]).bfloat16()
    x = measure.tokens().detach().bfloat16().requires_grad_()
    layer(x).sum().backward()
    measure.forget(layer, x)
    gradient = torch.ones_like(x)
    watch.taken()
    with watch:
        y = layer(x)
        forward = watch.taken()
        y.backward(gradient)
    backward = watch.taken()
    print(f"{name}\n  forward {_listed(forward)}\n  backward {_listed(backward)}", flush=True)
    both = Counter(forward) + Counter(backward)
    known = {part: both.pop(part, 0.0) for part in ("attention", "products")}
    found = {"forward": sum(forward.values()), "train": sum(forward.values()) + sum(backward.values())} | known
    return {"layer": name} | {part: round(ms, 3) for part, ms in (found | {"others": sum(both.values())}).items()}


def _listed(taken: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(taken.items(), key=lambda one: -one[1]) if ms > 0.01)


if __name__ == "__main__":
    os.environ.pop("DISABLE_PTXAS_OPT", None)
    card.pose()
    watch, record = Watch(), json.loads(measure.RECORD.read_text())
    record["estimated"] = [row(name, watch) for name in sys.argv[1:] or LAYERS]
    measure.write(record)
