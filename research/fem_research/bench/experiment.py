"""`fem bench`: a table per part, and pictures of the parts in which the context grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from fem.provenance import provenance
from fem.tables import markdown_table, show_table
from fem_research.bench.cases import BASELINE, BY_TOKEN, OWN_LAYER, TABLE5, TABLE7, BenchRecipe, Case
from fem_research.bench.workloads import baseline_of, colour_of, measure, measure_tokens
from fem_research.common.measure import cpu_threads
from fem_research.common.plots import Panel, learning_curves
from fem_research.runs.run import command_line, open_run, progress
from fem_research.runs.tables import write_page, write_table

Results = list[tuple[Case, dict[str, dict]]]

GRAPHS = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}  # a mixer left uncompiled would not be told
PAPER = {"gpt2": TABLE7, "table5": TABLE5}
PAPER_BASELINE = {"table5": OWN_LAYER}
TITLES = {
    "read": "The read alone",
    "layer": "One layer",
    "single": "One layer with single parts",
    "heads": "One layer with more heads",
    "gpt2": "Blocks of GPT-2 (Table 7)",
    "table5": "Blocks of Table 5",
    "decode": "Streaming decode, one layer",
    "served": "Decode in a compiled graph, one layer",
    "context": "One layer at growing contexts",
}
EQUAL = "Equal linear weights, 4 D^2; the conditioner C adds its own."
COUNTED = (
    "Memory at the peak is that of the weights and of what a step adds. Operations are those of matrix products as "
    "torch's profiler counts them: it sees those of the plain form, and not those inside flash attention."
)
NOTES = {
    "read": "Attention reads values as wide as its keys; FEM reads [v | exp(beta v)] of values half as wide.",
    "layer": EQUAL,
    "single": EQUAL,
    "heads": "More heads of the same width make the same products, and each makes its own softmax weights.",
    "gpt2": "Blocks without embeddings and head; baselines need a GPU and their library. In brackets the paper's own "
    f"ratio to its flash attention: 12 blocks, T 1024, batch 8, FP32 on one L40S. {COUNTED}",
    "table5": f"Ratios are to {OWN_LAYER}: FEM without any of its parts. In brackets the paper's own ratio "
    f"to that row: 8 blocks, T 2048, batch 4 on one L40S. {COUNTED}",
    "decode": "Attention of equal weights keeps a KV cache, allocated at full length; FEM's values are half as wide.",
    "served": "transformers' static cache of full length and torch.compile, for both; FEM's values are half as wide.",
    "context": "Microseconds a token; extra memory is of a train step.",
}
PANELS = {
    "decode": (("milliseconds a token", "token_s", 1e3, False), ("MiB of state", "state_bytes", 2**-20, False)),
    "context": (
        ("forward, microseconds a token", "forward_s", 1e6, True),
        ("train step, microseconds a token", "train_s", 1e6, True),
        ("train step, extra MiB", "train_extra_bytes", 2**-20, False),
    ),
}


def rows(part: str, results: Results) -> list[dict]:
    """The table of one part, with a row for every mixer of every case; last those that only the paper has."""
    make = _decode if part in BY_TOKEN else _costs
    published = {*TABLE5, *TABLE7}
    return [
        make(part, case, name, costs)
        for case, costs in results
        for name in sorted(case.mixers, key=lambda name: name not in costs)
        if name in costs or name in published
    ]


def _costs(part: str, case: Case, name: str, costs: dict[str, dict]) -> dict:
    cost, base = costs.get(name, {}), costs.get(PAPER_BASELINE.get(part, baseline_of(name)), {})
    tokens = case.size.batch * case.size.time
    unit, scale = ("us/token", 1e6 / tokens) if part == "context" else ("ms", 1e3)
    several_dtypes = {"dtype": case.dtype} if part in ("read", "layer", "single") else {}
    row = {"mixer": name} | ({} if part in PAPER else {"T": case.size.time}) | several_dtypes
    for label, field in (("forward", "forward_s"), ("train", "train_s")):
        row[f"{label} {unit}"] = None if field not in cost else scale * cost[field]
        row[f"{label} ratio"] = _ratio(cost.get(field), base.get(field), part, name, label)
    if part in PAPER:
        return row | _as_the_paper(part, case, name, cost, base)
    grown = cost.get("train_extra_bytes")
    row["train memory MiB"] = None if grown is None else grown / 2**20
    row["memory ratio"] = _ratio(grown, base.get("train_extra_bytes"), part, name, "train_gb")
    return row


def _as_the_paper(part: str, case: Case, name: str, cost: dict, base: dict) -> dict:
    """The further columns of Tables 5 and 7: tokens a second, memory at the peak, weights included, and operations."""
    tokens, row = case.size.batch * case.size.time, {}
    for step in ("forward", "train"):
        row[f"{step} tokens/s"] = tokens / cost[f"{step}_s"] if cost else None
    for step in ("forward", "train"):
        peak = _peak(case, cost, step)
        row[f"{step} peak MiB"] = None if peak is None else peak / 2**20
        row[f"{step} peak ratio"] = _ratio(peak, _peak(case, base, step), part, name, f"{step}_gb")
    for step in ("forward", "train"):
        flop = cost.get(f"{step}_flop")
        row[f"{step} GFLOP"] = None if flop is None else flop / 1e9
        row[f"{step} MFLOP/token"] = None if flop is None else flop / tokens / 1e6
        row[f"{step} FLOP ratio"] = _ratio(flop, base.get(f"{step}_flop"), part, name, f"{step}_mflop")
    return row | {"parameters": cost.get("parameters")}


def _peak(case: Case, cost: dict, step: str) -> int | None:
    """Bytes of the weights and of what a step adds to them."""
    grown = cost.get(f"{step}_extra_bytes")
    return None if grown is None else grown + cost["parameters"] * getattr(torch, case.dtype).itemsize


def _ratio(cost: int | float | None, base: int | float | None, part: str, name: str, field: str) -> str | None:
    """Our ratio to the baseline, and the paper's in brackets."""
    ours = "" if not cost or not base else f"{cost / base:.2f}"
    table = PAPER.get(part, {})
    paper = getattr(table.get(name), field, None)
    if paper is None:
        return ours or None
    return f"{ours} ({paper / getattr(table[PAPER_BASELINE.get(part, BASELINE)], field):.2f})".strip()


def _decode(part: str, case: Case, name: str, costs: dict[str, dict]) -> dict:
    cost, base = costs[name], costs[BASELINE]
    row = {"mixer": name, "context": case.size.time, "dtype": case.dtype, "ms/token": 1e3 * cost["token_s"]}
    row |= {"time ratio": f"{cost['token_s'] / base['token_s']:.2f}", "state bytes": cost["state_bytes"]}
    return row | {"state ratio": f"{cost['state_bytes'] / base['state_bytes']:.2g}"}


def curves(path: Path, part: str, records: Sequence[Mapping]) -> None:
    """One panel per cost, one line per mixer, both axes logarithmic."""
    costs = pd.DataFrame(
        {"mixer": name, **record["size"], **cost} for record in records for name, cost in record["results"].items()
    )
    panels = []
    for label, field, scale, per_token in PANELS[part]:
        y = scale * costs[field] / (costs.time * costs.batch if per_token else 1)
        points = pd.DataFrame({"mixer": costs.mixer, "x": costs.time, "y": y})[costs[field].notna()]
        series = {name: [(of.x.tolist(), of.y.tolist())] for name, of in points.groupby("mixer", sort=False)}
        panels.append(Panel(label, "context (tokens)", series, logarithmic=True))
    learning_curves(path, TITLES[part], panels, {name: colour_of(name) for name in costs.mixer.unique()})


def run(recipe: BenchRecipe, output: Path) -> dict:
    """Measure, and write the results to `output`; returns what results.json holds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with cpu_threads(recipe.threads), open_run(output, "bench", recipe) as under_way, progress() as bars:
        results, bar = [], bars.add_task("bench", total=len(recipe.cases()))
        for case in recipe.cases():
            bars.update(bar, description=f"bench: {case.name}")
            with torch.random.fork_rng(), torch._dynamo.config.patch(GRAPHS):
                torch.manual_seed(recipe.seed)
                costs = measure_tokens if case.part in BY_TOKEN else measure
                results.append((case, costs(case, device, recipe.seconds)))
            bars.advance(bar)
            under_way.log(**asdict(case), results=results[-1][1])
        of_part = {part: [pair for pair in results if pair[0].part == part] for part in recipe.part_names}
        parts = {part: pairs for part, pairs in of_part.items() if pairs}
        write_report(under_way.folder, parts, provenance(command_line("bench", recipe, BenchRecipe())))
        records = [{**asdict(case), "device": device.type, "results": found} for case, found in results]
        for part in PANELS.keys() & parts.keys():
            curves(under_way.folder / f"{part}.png", part, [record for record in records if record["part"] == part])
        return under_way.finish({"bench": records})


def write_report(folder: Path, parts: dict[str, Results], how_made: str) -> None:
    """A page with a section per part, and their tables."""
    where = "a GPU" if torch.cuda.is_available() else "a CPU"
    sections = []
    for part, results in parts.items():
        case, title, table = results[0][0], TITLES[part], rows(part, results)
        write_table(folder, part, table)
        show_table(title, table)
        blocks = f", {case.layers} block{'s' * (case.layers > 1)}" if case.layers else ""
        batches = {case.size.time: case.size.batch for case, _ in results}
        several = len({*batches.values()}) > 1
        batch = ", ".join(f"{rows} at T {time:,}" for time, rows in batches.items()) if several else case.size.batch
        shape = f"Batch {batch}, width {case.size.width}, {case.size.heads} heads{blocks}."
        sections += [f"## {title}", f"{shape} {NOTES[part]}", markdown_table(table)]
        if part in PANELS:
            sections.append(f"![{title.lower()}]({part}.png)")
    write_page(
        folder,
        f"{TITLES[next(iter(parts))] if len(parts) == 1 else 'What FEM costs'}, on {where}",
        "Medians of mixers that run in turn: process time on a CPU, time between two events on a GPU. A train step is "
        "forward and backward; its memory is what it adds at its peak to what was allocated before. Blank: not run.",
        *sections,
        how_made,
    )
