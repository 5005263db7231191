"""The linear-time priors on one CPU thread: how a train step grows with T, against the formulas they replace.

python benchmarks/scans_cpu.py            # a run in runs/scans_cpu
python benchmarks/scans_cpu.py split      # split values against the prior without FEM: runs/scans_split

`fem report runs/scans_cpu` adds it to the record.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fem import PRIORS, FreeEnergyMixer
from fem.functional import channel_scan_read, keyed_scan_read
from fem.provenance import provenance
from fem.tables import markdown_table, show_table
from fem_research.common.measure import Step, alternate, cpu_growth, in_fresh_process
from fem_research.common.mixers import mixer_config
from fem_research.common.names import display
from fem_research.runs.run import open_run
from fem_research.runs.tables import write_page

WIDTH, HEADS = 256, 4
SHORT, LONG = 1024, 8192
SECONDS, CPU = 5.0, torch.device("cpu")
LINEAR = [name for name in PRIORS if name != "softmax"]


@dataclass(frozen=True)
class ScansRecipe:
    """What is measured."""

    part: str
    width: int = WIDTH
    heads: int = HEADS
    seed: int = 0


def build(name: str) -> FreeEnergyMixer:
    """The layer of this mixer, such as "gla+LTG"."""
    torch.manual_seed(0)
    return FreeEnergyMixer(mixer_config(name, WIDTH, HEADS))


def train_step(name: str, length: int) -> Step:
    layer, x = build(name), torch.randn(1, length, WIDTH)

    def step():
        layer.zero_grad(set_to_none=True)
        layer(x).square().sum().backward()

    return step


def train_growth(train_step: Callable[[str, int], Step], name: str, length: int) -> int | None:
    """Bytes of memory that a train step adds, after a short one that loads all code."""
    torch.set_num_threads(1)
    train_step(name, 64)()
    return cpu_growth(train_step(name, length))


def state_bytes(name: str) -> int:
    return build(name)(torch.randn(1, 16, WIDTH), return_state=True)[1].nbytes


def streamed(name: str, chunk: int = 100, chunks: int = 1000) -> dict[str, float]:
    """Median milliseconds of CPU time of a chunk at the start and at the end of 100,000 tokens."""
    layer, state, taken = build(name), None, []
    for _ in range(chunks):
        x = torch.randn(1, chunk, WIDTH)
        start = time.process_time()
        with torch.no_grad():
            _, state = layer(x, state=state, return_state=True)
        taken.append(1e3 * (time.process_time() - start))
    ends = taken[1 : chunks // 10], taken[-chunks // 10 :]
    return {f"{part}_chunk_ms": statistics.median(end) for part, end in zip(("first", "last"), ends)}


def growth() -> list[dict]:
    rows = []
    for name in (f"{prior}+LTG" for prior in LINEAR):
        seconds = alternate({t: train_step(name, t) for t in (SHORT, LONG)}, SECONDS, CPU)
        same = {"state_bytes": state_bytes(name), **streamed(name)}
        for t in (SHORT, LONG):
            taken = {
                "train_ms": 1e3 * seconds[t],
                "train_extra_bytes": in_fresh_process(train_growth, train_step, name, t),
            }
            rows.append({"task": "scan", "mixer": display(name), "tokens": t} | taken | same)
    return rows


def back(read: tuple[torch.Tensor, ...]) -> None:
    (read[0].sum() + read[1].sum()).backward()


def materialised_gla(q, k, v, beta, decay):
    """GLA's read with all T states in memory, as cumulative sums scaled by the accumulated decay."""
    envelope = decay.cumsum(1)
    keys = k * (-envelope)[..., None].exp()
    mix = torch.cat([v, (beta * v).exp(), torch.ones_like(v[..., :1])], -1)
    states = (keys[..., :, None] * mix[..., None, :]).cumsum(1)
    out = torch.einsum("bthk,bthkd->bthd", q * envelope[..., None].exp(), states)
    mean, e, z = out.split([v.shape[-1], v.shape[-1], 1], -1)
    return mean / z, (e / z).log() / beta


def against_materialised() -> dict[str, float]:
    """Forward and backward of GLA's read, and of the formula."""
    shape = (1, 2048, HEADS, WIDTH // HEADS)
    q, k, v = (torch.rand(shape, requires_grad=True) for _ in range(3))
    decay, beta = (-0.01 * torch.rand(shape[:-1])).requires_grad_(), torch.full(shape[2:], 2.0)
    return alternate(
        {
            "GLA read": lambda: back(keyed_scan_read(q, k, v, beta, decay)),
            "GLA read, all states kept": lambda: back(materialised_gla(q, k, v, beta, decay)),
        },
        SECONDS,
        CPU,
    )


def against_cumulative_sums() -> dict[str, float]:
    """Forward and backward of the AFT read, and of its formula: exp(k - max), two cumulative sums and a division."""
    shape = (1, 2048, HEADS, WIDTH // HEADS)
    k, v = (torch.randn(shape, requires_grad=True) for _ in range(2))
    decay = (-torch.rand(shape)).requires_grad_()
    beta = torch.full(shape[2:], 2.0)

    def cumulative(log_weight):
        weight = (log_weight - log_weight.amax(1, keepdim=True)).exp()
        z = weight.cumsum(1)
        return (weight * v).cumsum(1) / z, ((weight * (beta * v).exp()).cumsum(1) / z).log() / beta

    return alternate(
        {
            "AFT read": lambda: back(channel_scan_read(k, v, beta)),
            "AFT read, cumulative sums": lambda: back(cumulative(k)),
            "rnn_decay read": lambda: back(channel_scan_read(None, v, beta, decay)),
            "rnn_decay read, cumulative sums": lambda: back(cumulative(-decay.cumsum(1))),
        },
        SECONDS,
        CPU,
    )


def against_formulas() -> list[dict]:
    found = {"against all states": against_materialised(), "against sums": against_cumulative_sums()}
    return [
        {"task": task, "mixer": name, "tokens": 2048, "train_ms": 1e3 * seconds}
        for task, of in found.items()
        for name, seconds in of.items()
    ]


def split_against_alone() -> list[dict]:
    """Split values, in layers of the same linear weights, against the prior without any part of FEM."""
    rows = []
    for prior in (name for name in LINEAR if PRIORS[name].takes_pairs):
        pair = (prior, f"{prior}+LTG/r{WIDTH // 16}/s.5")
        for t in (SHORT, 4 * SHORT):
            seconds = alternate({name: train_step(name, t) for name in pair}, SECONDS, CPU)
            for name in pair:
                row = {"task": "split values", "mixer": display(name), "tokens": t, "train_ms": 1e3 * seconds[name]}
                rows.append(row | {"state_bytes": state_bytes(name)})
    return rows


def main() -> None:
    torch.set_num_threads(1)
    part = "split" if sys.argv[1:] == ["split"] else "cpu"
    rows = split_against_alone() if part == "split" else growth() + against_formulas()
    title = "Split values under linear-time priors" if part == "split" else "Linear-time priors"
    note = f"Batch 1, width {WIDTH}, {HEADS} heads, float32; CPU time of one thread, medians of steps in turn."
    command = " ".join(["python", "benchmarks/scans_cpu.py", *sys.argv[1:]])
    columns = dict.fromkeys(name for row in rows for name in row)
    shown = [{name: row.get(name) for name in columns} for row in rows]
    folder = Path(f"runs/scans_{part}")
    with open_run(folder, "scans", ScansRecipe(part)) as run:
        write_page(run.folder, f"{title} on a CPU", note, markdown_table(shown), provenance(command))
        run.finish({"scans": rows})
    show_table(title, shown, str(folder / "report.md"))


if __name__ == "__main__":
    main()
