"""What attention pays for more heads of the same width, and slim FEM and split values for choosing by channel.

python benchmarks/heads_cpu.py            # writes research/results/heads_cpu.{json,md}
"""

from __future__ import annotations

import torch
from measure import save

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem_research.common.measure import alternate, cpu_growth, in_fresh_process

WIDTH, LENGTHS = 256, (32, 512, 2048)
SECONDS, CPU = 20.0, torch.device("cpu")
OFF = dict.fromkeys(("use_conv", "use_lse", "use_temperature", "use_outer_gate"), False)
ATTENTION = {f"attention, {heads} heads": heads for heads in (4, 8, 16, 32, 64, 128)}
LAYERS = (*ATTENTION, "split values, 4 heads", "slim FEM without C, 4 heads", "slim FEM, 4 heads")


def layer(name: str) -> FreeEnergyMixer:
    """With RoPE, which is the default."""
    torch.manual_seed(0)
    if name in ATTENTION:
        return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=ATTENTION[name], **OFF))
    if name.startswith("split"):
        return FreeEnergyMixer(FreeEnergyMixerConfig.split(n_embd=WIDTH, n_head=4))
    return FreeEnergyMixer(FreeEnergyMixerConfig.slim(n_embd=WIDTH, n_head=4, use_conv="without" not in name))


def train_step(name: str, length: int):
    mixer, x = layer(name), torch.randn(max(1, 512 // length), length, WIDTH)
    return lambda: mixer(x).square().sum().backward()


def train_growth(name: str, length: int) -> int | None:
    """Bytes of memory that a train step adds, after a short one that loads all code."""
    torch.set_num_threads(1)
    train_step(name, 64)()
    return cpu_growth(train_step(name, length))


def main() -> None:
    torch.set_num_threads(1)
    seconds = {t: alternate({name: train_step(name, t) for name in LAYERS}, SECONDS, CPU) for t in LENGTHS}
    growth = {name: in_fresh_process(train_growth, name, LENGTHS[-1]) for name in LAYERS}
    few = next(iter(ATTENTION))
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
    save("research/results/heads_cpu", "What more heads cost, on a CPU", results, rows, note)


if __name__ == "__main__":
    main()
