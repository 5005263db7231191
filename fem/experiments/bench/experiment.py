"""`fem bench`: a table per part, and pictures of the parts in which the context grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from fem.experiments.bench import decode, tables, workloads
from fem.experiments.bench.cases import PARTS, PROFILES, Case
from fem.experiments.common.options import recipe_options
from fem.experiments.common.recipes import listed, require_one_of, require_positive, require_some_of
from fem.experiments.common.run import PAGE, command_line, cpu_threads, open_run, option, progress, provenance
from fem.experiments.common.tables import markdown_table, show_table, write_table

PICTURED = ("decode", "context")


@dataclass(frozen=True, kw_only=True)
class BenchRecipe:
    """What is measured, and for how long."""

    profile: str = option("laptop", f"Sizes: {' or '.join(PROFILES)} (for a GPU).")
    parts: str = option(",".join(PARTS), "Parts, with commas between them.")
    seconds: float = option(4.0, "Seconds to measure a case's train steps; a third of that more for forward passes.")
    threads: int = option(1, "CPU threads.")
    seed: int = option(0, "Seed of weights and inputs.")

    def __post_init__(self):
        require_one_of("profile", self.profile, PROFILES)
        require_some_of("parts", self.part_names, PARTS)
        require_positive(self, "seconds", "threads")

    @property
    def part_names(self) -> list[str]:
        return listed(self.parts)

    def cases(self) -> list[Case]:
        return [case for case in PROFILES[self.profile] if case.part in self.part_names]


def measured(recipe: BenchRecipe, device: torch.device) -> Iterator[tuple[Case, dict[str, dict]]]:
    """Every case with the costs of its mixers, one after another."""
    with progress() as bars:
        cases = recipe.cases()
        bar = bars.add_task("bench", total=len(cases))
        for case in cases:
            bars.update(bar, description=f"bench: {case.name}")
            with torch.random.fork_rng():
                torch.manual_seed(recipe.seed)
                part = decode if case.part in ("decode", "served") else workloads
                yield case, part.measure(case, device, recipe.seconds)
            bars.advance(bar)


def run(recipe: BenchRecipe, output: Path) -> dict:
    """Measure, and write the results to `output`; returns what results.json holds."""
    from fem.experiments.bench import picture

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with cpu_threads(recipe.threads), open_run(output, "bench", recipe) as under_way:
        results = []
        for case, found in measured(recipe, device):
            results.append((case, found))
            under_way.log(**asdict(case), results=found)
        parts = {part: [pair for pair in results if pair[0].part == part] for part in recipe.part_names}
        page = report(under_way.folder, parts, provenance(command_line("bench", recipe, BenchRecipe())))
        (under_way.folder / PAGE).write_text(page, encoding="utf-8")
        records = [{**asdict(case), "device": device.type, "results": found} for case, found in results]
        found = under_way.finish({"bench": records})
        picture.redraw(found, asdict(recipe), under_way.folder)
        return found


def report(folder: Path, parts: dict[str, tables.Results], how_made: str) -> str:
    """A page with a section per part; writes their tables to `folder`."""
    where = "a GPU" if torch.cuda.is_available() else "a CPU"
    page = [TITLE.format(what=tables.TITLES[next(iter(parts))] if len(parts) == 1 else "What FEM costs", where=where)]
    for part, results in parts.items():
        case, title, rows = results[0][0], tables.TITLES[part], tables.rows(part, results)
        write_table(folder, part, rows)
        show_table(title, rows)
        blocks = f", {case.layers} block{'s' * (case.layers > 1)}" if case.layers else ""
        shape = f"Batch {case.size.batch}, width {case.size.width}, {case.size.heads} heads{blocks}."
        page += [f"## {title}\n", f"{shape} {tables.NOTES[part]}\n", markdown_table(rows)]
        if part in PICTURED:
            page.append(f"![{title.lower()}]({part}.png)\n")
    return "\n".join([*page, how_made])


TITLE = """# {what}, on {where}

Medians of mixers that run in turn: process time on a CPU, time between two events on a GPU. A train step is forward
and backward; its memory is what it adds at its peak to what was allocated before. Blank: not run.
"""


@recipe_options(BenchRecipe())
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/bench"),
):
    """What FEM costs beside attention of equal weights: read, layer, Tables 5 and 7, decode, served, context."""
    run(replace(BenchRecipe(), **changes), output)
    typer.echo(f"written to {output}: report.md, tables, results.json")
