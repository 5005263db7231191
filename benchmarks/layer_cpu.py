"""A FEM layer against a softmax attention layer of equal weights, on one CPU thread.

python benchmarks/layer_cpu.py            # writes docs/results/layer_cpu.{json,md}
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from measure import alternate, in_fresh_process, peak_growth, save
from torch import nn

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.ops.rope import rotate

BATCH, WIDTH, HEADS, TIMES = 2, 512, 8, (512, 2048)


class Attention(nn.Module):
    """Plain softmax attention with RoPE: the layer that FEM replaces."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        position = torch.arange(x.shape[1])
        q, k, v = (project(x).unflatten(-1, (HEADS, -1)) for project in (self.q, self.k, self.v))
        q, k = rotate(q, position, 10000.0), rotate(k, position, 10000.0)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o(o.transpose(1, 2).flatten(2))


LAYERS = {
    "attention": Attention,
    "FEM without C": lambda: FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS, use_conv=False)),
    "FEM": lambda: FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS)),
}


def steps(name: str, time: int):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(BATCH, time, WIDTH, requires_grad=True)

    def forward():
        with torch.no_grad():
            layer(x)

    def train():
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).square().sum().backward()

    return forward, train


def memory(name: str, time: int) -> int:
    """Bytes that a train step adds to the peak of a fresh process, after a short step has loaded all code."""
    return int(in_fresh_process(__file__, "memory", name, str(time)))


def main() -> None:
    torch.set_num_threads(1)
    results, rows = {}, []
    for time in TIMES:
        runs = {name: steps(name, time) for name in LAYERS}
        forward = alternate({name: run[0] for name, run in runs.items()})
        train = alternate({name: run[1] for name, run in runs.items()})
        peak = {name: memory(name, time) for name in LAYERS}
        results[time] = {"forward_s": forward, "train_s": train, "train_extra_bytes": peak}
        for name in LAYERS:
            compared = lambda figures: f"{figures[name] / figures['attention']:.2f}"  # noqa: B023, E731
            rows.append(
                {
                    "T": str(time),
                    "layer": name,
                    "forward ms": f"{1e3 * forward[name]:.0f}",
                    "ratio": compared(forward),
                    "train step ms": f"{1e3 * train[name]:.0f}",
                    "ratio ": compared(train),
                    "extra memory MiB": f"{peak[name] / 2**20:.0f}",
                    "ratio  ": compared(peak),
                }
            )
    note = (
        f"Batch {BATCH}, width {WIDTH}, {HEADS} heads, fp32, equal weights (4 D^2) and the same RoPE. Ratios are to "
        "the attention layer of the same T: process CPU time of one thread, medians of 31 alternating runs; memory is "
        "what a train step adds to the peak of a fresh process."
    )
    save("docs/results/layer_cpu", "One layer on a CPU", results, rows, note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["memory"]:
        steps(sys.argv[2], 16)[1]()
        print(peak_growth(steps(sys.argv[2], int(sys.argv[3]))[1]))
    else:
        main()
