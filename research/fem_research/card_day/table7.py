"""The slice `table7`: what the paper's Table 7 measures, in float32 and bfloat16, eager and compiled.

12 blocks of GPT-2's, 8 rows of 1,024 tokens, without embeddings and head. Float32 products run in TF32, as the record
says; the paper does not say whether its own did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from fem.recipes import require_some_of
from fem_research.bench.cases import TABLE7, Case, Size
from fem_research.bench.workloads import COMPILED, mixer_of, workload
from fem_research.card_day import cells
from fem_research.common.mixers import BASELINES, available, known

BASELINE = "attention"
OURS = ("attention", "attention+LTG", "FEM", "attention+LTG/r32", "FEM/r32", "attention+LTG/r32/s.5")
MIXERS = tuple(dict.fromkeys([*OURS, "GLA", "GLA+LTG", "FEM-GLA", *TABLE7]))
DTYPES, MODES = ("bfloat16", "float32"), ("compiled", "eager")
NAMES = ("mixer", "dtype", "mode")
EXPERIMENT = "card_table7"


@dataclass(frozen=True, kw_only=True)
class Table7Recipe:
    """What is measured; the defaults are the paper's sizes."""

    mixers: tuple[str, ...] = MIXERS
    dtypes: tuple[str, ...] = DTYPES
    modes: tuple[str, ...] = MODES
    batch: int = 8
    time: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12
    seconds: float = 2.0
    tf32: bool = True

    def __post_init__(self):
        require_some_of("modes", self.modes, MODES)
        require_some_of("dtypes", self.dtypes, DTYPES)
        for name in map(mixer_of, self.mixers):
            name in BASELINES or known(name)


def cell(mixer: str, dtype: str, mode: str, recipe: Table7Recipe, device: torch.device) -> dict:
    """Forward pass and train step of one mixer; operations are counted in eager mode, by torch's counter."""
    size = Size(recipe.batch, recipe.time, recipe.width, recipe.heads)
    case = Case("gpt2", size, dtype, (mixer,), layers=recipe.layers)
    try:
        work = workload(case, mixer + COMPILED if mode == "compiled" else mixer, device)
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        return {"forward": cells.failed(error)}
    found = {"parameters": work.parameters, "tokens": recipe.batch * recipe.time}
    found["forward"] = cells.measured(work.forward, recipe.seconds, device)
    found["train"] = cells.measured(work.train, recipe.seconds, device)
    if mode == "eager" and "failed" not in found["train"]:
        with FlopCounterMode(display=False) as counter:
            work.train()
        found["train_flop"] = counter.get_total_flops()
    return found


def run(recipe: Table7Recipe, output: Path, minutes: float = float("inf")) -> dict:
    """All cells of mixers whose library is here, until the time is over; returns what results.json holds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared = {name: value for name, value in asdict(recipe).items() if name not in ("mixers", "dtypes", "modes")}
    shared |= {"device": device.type}
    here = [mixer for mixer in recipe.mixers if mixer not in BASELINES or available(mixer, device)]
    keys = [(mixer, dtype, mode) for dtype in recipe.dtypes for mode in recipe.modes for mixer in here]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if recipe.tf32 else "highest")
    try:
        return cells.run(output, EXPERIMENT, shared, keys, lambda key: cell(*key, recipe, device), minutes, NAMES)
    finally:
        torch.set_float32_matmul_precision(before)


def table(found: Mapping) -> list[dict]:
    """A row a cell: ours beside attention of the same dtype and mode, and the paper's ratio of train steps."""
    by_key = {tuple(one[name] for name in NAMES): one for one in found["cells"]}
    rows = []
    for (mixer, dtype, mode), one in by_key.items():
        row = {"mixer": mixer, "dtype": dtype, "mode": mode}
        row |= cells.beside(one, by_key.get((BASELINE, dtype, mode), {}), ("forward", "train"))
        seconds = one.get("train", {}).get("seconds")
        row["tokens/s"] = round(one["tokens"] / seconds) if seconds else None
        paper = TABLE7.get(mixer)
        row["paper's train ratio"] = f"{paper.train / TABLE7[BASELINE].train:.2f}" if paper else None
        rows.append(row)
    return rows
