"""Time and progress of a training by transformers' Trainer: the seconds stand in its log, which checkpoints hold."""

from __future__ import annotations

import time

from rich.progress import Progress
from transformers import TrainerCallback

SCORES = {"eval_loss": "val_loss", "eval_accuracy": "val_accuracy"}

Score = dict[str, int | float]


class Watch(TrainerCallback):
    """Moves a bar, and adds to every line of the Trainer's log the seconds of all steps so far, validations apart."""

    def __init__(self, bars: Progress, title: str):
        self.bars, self.title = bars, title

    def on_train_begin(self, args, state, control, **_):
        self.seconds = state.log_history[-1]["seconds"] if state.log_history else 0.0
        self.bar = self.bars.add_task(self.title, total=state.max_steps)

    def on_step_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds += time.perf_counter() - self.began
        self.bars.update(self.bar, completed=state.global_step)

    def on_log(self, args, state, control, logs, **_):
        state.log_history[-1]["seconds"] = self.seconds
        if "eval_loss" in logs:
            self.bars.update(self.bar, description=f"{self.title}, loss {logs['eval_loss']:.3f}")

    def on_train_end(self, args, state, control, **_):
        self.bars.remove_task(self.bar)


def validations(history: list[dict]) -> list[Score]:
    """Every validation in the Trainer's log: {"step", "seconds", "val_loss" and the like}."""
    return [
        {name: line[name] for name in ("step", "seconds")}
        | {SCORES[name]: line[name] for name in SCORES if name in line}
        for line in history
        if "eval_loss" in line
    ]
