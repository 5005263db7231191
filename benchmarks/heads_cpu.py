"""What attention pays for more heads of the same width, and FEM for choosing by channel.

python benchmarks/heads_cpu.py            # writes runs/heads_cpu.{json,md}
"""

from __future__ import annotations

import torch
from measure import save
from scans_cpu import train_growth

from fem import FreeEnergyMixer
from fem_research.common.measure import alternate, in_fresh_process
from fem_research.common.mixers import mixer_config

WIDTH, LENGTHS = 256, (32, 512, 2048)
SECONDS, CPU = 30.0, torch.device("cpu")
LAYERS = {f"attention, {heads} heads": f"attention/h{heads}" for heads in (4, 8, 16, 32, 64, 128)} | {
    "conditioner alone, 64 heads": "attention+C/h64",
    "log-sum-exp alone, 4 heads": "attention+L",
    "split values, 4 heads": "attention+LTG/r16/s.5",
    "slim FEM without C, 4 heads": "attention+LTG/r16",
    "slim FEM, 4 heads": "FEM/r16",
}


def train_step(name: str, length: int):
    torch.manual_seed(0)
    layer, x = FreeEnergyMixer(mixer_config(LAYERS[name], WIDTH, 4)), torch.randn(max(1, 512 // length), length, WIDTH)
    return lambda: layer(x).square().sum().backward()


def main() -> None:
    torch.set_num_threads(1)
    seconds = {t: alternate({name: train_step(name, t) for name in LAYERS}, SECONDS, CPU) for t in LENGTHS}
    growth = {name: in_fresh_process(train_growth, train_step, name, LENGTHS[-1]) for name in LAYERS}
    few = next(iter(LAYERS))
    rows = [
        {
            "layer": name,
            **{f"T = {t}": f"{seconds[t][name] / seconds[t][few]:.2f}" for t in LENGTHS},
            f"memory, T = {LENGTHS[-1]}": f"{growth[name] / growth[few]:.2f}",
        }
        for name in LAYERS
    ]
    note = (
        f"A train step (forward and backward) of a layer of width {WIDTH} with RoPE, over attention with 4 heads, "
        "on 16 rows of 32 tokens, one of 512 and one of 2,048: process CPU time of one thread, medians of steps in "
        "turn. Memory: what a step adds. More heads of the same width make the same products, and each makes its own "
        "softmax weights."
    )
    results = {"train_s": seconds, "train_bytes": growth}
    save("runs/heads_cpu", "What more heads cost, on a CPU", results, rows, note)


if __name__ == "__main__":
    main()
