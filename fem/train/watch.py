"""How the steps of transformers' Trainer are reported."""

from __future__ import annotations

import time
from collections.abc import Callable

from transformers import TrainerCallback

LOGGED = {
    "loss": "train_loss",
    "eval_loss": "val_loss",
    "eval_accuracy": "val_accuracy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}

Score = dict[str, int | float]


class Watch(TrainerCallback):
    """Passes every measurement to `log` and every step to `advance`; its seconds are only those of the steps."""

    def __init__(self, log: Callable[[Score], None], advance: Callable[[int, float | None], None]):
        self.log, self.advance = log, advance
        self.seconds = 0.0
        self.curve: list[Score] = []  # every measurement
        self.loss: float | None = None

    def on_step_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds += time.perf_counter() - self.began
        self.advance(state.global_step, self.loss)

    def on_log(self, args, state, control, logs, **_):
        found = {ours: float(logs[theirs]) for theirs, ours in LOGGED.items() if theirs in logs}
        if found:
            self.measured({"step": state.global_step, "seconds": self.seconds, **found})

    def measured(self, score: Score) -> None:
        self.loss = score.get("val_loss", self.loss)
        self.curve.append(score)
        self.log(score)
