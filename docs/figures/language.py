"""How far below attention's loss language models of equal size end: the table and the picture of docs/language.md.

python docs/figures/language.py    # prints the table, writes docs/images/language.png
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import fmean

from matplotlib.lines import Line2D

from fem.plots import GREY, picture
from fem_research.common.names import colour
from fem_research.common.paired import paired
from fem_research.lm.settings import mixer_name

DOCS = Path(__file__).parents[1]
RESULTS = DOCS.parent / "research" / "results"
ATTENTION = "-C,G,T,L"
NAMES = {"+G": "outer gate alone", "-C": "FEM without C", "full": "FEM"}  # of rows, which may be slim besides
WITHOUT_F = "+C,G"  # the control: all of FEM but the free energy and its temperature gate
SLIM = "/r8"
COLUMNS = (*(row + slim for slim in ("", SLIM) for row in NAMES), WITHOUT_F + SLIM)
BESIDE = (0.94, 1.0, 1.06, 1.12)  # so that rows of one page do not hide each other
PAGES = (
    *("softmax_small", "softmax_medium", "softmax", "long", "long_rate", "10m", "3m"),
    *("16m_half", "16m", "16m_seeds", "16m_rate4", "16m_rates", "16m_3m"),
)
EQUAL_TIME = ("time", "16m_time", "16m_split_time", "512_time", "512_two_rate1")
JOINED = {  # by attention's file, files of one seed that hold other rows or seeds of its line
    "16m_rates": ("16m_attribution_rate8",),
    "512_two_rate1": (
        *("512_two_parts_rate1", "512_two_slim_rate1"),
        *("512_two_rate1_seed1", "512_two_parts_rate1_seed1", "512_two_slim_rate1_seed1"),
    ),
}
RANK = re.compile(r"/r\d+")
RATES_16M = (
    "16m",
    "16m_rate4",
    "16m_rates",
    "16m_attribution",
    "16m_attribution_rate8",
    "16m_conditioner_alone",
    "16m_conditioner_alone_rate8",
    "16m_conditioner_alone_rate2",
    "16m_wide",
)


def found(page: str) -> dict[str, dict]:
    return json.loads((RESULTS / f"ablate_{page}.json").read_text())["results"]["ablate"]


def size(page: str) -> tuple[str, str]:
    """Attention's parameters and the tokens of a training, in millions."""
    data = json.loads((RESULTS / f"ablate_{page}.json").read_text())
    parameters, recipe = data["results"]["ablate"][ATTENTION]["parameters"], data["config"]["recipe"]
    return f"{parameters / 1e6:.2f}", f"{recipe['steps'] * recipe['batch'] * recipe['context'] / 1e6:.1f}"


def name_of(page: str) -> str:
    """The page that shows these numbers: all with 16M tokens are on one, and all with two blocks."""
    return "ablate_" + next((name for name in ("16m", "512_two") if page.startswith(name)), page)


def line(page: str) -> dict[str, dict]:
    """The rows of a line by name, whatever their rank, each with the loss of every file that holds it."""
    rows: dict[str, dict] = {}
    for name in (page, *JOINED.get(page, ())):
        for row, kept in found(name).items():
            rows.setdefault(RANK.sub(SLIM, row), {**kept, "losses": []})["losses"].append(kept["loss"])
    return rows


def below(row: dict | None, attention: dict) -> tuple[float, float] | None:
    """Nats below attention on the same seeds, and the standard error, 0 of one seed."""
    if row is None:
        return None
    if "below attention, paired" not in row:  # of files of one seed
        mean, error = paired(attention["losses"], row["losses"])
        return mean, error or 0.0
    mean, _, error = row["below attention, paired"].partition(" ± ")
    return float(mean), float(error or 0)


def written(gain: tuple[float, float] | None) -> str:
    if gain is None:
        return ""
    mean, error = gain
    return f"{mean + 0.0:+.3f}" + (f" ± {error:.3f}" if error else "")


def rates(rows: dict[str, dict]) -> str:
    chosen = sorted({row["learning rate"] for row in rows.values()})
    return ", ".join(rate.removeprefix("0") for rate in chosen)


def table(pages: tuple[str, ...]) -> str:
    titles = ("parameters", "tokens", "seeds", "rate", "attention", *map(called, COLUMNS))
    lines = [titles, ["---"] * 2 + ["---:"] * (len(titles) - 2)]
    for page in pages:
        rows, (parameters, tokens) = line(page), size(page)
        losses = rows[ATTENTION]["losses"]
        seeds = rows[ATTENTION]["by seed"].count(",") + len(losses)
        gains = (written(below(rows.get(column), rows[ATTENTION])) for column in COLUMNS)
        link = f"[{parameters}M](../research/results/{name_of(page)}.md)"
        lines.append((link, f"{tokens}M", str(seeds), rates(rows), f"{fmean(losses):.3f}", *gains))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


ALL_NAMES = {"-G,T,L": "C alone", "+G": NAMES["+G"], WITHOUT_F: "outer gate and C", **NAMES}
ALL_NAMES |= {"full/wide": "FEM, values as wide as the model"}
ALL_ROWS = (ATTENTION, *(row + slim for slim in ("", SLIM) for row in ALL_NAMES))


def called(row: str) -> str:
    name, slim, _ = row.partition(SLIM)
    return "attention" if row == ATTENTION else ALL_NAMES[name] + (", slim" if slim else "")


def losses_16m() -> dict[str, str]:
    """The tables of the page on 16M tokens: by learning rate on the first seed, by seed, by size, in equal time."""
    by_rate: dict[str, dict[str, str]] = {}
    for page in RATES_16M:
        rates = json.loads((RESULTS / f"ablate_{page}.json").read_text())["results"]["learning_rates"]
        for row, losses in rates.items():
            shown = {rate: f"{loss:.3f}" for rate, loss in losses.items() if rate.startswith("0.")}
            by_rate.setdefault(row, {}).update(shown)
    by_seed = {row: found["by seed"].split(", ") for row, found in found("16m_conditioner").items()}
    by_seed |= {row: found["by seed"].split(", ") for row, found in found("16m_seeds").items()}
    sizes = ("16m_half", "16m_rate4", "16m_3m")
    time, usual = found("16m_time"), found("16m")
    return {
        "rates": _lines(
            ("row", ".002", ".004", ".008"), by_rate, lambda row: [by_rate[row].get(f"0.00{r}", "") for r in "248"]
        ),
        "seeds": _lines(("row", "seed 0", "seed 1", "seed 2"), by_seed, lambda row: (by_seed[row] + [""])[:3]),
        "sizes": _lines(
            ("row", *(f"{size(page)[0]}M" for page in sizes)),
            (ATTENTION, "+G" + SLIM, "full" + SLIM),
            lambda row: [f"{found(page)[row]['loss']:.3f}" if row in found(page) else "" for page in sizes],
        ),
        "time": _lines(
            ("row", "steps", "ms a step", "loss", "loss at equal tokens"),
            time,
            lambda row: [
                f"{time[row]['steps']:,}",
                f"{time[row]['ms a step']:.0f}",
                f"{time[row]['loss']:.3f}",
                f"{usual[row]['loss']:.3f}",
            ],
        ),
    }


def _lines(titles: tuple[str, ...], rows: Collection[str], cells: Callable[[str], list[str]]) -> str:
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1)]
    lines += [(called(row), *cells(row)) for row in ALL_ROWS if row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(path: Path) -> None:
    pages = [(*size(page), line(page)) for page in PAGES]
    shapes = dict(zip(sorted({parameters for parameters, _, _ in pages}, key=float), "v^osD"))
    colours = {row: colour(mixer_name(row, "softmax")) for row in (*NAMES, WITHOUT_F)}
    with picture(
        path, "Nats per token below attention, at equal parameters and tokens; error bars over three seeds", 8.5, 3.6
    ) as figure:
        for axes, slim in zip(figure.subplots(1, 2, sharex=True, sharey=True), ("", SLIM)):
            for parameters, tokens, rows in pages:
                for place, (row, its_colour) in zip(BESIDE, colours.items()):
                    gain = below(rows.get(row + slim), rows[ATTENTION])
                    if gain is not None:
                        look = {"color": its_colour, "marker": shapes[parameters], "alpha": 0.75, "linestyle": ""}
                        axes.errorbar(float(tokens) * place, gain[0], gain[1] or None, elinewidth=1, **look)
            axes.axhline(0, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
            axes.set(title="slim gates" if slim else "full gates", xlabel="tokens, millions", xscale="log")
            axes.set_xticks([0.3, 1, 3, 16], ["0.3", "1", "3", "16"])
            axes.minorticks_off()
        key = [Line2D([], [], color=its_colour, marker="o", linestyle="") for its_colour in colours.values()]
        key += [Line2D([], [], color=GREY, marker=shape, linestyle="") for shape in shapes.values()]
        figure.legend(
            key, [*map(called, colours), *(f"{parameters}M" for parameters in shapes)], loc="outside right center"
        )


if __name__ == "__main__":
    for pages in (PAGES, EQUAL_TIME):
        print(table(pages), end="\n\n")
    print(*losses_16m().values(), sep="\n\n", end="\n\n")
    draw(DOCS / "images" / "language.png")
