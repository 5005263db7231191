"""The table of the trainings: losses at equal tokens and at equal time, speed, memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fem.provenance import CONFIG, RESULTS, read_json, write_json
from fem_research.card_day.facts import circumstances_of_card
from fem_research.common.names import display
from fem_research.runs.tables import write_table

BASELINE = "softmax"


def trainings(folder: Path) -> list[dict]:
    """The records in a folder of trainings. Raises ValueError where there is none."""
    found = [record for path in sorted(folder.glob("*.json")) if "of_steps" in (record := read_json(path) or {})]
    if not found:
        raise ValueError(f"output must hold records of trainings, got {str(folder)!r} without one.")
    return found


def table(found: Sequence[dict]) -> list[dict]:
    """A row a training, in the order of size, seed and rate. Losses are held out, in nats per token."""
    rows = []
    for record in sorted(found, key=_order):
        recipe, speed, peak = record["recipe"], record["tokens_per_second"], record["peak_memory_bytes"]
        base = next((other for other in found if _is_base(other, record)), None)
        rows.append(
            {
                "mixer": display(recipe["mixer"]),
                "tokens": record["steps"] * recipe["batch"] * recipe["context"],
                "finished": "yes" if record["finished"] else "no",
                "rate": f"{recipe['rate']:g}",
                "seed": recipe["seed"],
                "loss": record["held_out_loss"],
                "loss of some rows": record["held_out"][-1]["loss"] if record["held_out"] else None,
                "the same at equal time": at_equal_time(record, base) if base else None,
                "ms a step": 1e3 * record["step_seconds"] if record["step_seconds"] else None,
                "tokens/s": round(speed) if speed else None,
                "MFU": record["mfu"],
                "GiB": peak / 2**30,
                "first step s": record["first_step_seconds"],
                "parameters": record["parameters"],
            }
        )
    return rows


def _order(record: dict) -> tuple:
    recipe = record["recipe"]
    return recipe["width"], recipe["tokens"], recipe["seed"], record["date"], recipe["rate"]


def _is_base(other: dict, record: dict) -> bool:
    """True if `other` is attention's finished training of the same size, tokens and seed."""
    same = ("tokens", "seed", "width", "layers", "context", "batch")
    mine, theirs = record["recipe"], other["recipe"]
    ends = other["finished"] and other["step_seconds"] and other["hardware"]["gpus"] == record["hardware"]["gpus"]
    return bool(theirs["mixer"] == BASELINE and ends and all(mine[name] == theirs[name] for name in same))


def at_equal_time(record: dict, base: dict) -> float | None:
    """The held-out loss at the step that a training reaches in the time of the whole baseline, by median steps.

    On the line between the two held-out losses around that step; None where the training has not got that far.
    """
    points = record["held_out"]
    if not record["step_seconds"] or not points:
        return None
    step = base["steps"] * base["step_seconds"] / record["step_seconds"]
    if step > points[-1]["step"]:
        return points[-1]["loss"] if record["finished"] else None
    return float(np.interp(step, [point["step"] for point in points], [point["loss"] for point in points]))


def write(folder: Path) -> list[dict]:
    """Write trainings.csv and trainings.md beside the records, and what `fem report` reads; returns the rows."""
    found = trainings(folder)
    rows = table(found)
    write_table(folder, "trainings", rows)
    write_json(folder / CONFIG, {"experiment": "card_train", "recipe": {}} | circumstances_of_card())
    write_json(folder / RESULTS, {"trainings": found})
    return rows
