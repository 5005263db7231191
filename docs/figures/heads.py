"""What is left of FEM's lead where attention has more heads: tables and picture of research/results/regimes_heads.md.

python docs/figures/heads.py    # prints the tables, writes research/results/regimes_heads_by_heads.png
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

from fem.plots import GREY, picture
from fem.tables import markdown_table
from fem_research.common.names import colour
from fem_research.common.paired import shown

RESULTS = Path(__file__).parents[2] / "research" / "results"
TASKS = ("peak", "high-water", "snapshot")
GRID = "heads"
HEADS = (4, 8, 16, 32)
ROWS = {
    "softmax": "attention",
    "softmax+G/r4": "slim outer gate alone (G)",
    "softmax+C": "conditioner alone (C)",
    "softmax+L": "log-sum-exp alone (L)",
    "softmax+LTG/r4/s.5": "split values",
    "softmax+LTG/r4": "slim FEM without C",
    "softmax+CLTG/r4": "slim FEM",
    "gla/norm": "GLA, normalised",
    "gla+LTG/r4": "slim FEM on GLA without C",
}
OTHERS = {"softmax": "", "softmax/double": "values twice as wide, ", "softmax+CG/r4": "G and C, "}
ATTENTION = ("softmax", "softmax/double")
GATE_OR_CONDITIONER = ("softmax+G/r4", "softmax+C", "softmax+CG/r4")
FREE_ENERGY = ("softmax+L", "softmax+LTG/r4/s.5", "softmax+LTG/r4", "softmax+CLTG/r4")
DRAWN = ("softmax", "softmax+G/r4", "softmax+C", "softmax+L", "softmax+LTG/r4", "softmax+CLTG/r4")
PAGES = {"snapshot": (GRID,), "high-water": (GRID,), "peak": (GRID, "heads_64", "double_peak")}
AT_BEST = (*PAGES.items(), ("peak", ("heads_steps",)))


def found(task: str, *pages: str) -> dict[str, list[float]]:
    """The test scores of every row by seed, of as many seeds as all rows have."""
    data = [json.loads((RESULTS / f"regimes_{page}.json").read_text())["results"]["regimes"] for page in pages]
    scores = {row: of_row["test"] for page in data[::-1] for row, of_row in page[task].items()}
    seeds = min(map(len, scores.values()))
    return {row: of_row[:seeds] for row, of_row in scores.items()}


def steps(page: str) -> int:
    return json.loads((RESULTS / f"regimes_{page}.json").read_text())["config"]["recipe"]["steps"]


def without_heads(row: str) -> tuple[str, int, bool]:
    """A row's mixer without its heads and its position code, its heads, and whether it has a position code."""
    heads = re.search(r"/h(\d+)", row)
    return re.sub(r"/h\d+|/norope", "", row), int(heads[1]) if heads else 4, "/norope" not in row


def by_heads(rows: dict[str, list[float]], mixer: str) -> dict[int, dict[bool, list[float]]]:
    """The scores of a mixer by its number of heads, and there with its position code (True) and without."""
    scores: dict[int, dict[bool, list[float]]] = {}
    for row, of_row in rows.items():
        name, heads, coded = without_heads(row)
        if name == mixer:
            scores.setdefault(heads, {})[coded] = of_row
    return scores


def best(rows: dict[str, list[float]], mixers) -> str | None:
    """The row of these mixers with the best mean on the test."""
    ours = [row for row in rows if without_heads(row)[0] in mixers]
    return max(ours, key=lambda row: mean(rows[row]), default=None)


def called(row: str) -> str:
    mixer, heads, coded = without_heads(row)
    what = OTHERS[mixer] if mixer in OTHERS else f"{ROWS[mixer]}, "
    return f"{what}{heads} heads" + ("" if coded else ", no position code")


def scored(rows: dict[str, list[float]], row: str | None) -> str | None:
    return None if row is None else f"{mean(rows[row]):.3f} ({called(row)})"


def at_their_best() -> str:
    """Attention, with its gate or conditioner, and with the free energy: every kind by its best row on the test."""
    table = []
    for task, pages in AT_BEST:
        rows = found(task, *pages)
        attention, helped, free = (best(rows, kind) for kind in (ATTENTION, GATE_OR_CONDITIONER, FREE_ENERGY))
        rival = best(rows, (*ATTENTION, *GATE_OR_CONDITIONER))
        table.append(
            {
                "task": task,
                "steps": steps(pages[0]),
                "seeds": len(rows[free]),
                "attention": scored(rows, attention),
                "with G or C alone": scored(rows, helped),
                "with the free energy": scored(rows, free),
                "lead": shown(rows[free], rows[rival]),
                "cummax": f"{mean(rows['cummax']):.3f}",
            }
        )
    return markdown_table(table)


def grid(task: str) -> str:
    """The mean scores of every mixer by its number of heads, with its position code and without."""
    rows, table = found(task, GRID), []
    for mixer, title in ROWS.items():
        scores = by_heads(rows, mixer)
        cells = (sorted(scores.get(heads, {}).items(), reverse=True) for heads in HEADS)  # with a position code first
        means = (" / ".join(f"{mean(of_row):.3f}" for _, of_row in cell) for cell in cells)
        table.append({task: title} | {f"{heads} heads": text for heads, text in zip(HEADS, means)})
    return markdown_table(table)


def draw(path: Path) -> None:
    with picture(
        path, "Score by number of heads, with the better position code, 500 steps, 3 seeds; dots: cummax", 8.5, 3.3
    ) as figure:
        axes = figure.subplots(1, 3, sharey=True)
        for place, task in zip(axes, TASKS):
            rows = found(task, *PAGES[task])
            for mixer in DRAWN:
                scores = by_heads(rows, mixer)
                x = sorted(scores)
                y = [max(mean(of_row) for of_row in scores[heads].values()) for heads in x]
                place.plot(x, y, "o-", markersize=4, color=colour(mixer), label=ROWS[mixer])
            place.axhline(mean(rows["cummax"]), color=GREY, linestyle=":")
            place.set_xscale("log", base=2)
            place.set_xticks([*HEADS, 64], [*map(str, HEADS), "64"])
            place.set(title=task, xlabel="heads", ylim=(0.2, 1.03))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


if __name__ == "__main__":
    print(at_their_best(), *(grid(task) for task in TASKS), sep="\n")
    draw(RESULTS / "regimes_heads_by_heads.png")
