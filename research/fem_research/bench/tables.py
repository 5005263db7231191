"""Tables and pictures of a benchmark: every mixer beside attention, measured in turn with it, and beside the paper's
figures; cost over context length.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fem.plots import Panel, learning_curves
from fem_research.bench.cases import BY_TOKEN, Case, Size
from fem_research.bench.mixers import BASELINE, OWN_LAYER, colour_of, shown
from fem_research.bench.paper import TABLE5, TABLE7

Results = list[tuple[Case, dict[str, dict]]]

PAPER = {"gpt2": TABLE7, "table5": TABLE5}
PAPER_BASELINE = {"gpt2": BASELINE, "table5": "FEM-SM -G,T,L,C"}
TITLES = {
    "read": "The read alone",
    "layer": "One layer",
    "gpt2": "Blocks of GPT-2 (Table 7)",
    "table5": "Blocks of Table 5",
    "decode": "Streaming decode, one layer",
    "served": "Decode in a compiled graph, one layer",
    "context": "One layer at growing contexts",
}
NOTES = {
    "read": "Attention reads values as wide as its keys; FEM reads [v | exp(beta v)] of values half as wide.",
    "layer": "Equal linear weights, 4 D^2; the conditioner C adds its own.",
    "gpt2": "Blocks without embeddings and head; baselines need a GPU and their library. In brackets the paper's own "
    "ratio to its flash attention: 12 blocks, T 1024, batch 8, FP32 on one L40S. Operations are those of matrix "
    "products as torch's profiler counts them: it sees those of the plain form, and not those inside flash attention.",
    "table5": f"Ratios are to {OWN_LAYER}: FEM without any of its parts. In brackets the paper's own ratio "
    "to that row: 8 blocks, T 2048, batch 4 on one L40S.",
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
        make(part, case, name, found)
        for case, found in results
        for name in sorted(case.mixers, key=lambda name: name not in found)
        if name in found or name in published
    ]


def _costs(part: str, case: Case, name: str, found: dict[str, dict]) -> dict:
    own, base = found.get(name, {}), found.get(PAPER_BASELINE.get(part, BASELINE), {})
    tokens = case.size.batch * case.size.time
    unit, scale = ("us/token", 1e6 / tokens) if part == "context" else ("ms", 1e3)
    several_dtypes = {"dtype": case.dtype} if part in ("read", "layer") else {}
    row = {"mixer": shown(name), "T": case.size.time, **several_dtypes}
    for label, field in (("forward", "forward_s"), ("train", "train_s")):
        row[f"{label} {unit}"] = None if field not in own else scale * own[field]
        row[f"{label} ratio"] = _ratio(own.get(field), base.get(field), part, name, label)
    grown = own.get("train_extra_bytes")
    row["train memory MiB"] = None if grown is None else grown / 2**20
    row["memory ratio"] = _ratio(grown, base.get("train_extra_bytes"), part, name, "train_gb")
    if part in PAPER:
        flop = own.get("forward_flop")
        row["GFLOP forward"] = None if flop is None else flop / 1e9
        row["parameters"] = own.get("parameters")
    return row


def _ratio(own: int | float | None, base: int | float | None, part: str, name: str, field: str) -> str | None:
    """Our ratio to the baseline, and the paper's in brackets."""
    ours = "" if not own or not base else f"{own / base:.2f}"
    table = PAPER.get(part, {})
    paper = getattr(table.get(name), field, None)
    if paper is None:
        return ours or None
    return f"{ours} ({paper / getattr(table[PAPER_BASELINE[part]], field):.2f})".strip()


def _decode(part: str, case: Case, name: str, found: dict[str, dict]) -> dict:
    own, base = found[name], found[BASELINE]
    return {
        "mixer": shown(name),
        "context": case.size.time,
        "dtype": case.dtype,
        "ms/token": 1e3 * own["token_s"],
        "time ratio": f"{own['token_s'] / base['token_s']:.2f}",
        "state bytes": own["state_bytes"],
        "state ratio": f"{own['state_bytes'] / base['state_bytes']:.2g}",
    }


def redraw(results: Mapping, recipe: Mapping, folder: Path) -> None:
    """A picture for each part in which the context grows, from what results.json holds."""
    cases = [(_case(record), record["results"]) for record in results["bench"]]
    for part in PANELS:
        if found := [pair for pair in cases if pair[0].part == part]:
            curves(folder / f"{part}.png", part, found)


def _case(record: Mapping) -> Case:
    mixers = record.get("mixers") or record["contenders"]  # the name in results of version 0.1
    return Case(record["part"], Size(**record["size"]), record["dtype"], tuple(mixers), record["layers"])


def curves(path: Path, part: str, results: Results) -> None:
    """One panel per cost, one line per mixer, both axes logarithmic."""
    names = list(dict.fromkeys(name for _, found in results for name in found))
    panels = []
    for label, field, scale, per_token in PANELS[part]:
        series = {}
        for name in names:
            points = [
                (case.size.time, scale * found[name][field] / (case.size.time * case.size.batch if per_token else 1))
                for case, found in results
                if found.get(name, {}).get(field)
            ]
            if points:
                series[shown(name)] = [tuple(zip(*points))]
        panels.append(Panel(label, "context (tokens)", series, logarithmic=True))
    learning_curves(path, TITLES[part], panels, {shown(name): colour_of(name) for name in names})
