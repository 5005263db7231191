"""What is left of FEM's lead where attention has more heads: table and picture of research/results/regimes_heads.md.

python docs/figures/heads.py    # prints the table, writes research/results/regimes_heads_by_heads.png
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

from fem.plots import GREY, picture
from fem_research.common.names import colour
from fem_research.common.paired import shown

RESULTS = Path(__file__).parents[2] / "research" / "results"
FEM = "softmax+CLTG/r4"
OURS = {"softmax": "attention, RoPE", "softmax/norope": "attention, no position code", FEM: "slim FEM, RoPE"}
STYLES = {"softmax": "-", "softmax/norope": "--", FEM: "-"}
SEEDS = (("snapshot", "fields"), ("high-water", "fields"), ("peak", "peak"), ("peak", "long"))


def found(page: str, task: str) -> dict[str, list[float]]:
    """The test scores of every row, by seed."""
    data = json.loads((RESULTS / f"regimes_{page}.json").read_text())["results"]["regimes"]
    return {row: of_row["test"] for row, of_row in data[task].items()}


def steps(page: str) -> int:
    return json.loads((RESULTS / f"regimes_{page}.json").read_text())["config"]["recipe"]["steps"]


def best_attention(rows: dict[str, list[float]]) -> str:
    """The row of attention with the best mean on the test, which favours attention."""
    plain = [row for row in rows if re.fullmatch(r"softmax(/h\d+)?(/norope)?", row)]
    return max(plain, key=lambda row: mean(rows[row]))


def called(row: str) -> str:
    heads = re.search(r"/h(\d+)", row)
    return f"{heads[1] if heads else 4} heads" + (", no position code" if "norope" in row else "")


def table() -> str:
    titles = ("task", "steps", "seeds", "attention, 4 heads", "attention at its best", "slim FEM, 4 heads", "lead")
    lines = [(*titles, "cummax"), ["---"] + ["---:"] * 3 + ["---"] + ["---:"] * 3]
    for task, page in SEEDS:
        rows = found(f"heads_{page}", task)
        best = best_attention(rows)
        lines.append(
            (
                task,
                f"{steps(f'heads_{page}'):,}",
                str(len(rows[FEM])),
                f"{mean(rows['softmax']):.3f}" if "softmax" in rows else "",
                f"{mean(rows[best]):.3f} ({called(best)})",
                f"{mean(rows[FEM]):.3f}",
                shown(rows[FEM], rows[best]),
                f"{mean(rows['cummax']):.3f}" if "cummax" in rows else "",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(path: Path) -> None:
    with picture(path, "Score by number of heads, 500 steps, seed 0; dots: cummax", 8.5, 2.9) as figure:
        axes = figure.subplots(1, 3, sharey=True)
        for place, task in zip(axes, ("peak", "high-water", "snapshot")):
            rows = found("heads", task)
            if task == "peak":
                rows = {row: scores[:1] for row, scores in found("heads_peak", task).items()} | rows
            for own, label in OURS.items():
                prior, *options = own.split("/")
                points = {}
                for row, scores in rows.items():
                    name, *others = row.split("/")
                    heads = [int(option[1:]) for option in others if re.fullmatch(r"h\d+", option)]
                    if name == prior and [o for o in others if not re.fullmatch(r"h\d+", o)] == options:
                        points[heads[0] if heads else 4] = scores[0]
                x = sorted(points)
                place.plot(
                    x,
                    [points[heads] for heads in x],
                    STYLES[own],
                    marker="o",
                    markersize=4,
                    color=colour(own),
                    label=label,
                )
            if "cummax" in rows:
                place.axhline(rows["cummax"][0], color=GREY, linestyle=":")
            place.set_xscale("log", base=2)
            place.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
            place.set(title=task, xlabel="heads", ylim=(0.2, 1.03))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


if __name__ == "__main__":
    print(table())
    draw(RESULTS / "regimes_heads_by_heads.png")
