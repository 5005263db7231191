"""`fem report`: finished runs become pages in research/results, with an index of what was run and what was not."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fem.provenance import PAGE, RESULTS, first_line, note, write_json
from fem.tables import markdown_table
from fem.train.checkpoints import checkpoints
from fem_research.lm.suites import PAPER, paper_rows, ranking
from fem_research.page_tables import fill
from fem_research.record import append
from fem_research.runs.run import check_output, without_folders

INDEX = "README.md"
OURS = re.compile(r"^## What it says\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^`(fem [^`]*)` on ", re.MULTILINE)
PICTURE = re.compile(r"\]\(([^)/#:]+\.png)\)")


ITEMS = (  # where the paper has it, what is measured, the experiment, and the command that does it
    ("", "Does the free energy help?", "regimes", "fem regimes"),
    ("", "Sets and series with natural labels", "natural", "fem natural"),
    ("Appendix P", "Every channel's maximum in one read", "argmax", "fem argmax --paper"),
    ("Table 1", "MAD, six synthetic tasks", "mad", "fem mad --profile paper"),
    ("", "What each part adds to a language model", "ablate", "fem ablate"),
    ("", "FEM in a model that was trained without it", "finetune", "fem finetune"),
    ("Table 2", "Language models of 340M and 1.3B parameters", "eval", "fem train --recipe paper-340m; fem eval"),
    ("Table 3", "Pictures", "vision", "fem vision --profile deit-tiny --data FOLDER"),
    ("Table 4", "Forecasting", "forecast", "fem forecast --profile paper --data FILES"),
    ("Tables 5 and 7", "Speed and memory", "bench", "fem bench --profile paper"),
    ("", "The demo: argmax, two language models, a look inside", "demo", "fem demo"),
)
DRAWN = ("argmax", "ablate", "bench", "demo", "forecast", "mad", "natural", "regimes", "vision")


class Broken(Exception):
    """A run whose files cannot be read."""


def read_run(path: Path) -> dict:
    """The JSON object in a run's file. Raises `Broken` where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Broken(f"{str(path)!r} cannot be read: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise Broken(f"{str(path)!r} holds no JSON object")
    return data


def page_name(run: Path) -> str:
    """The name of a run's page, that of its folder."""
    return re.sub(r"\W", "_", run.name)


def add_page(run: Path, output: Path) -> None:
    """Copy the run's page, pictures and numbers, named after its folder, and add its trainings to the record.

    "What it says" of an earlier page is kept.
    """
    for name in (PAGE, RESULTS, "config.json"):
        if not (run / name).is_file() and checkpoints(run):
            raise ValueError(
                f"runs must be folders with a page, got the training {str(run)!r}; fem eval --model {run} scores it."
            )
        if not (run / name).is_file():
            raise ValueError(f"runs must be folders of runs that have ended, got {str(run)!r} without {name}.")
    name = page_name(run)
    config, results = read_run(run / "config.json"), read_run(run / RESULTS)
    if not isinstance(config.get("experiment"), str):
        raise Broken(f"{str(run / 'config.json')!r} does not say which experiment it is")
    try:
        text = (run / PAGE).read_text(encoding="utf-8")
    except ValueError as error:
        raise Broken(f"{str(run / PAGE)!r} is no text in UTF-8") from error
    if missing := [picture for picture in PICTURE.findall(text) if not (run / picture).is_file()]:
        raise Broken(f"{str(run / PAGE)!r} shows {missing[0]}, which is not there")
    page = output / f"{name}.md"
    if page.exists() and not page.with_suffix(".json").exists():
        raise ValueError(f"output must not hold another {page.name}, got one without {name}.json; choose another.")
    if page.exists():
        earlier = read_run(page.with_suffix(".json")).get("config", {}).get("experiment")
        if earlier != config["experiment"]:
            raise ValueError(
                f"output must not hold {page.name} of another experiment, got one of {earlier!r}; rename the run."
            )
    output.mkdir(parents=True, exist_ok=True)
    for picture in set(PICTURE.findall(text)):
        shutil.copyfile(run / picture, output / f"{name}_{picture}")
    text = PICTURE.sub(rf"]({name}_\1)", text)
    said = OURS.search(page.read_text(encoding="utf-8")) if page.exists() else None
    title, _, rest = text.partition("\n")
    text = "\n\n".join([title, *([said[0].strip()] if said else []), f"## What was run\n{rest}"])
    if isinstance(recipe := config.get("recipe"), dict):
        config["recipe"] = {name: without_folders(x) if isinstance(x, str) else x for name, x in recipe.items()}
    write_json(output / f"{name}.json", {"config": config, "results": results})
    command = COMMAND.search(text)
    append(output, name, command[1] if command else "", config, results)
    page.write_text(text, encoding="utf-8")


def redraw(output: Path) -> list[str]:
    """Draw the pictures that pages show again from the numbers beside them, where those were kept; give their names."""
    drawn = []
    for name, data in page_results(output).items():
        if (experiment := data["config"].get("experiment")) not in DRAWN:
            continue
        module = f"fem_research.{'lm.ablate' if experiment == 'ablate' else f'{experiment}.experiment'}"
        with tempfile.TemporaryDirectory() as folder:
            try:
                import_module(module).redraw(data["results"], data["config"]["recipe"], Path(folder))
            except KeyError as missing:
                note(f"{name}.json has no {missing}; its pictures are left as they are.")
                continue
            for picture in sorted(Path(folder).glob("*.png")):
                shown = f"{name}_{picture.name}"
                if shown in (output / f"{name}.md").read_text(encoding="utf-8"):
                    drawn.append(shutil.copyfile(picture, output / shown).name)
    return drawn


def page_results(output: Path) -> dict[str, dict]:
    """{page: {"config", "results"}} of the pages that runs have made, but not of numbers that another page shows."""
    results = {}
    for path in sorted(output.glob("*.json")):
        try:
            data = read_run(path)
        except Broken as broken:
            note(f"{broken}; left out.")
            continue
        has_page = path.with_suffix(".md").exists()
        if has_page and isinstance(data.get("config"), dict) and isinstance(data.get("results"), dict):
            results[path.stem] = data
    return results


def index(output: Path) -> str:
    """Our pages by experiment, or the command that makes one; then Tables 2 and 4 of all runs."""
    from fem_research.forecast.experiment import TABLE_4_NOTE, table4
    from fem_research.forecast.settings import NOT_IN_THE_KEY

    results = page_results(output)
    sections = []
    for paper, what, experiment, command in ITEMS:
        own = [name for name, data in results.items() if data["config"].get("experiment") == experiment]
        title = f"## {what}" + (f" ({paper} of the paper)" if paper else "")
        pages = "\n".join(f"* {link(output / f'{name}.md')}" for name in own)
        how = "Command" if not paper else "At the paper's size" if own else "Not run yet"
        sections.append(f"{title}\n\n{pages}\n\n{how}: `{command}`.")
    others = sorted(path for path in output.glob("*.md") if path.stem not in results and path.name != INDEX)
    forecasts = []
    for data in results.values():
        recipe = data["config"].get("recipe") or {}
        training = json.dumps({name: recipe[name] for name in sorted(recipe.keys() - set(NOT_IN_THE_KEY))})
        forecasts += [row | {"training": training} for row in data["results"].get("forecast", [])]
    return INDEX_PAGE.format(
        items="\n\n".join(sections),
        others="\n".join(f"* {link(page)}" for page in others),
        table2=markdown_table(table2(results)),
        note=TABLE_4_NOTE,
        table4=markdown_table(table4(forecasts)),
    )


def add_pages(runs: Sequence[Path] | None, output: Path) -> int:
    """Copy the pages of these runs, or of all in runs/ that have ended, and write the index; returns how many."""
    check_output(output)
    ours = INDEX_PAGE.partition("{")[0]
    indexed = (output / INDEX).exists()
    if indexed and not (output / INDEX).read_text(encoding="utf-8", errors="replace").startswith(ours):
        raise ValueError(f"output must be a folder of results, got {str(output)!r} with a {INDEX} of its own.")
    if not runs:
        runs = [path.parent for path in sorted(Path("runs").glob(f"[!.]*/{PAGE}")) if (path.parent / RESULTS).exists()]
        if not runs and not indexed:
            raise ValueError("runs must be named, as no run in 'runs' has ended; give their folders.")
    names = [page_name(run) for run in runs]
    if twice := [str(run) for run, name in zip(runs, names) if names.count(name) > 1]:
        raise ValueError(f"runs must have names of their own for their pages, got {' and '.join(twice)}; rename one.")
    added = 0
    for run in runs:
        try:
            add_page(run, output)
            added += 1
        except Broken as broken:
            note(f"{broken}; the run is left out.")
    output.mkdir(parents=True, exist_ok=True)
    fill(output)
    (output / INDEX).write_text(index(output), encoding="utf-8")
    return added


def link(page: Path) -> str:
    """A link to the page that says its title."""
    title = page.read_text(encoding="utf-8").partition("\n")[0] if page.exists() else page.stem
    return f"[{title.removeprefix('# ')}]({page.name})"


def table2(results: dict[str, dict]) -> list[dict]:
    """The paper's rows, each with ours below it, which is blank until `fem eval --suite paper --beside ROW` has run."""
    rows = []
    for name, paper in paper_rows().items():
        rows.append(_row_of_table2(name, "paper", paper))
        nothing = dict.fromkeys(paper)
        ours = []
        for data in results.values():
            recipe = data["config"].get("recipe", {})
            if recipe.get("suite") == "paper" and recipe["beside"] == name:
                scores = data["results"].get("eval", {})
                ours.append({score.column: scores.get(score.task, {}).get(score.metric) for score in PAPER})
        rows += [_row_of_table2(name, "ours", measured) for measured in ours or [nothing]]
    return rows


def _row_of_table2(name: str, whose: str, scores: dict[str, float | None]) -> dict:
    """A row with its average rank and the number of its firsts, where it has all scores."""
    row = {"model": f"{name}, {whose}"}
    row |= {column: None if score is None else f"{score:.3f}" for column, score in scores.items()}
    if None in scores.values():
        return row | {"average rank": None, "firsts": None}
    rank, firsts = ranking(name, scores)
    return row | {"average rank": f"{math.floor(100 * rank + 0.5) / 100:.2f}", "firsts": firsts}


INDEX_PAGE = """# Results

Every page of a run ends with the command that made it, its date, versions and hardware. Figures of the paper are marked
as such and never stand in the place of ours.

{items}

## Measured by the scripts in `benchmarks/` and `tests/support/`, or joined from several runs

{others}

## Table 2: language models

Accuracy (exact match for MATH), the average rank and the number of firsts among the paper's rows of one size. Ours are
blank until `fem eval --suite paper --beside "340M FEM"` has run.

{table2}
## Table 4: forecasting

{note}

{table4}"""
