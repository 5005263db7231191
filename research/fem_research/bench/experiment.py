"""`fem bench`: a table per part, and pictures of the parts in which the context grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from fem.runs.run import command_line, cpu_threads, open_run, progress, provenance
from fem.runs.tables import markdown_table, show_table, write_page, write_table
from fem_research.bench import decode, tables, workloads
from fem_research.bench.cases import BY_TOKEN, BenchRecipe, Case


def measured(recipe: BenchRecipe, device: torch.device) -> Iterator[tuple[Case, dict[str, dict]]]:
    """Every case with the costs of its mixers, one after another."""
    with progress() as bars:
        cases = recipe.cases()
        bar = bars.add_task("bench", total=len(cases))
        for case in cases:
            bars.update(bar, description=f"bench: {case.name}")
            with torch.random.fork_rng():
                torch.manual_seed(recipe.seed)
                part = decode if case.part in BY_TOKEN else workloads
                yield case, part.measure(case, device, recipe.seconds)
            bars.advance(bar)


def run(recipe: BenchRecipe, output: Path) -> dict:
    """Measure, and write the results to `output`; returns what results.json holds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with cpu_threads(recipe.threads), open_run(output, "bench", recipe) as under_way:
        results = []
        for case, found in measured(recipe, device):
            results.append((case, found))
            under_way.log(**asdict(case), results=found)
        parts = {part: [pair for pair in results if pair[0].part == part] for part in recipe.part_names}
        write_report(under_way.folder, parts, provenance(command_line("bench", recipe, BenchRecipe())))
        records = [{**asdict(case), "device": device.type, "results": found} for case, found in results]
        found = under_way.finish({"bench": records})
        tables.redraw(found, asdict(recipe), under_way.folder)
        return found


def write_report(folder: Path, parts: dict[str, tables.Results], how_made: str) -> None:
    """A page with a section per part, and their tables."""
    where = "a GPU" if torch.cuda.is_available() else "a CPU"
    sections = []
    for part, results in parts.items():
        case, title, rows = results[0][0], tables.TITLES[part], tables.rows(part, results)
        write_table(folder, part, rows)
        show_table(title, rows)
        blocks = f", {case.layers} block{'s' * (case.layers > 1)}" if case.layers else ""
        shape = f"Batch {case.size.batch}, width {case.size.width}, {case.size.heads} heads{blocks}."
        sections += [f"## {title}", f"{shape} {tables.NOTES[part]}", markdown_table(rows)]
        if part in tables.PANELS:
            sections.append(f"![{title.lower()}]({part}.png)")
    write_page(
        folder,
        f"{tables.TITLES[next(iter(parts))] if len(parts) == 1 else 'What FEM costs'}, on {where}",
        "Medians of mixers that run in turn: process time on a CPU, time between two events on a GPU. A train step is "
        "forward and backward; its memory is what it adds at its peak to what was allocated before. Blank: not run.",
        *sections,
        how_made,
    )
