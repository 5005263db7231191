"""The record of all runs: CSV files with one row a training, to which a run's rows are added.

A row has the run's name, the task, the mixer as it is typed with its fields of `FreeEnergyMixerConfig`, seed, rate,
steps, score, parameters, and where, when and by which command it was made. What the run did not measure is blank.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fem.provenance import in_words, note, replacing
from fem.recipes import listed
from fem_research.common.mixers import canonical, fields_of
from fem_research.common.names import NEURAL, display

Row = dict[str, Any]
FILES = {
    "ablate": "language",
    "finetune": "language",
    "demo": "language",
    "natural": "pooling",
    "bench": "cost",
    "scans": "cost",
}
FILES |= {"card_layers": "cost", "card_long": "cost", "card_table7": "cost", "card_train": "language"}
TIMES = ("forward", "train", "token")
MAD_SCORES = ("mad", "mad_macro", "mad_own", "final", "final_macro", "mean")  # the first is the score
SETTINGS = ("blocks", "layers", "mlp_width", "vocabulary", "context", "batch", "folds", "initialisation")  # of recipes
SETTINGS += ("image_size", "patch_size", "epochs")
SIZES = ("forward_extra_bytes", "train_extra_bytes", "state_bytes", "forward_flop", "train_flop", "parameters")


def rows_of(config: Mapping, results: Mapping) -> list[Row]:
    """A row for every training of a run, from what its config.json and results.json hold."""
    recipe = config["recipe"]
    settings = {name: recipe[name] for name in SETTINGS if recipe.get(name) is not None}
    return [settings | _made(config) | row for row in EXPERIMENTS[config["experiment"]](recipe, results)]


def curves_of(config: Mapping, results: Mapping) -> Iterator[Row]:
    """A row for every point of the curves of a run's trainings."""
    for of in results.get("trainings", ()):
        recipe = of["recipe"]
        for point in of["held_out"]:
            row = {"mixer": display(recipe["mixer"]), "seed": recipe["seed"], "rate": recipe["rate"]}
            yield row | {"step": point["step"], "loss": point["loss"]}
    for name, seeds in results.get("lm_curves", {}).items():
        for seed, points in enumerate(seeds, start=config["recipe"]["seed"]):
            for point in points:
                own = {"step": point["step"], "loss": point["val_loss"], "seconds": point["seconds"]}
                yield {"mixer": display(name), "seed": seed} | own
    for name, seeds in results.get("curves", {}).items() if config["experiment"] != "demo" else ():
        rate = {"rate": results["ablate"][name]["learning_rate"]} if "ablate" in results else {}
        for seed, points in enumerate(seeds, start=config["recipe"]["seed"]):
            for point in points:
                own = {field: value for field, value in point.items() if field != "tokens"}  # as many in every step
                yield {"mixer": display(name), "seed": seed} | rate | own


def _made(config: Mapping) -> Row:
    """Where, when, with which versions and, on a card, by which commit a run was made."""
    machine, versions = in_words(config)
    if config.get("driver"):
        machine += f", driver {config['driver']}"
    commit = {"code": config["code"]} if config.get("code") else {}
    return commit | {"machine": machine, "versions": versions, "date": config["date"]}


def mixer(name: str, recipe: Mapping) -> Row:
    """The columns that say which mixer it is. Baselines from elsewhere have a name and no fields."""
    row = {"mixer": name if name.startswith("pool:") else display(name)}
    row |= {"n_embd": recipe.get("width"), "n_head": recipe.get("heads")}
    try:
        fields = fields_of(canonical(name))
    except ValueError:
        return row
    return row | {field: int(value) if isinstance(value, bool) else value for field, value in fields.items()}


def regimes(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for task, mixers in results.get("regimes", {}).items():
        for name, found in mixers.items():
            first, best = recipe["seed"], found["learning_rate"]
            row = {"task": task} | mixer(name, recipe) | {"steps": recipe["steps"], "parameters": found["parameters"]}
            row |= {"floor": results["constants"][task]}
            for seed, score in enumerate(found["test"]):
                own = {"seed": first + seed, "rate": best, "score": score} | found["beta"][seed]
                yield row | own | {"ms": round(1e3 * found["seconds"][seed] / recipe["steps"], 6)}
            for rate, score in found["validation_by_rate"].items():
                yield row | {"seed": first, "rate": float(rate), "validation": score}


def natural(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for task, pools in results.get("natural", {}).items():
        for name, found in pools.items():
            for seed, score in enumerate(found["accuracy"]):
                lead = found["over"] or {} if seed == 0 else {}
                own = {"seed": recipe["seed"] + seed, "score": score, "steps": recipe["steps"]}
                own["rate"] = " ".join(f"{rate}:{count}" for rate, count in found["rates"].items())
                own |= {"lead": lead.get("mean"), "lead_error": lead.get("error"), "parameters": found["parameters"]}
                yield {"task": task} | mixer(name, recipe) | own


def ablate(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for name, found in results.get("ablate", {}).items():
        row = {"task": recipe["text"] or "python sources"} | mixer(name, recipe)
        row |= {"steps": found["steps"], "tokens": found["steps"] * recipe["batch"] * recipe["context"]}
        row |= {field: found[field] for field in ("ms", "parameters", "tokens_per_second")}
        for seed, loss in enumerate(found["loss"], start=recipe["seed"]):
            yield row | {"seed": seed, "rate": found["learning_rate"], "score": loss}
        for rate, loss in found["validation_by_rate"].items():
            yield row | {"seed": recipe["seed"], "rate": float(rate), "validation": loss}


def finetune(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for name, found in results.get("finetune", {}).items():
        row = {"task": f"{recipe['text']} after a trained {recipe['architecture']}"} | mixer(name, recipe)
        row |= {"rate": recipe["further_learning_rate"], "steps": recipe["further_steps"], "before": found["before"]}
        for seed, loss in enumerate(found["after"]):
            yield row | {"seed": recipe["seed"] + seed, "score": loss, "parameters": found["parameters"]}


def demo(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    """The demo's language models."""
    tokens = recipe["steps"] * recipe["batch_size"] * recipe["context"]
    for name, found in results["lm"].items():
        row = {"task": "the demo"} | mixer(name, recipe) | {"steps": recipe["steps"], "tokens": tokens}
        row |= {"batch": recipe["batch_size"]}
        row |= {field: found[field] for field in ("parameters", "tokens_per_second")}
        for seed, loss in enumerate(found["val_losses"], start=recipe["seed"]):
            yield row | {"seed": seed, "score": loss}


def mad(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for start, mixers in results.get("mad", {}).items():
        for name, found in mixers.items():
            for task in (task for task in found["mad"] if task != "average"):
                for seed in range(len(found["mad"][task]["seeds"])):
                    of = {score: found[score][task]["seeds"][seed] for score in MAD_SCORES if score in found}
                    row = {"task": task} | mixer(name, {}) | {"initialisation": start, "profile": recipe["profile"]}
                    row |= {"seed": recipe["seed"] + seed, "score": of.pop("mad"), **of}
                    if recipe.get("learning_rates"):
                        row["rate"] = " ".join(listed(recipe["learning_rates"]))
                    if found["steps"]["to"] > 0.99:
                        row["right_at_step"] = found["steps"]["by_seed"][task][seed]
                    yield row | {"parameters": found["sizes"][task]}


def vision(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    of_seed = {"score": "accuracies", "loss": "losses", "images_per_second": "speeds"}
    for name, found in results.get("vision", {}).items():
        row = {"task": recipe["data"]} | mixer(name, recipe) | {"epochs": recipe["epochs"]}
        for seed, values in enumerate(zip(*(found[several] for several in of_seed.values()), strict=True)):
            own = {"seed": recipe["seed"] + seed, "rate": recipe["learning_rate"]} | dict(zip(of_seed, values))
            yield row | own | {"parameters": found["parameters"]}


def forecast(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    of_seed = {"seed": "seeds", "score": "mses", "mae": "maes", "lookback": "lookbacks", "parameters": "sizes"}
    of_seed |= {"cpu_seconds": "seconds"}
    for found in results.get("forecast", ()):
        row = {"task": found["data"], "horizon": found["horizon"]} | mixer(found["model"], {})
        if found["model"] in NEURAL:
            row |= dict.fromkeys(SETTINGS)  # which are the backbone's
        else:
            row |= {"n_head": recipe["heads"], "rate": recipe["learning_rate"]}
        for values in zip(*(found[several] for several in of_seed.values()), strict=True):
            yield row | dict(zip(of_seed, values, strict=True))


def argmax(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    task = {"task": recipe["form"], "tokens": recipe["tokens"], "channels": recipe["channels"]}
    for name, found in results.get("argmax", {}).items():
        for seed, hits in enumerate(found["hits"]):
            row = task | {"mixer": display(name), "n_head": recipe["heads"], "seed": recipe["seed"] + seed}
            row |= {score: found[score][seed] for score in ("index_accuracy", "mse", "error", "steps")}
            yield row | {"rate": recipe["learning_rate"], "score": hits}
    for name, found in results.get("baselines", {}).items():
        scores = {score: found[score] for score in ("index_accuracy", "mse", "error")}
        yield task | {"mixer": name, "n_head": recipe["heads"], "score": found["hits"]} | scores


def bench(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for case in results.get("bench", ()):
        size = case["size"]
        row = {"task": case["part"], "device": case["device"], "dtype": case["dtype"], "layers": case["layers"]}
        row |= {"tokens": size["time"], "batch": size["batch"]}
        for name, cost in case["results"].items():
            label, _, form = name.partition(", ")
            own = {f"{field}_ms": 1e3 * cost[f"{field}_s"] for field in TIMES if cost.get(f"{field}_s") is not None}
            own |= {field: cost[field] for field in SIZES if cost.get(field) is not None}
            own["mode"] = "torch's layer" if name == "attention" else form
            yield row | mixer(label, {"width": size["width"], "heads": size["heads"]}) | own


def scans(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for of in results["scans"]:
        yield of | mixer(of["mixer"], recipe)


def card_layers(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for cell in results["cells"]:
        row = {"task": "layer"} | mixer(cell["mixer"], recipe) | {"mode": cell["mode"], "dtype": "bfloat16"}
        row |= {"device": recipe["device"], "batch": recipe["tokens"] // cell["time"], "tokens": cell["time"]}
        yield row | _cell(cell, TIMES) | {"kept_bytes": cell.get("kept_bytes")}


def card_long(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for cell in results["cells"]:
        row = {"task": f"long {cell['part']}"} | mixer(cell["mixer"], recipe) | {"dtype": "bfloat16", "batch": 1}
        row |= {"device": recipe["device"], "tokens": cell["tokens"], "parameters": cell.get("parameters")}
        row |= {"mode": "torch's layer"} if (cell["part"], cell["mixer"]) == ("layer", "attention") else {}
        yield row | _cell(cell, ("prefill", "train"))


def card_table7(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    for cell in results["cells"]:
        row = {"task": "table7"} | mixer(cell["mixer"], recipe) | {"mode": cell["mode"], "dtype": cell["dtype"]}
        row |= {"device": recipe["device"], "batch": recipe["batch"], "tokens": recipe["time"]}
        row |= {field: cell.get(field) for field in ("train_flop", "parameters")}
        yield row | _cell(cell, ("forward", "train"))


def _cell(cell: Mapping, steps: Sequence[str]) -> Row:
    """What the steps of a cell took, and what those said that failed."""
    of = {step: cell[step] for step in steps if step in cell}
    own = {f"{step}_ms": 1e3 * found["seconds"] for step, found in of.items() if "seconds" in found}
    own["train_extra_bytes"] = of.get("train", {}).get("extra_bytes")
    failures = [f"{step} failed: {found['failed']}" for step, found in of.items() if "failed" in found]
    return own | {"note": "; ".join(failures) or None}


def card_train(recipe: Mapping, results: Mapping) -> Iterator[Row]:
    """Trainings that have ended; each has a date, and may have a card, of its own."""
    same = ("layers", "mlp_width", "context", "batch", "seed", "rate")
    measured = ("tokens_per_second", "flops_per_token", "mfu", "peak_memory_bytes", "seconds", "first_step_seconds")
    for of in results["trainings"]:
        if not of["finished"]:
            continue
        recipe = of["recipe"]
        row = {"task": "linux sources"} | mixer(recipe["mixer"], recipe) | {field: recipe[field] for field in same}
        row |= {"vocabulary": of["text"]["vocabulary"], "steps": of["steps"], "score": of["held_out_loss"]}
        row |= {"tokens": of["steps"] * recipe["batch"] * recipe["context"], "note": of.get("diverged")}
        row |= {field: of[field] for field in (*measured, "compile_seconds", "parameters")} | _made(of)
        yield row | {"ms": 1e3 * of["step_seconds"] if of["step_seconds"] else None}


EXPERIMENTS = {
    of.__name__: of for of in (regimes, natural, ablate, finetune, demo, mad, vision, forecast, argmax, bench)
}
EXPERIMENTS |= {of.__name__: of for of in (scans, card_layers, card_long, card_table7, card_train)}


WIDER = ("mixers", "tasks", "sets", "pools", "learning-rates", "weight-decays", "initialisations", "seeds", "seed")
WIDER += ("horizon", "data", "parts", "workers", "threads")  # options that choose which trainings a run has


def _of_others(stored: Sequence[Mapping], found: Sequence[Row], command: str) -> Mapping | None:
    """The first row of the record that these rows would lose: of a training that they lack, or by other settings."""
    trainings = {_training(row) for row in found}
    return next(
        (
            row
            for row in stored
            if _training(row) not in trainings or _settings(row.get("command", command)) != _settings(command)
        ),
        None,
    )


def _training(row: Mapping) -> tuple[str, ...]:
    return tuple(str("" if row.get(name) is None else row[name]) for name in ("task", "mixer", "seed"))


def _settings(command: str) -> list[str]:
    """The options of a command, sorted, without those that choose which trainings a run has."""
    experiment, _, options = command.partition(" --")
    if not experiment.startswith("fem "):
        return []  # a slice of a card's day refuses cells of another recipe itself
    return sorted(option for option in options.split(" --") if re.split(r"[ =]", option)[0] not in WIDER)


def append(folder: Path, run: str, command: str, config: Mapping, results: Mapping) -> list[Path]:
    """Put the rows of a run in the place of its earlier ones; returns the files, none where it has no trainings.

    Pools stand in pooling.csv, whichever command trained them, and points of curves in a file of their own. Every file
    is replaced in one step.
    """
    experiment = config["experiment"]
    by_file: dict[Path, list[Row]] = {}
    own = FILES.get(experiment, experiment)
    for row in rows_of(config, results) if experiment in EXPERIMENTS else ():
        name = "pooling" if row["mixer"].startswith("pool:") else own
        by_file.setdefault(folder / f"{name}.csv", []).append({"run": run} | row | {"command": command})
    if by_file and (curves := [{"run": run} | row for row in curves_of(config, results)]):
        by_file[folder / f"{own}_curves.csv"] = curves
    stored: dict[Path, list[Row]] = {}
    for path, found in by_file.items():  # all are asked before any is written
        stored[path] = kept = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                kept.extend(csv.DictReader(file))
        for row in kept:
            if row["run"] == run and row.get("command", command).split()[:2] != command.split()[:2]:
                raise ValueError(
                    f"runs must have names of their own, got {run!r}, which {path.name} has of {row['command']!r}."
                )
        gone = sum(row["run"] == run for row in kept)
        if gone > len(found) and "command" in found[0]:  # points of a curve may become fewer
            raise ValueError(
                f"runs must not replace more rows than they have, got {len(found)} of {run!r}, of which {path.name} "
                f"has {gone}; give the folder another name."
            )
        if "command" in found[0] and (other := _of_others([row for row in kept if row["run"] == run], found, command)):
            raise ValueError(
                f"runs must have names of their own, got {run!r} by {command!r}, of which {path.name} has "
                f"{other['mixer']} of {other['task']} by {other['command']!r}; give the folder another name."
            )
    for path, found in by_file.items():
        kept = stored[path]
        earlier = {row.get("date") for row in kept if row["run"] == run} - {row.get("date") for row in found}
        if earlier:
            note(f"the rows of {run!r} in {path.name} were made on {max(earlier)}; they are replaced.")
        kept = [row for row in kept if row["run"] != run]
        rows = [*kept, *found]
        with replacing(path) as staged, open(staged, "w", newline="", encoding="utf-8") as file:
            measured = {name for row in rows for name, value in row.items() if value not in (None, "")}
            columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name in measured]
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return list(by_file)
