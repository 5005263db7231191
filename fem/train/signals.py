"""Asked to end by a signal or a time limit, a training saves at the end of its step, the same step on every process.

transformers' just-in-time checkpoint handles SIGTERM only, waits three seconds, asks no other rank and exits with 0.
"""

from __future__ import annotations

import signal
import time

from transformers import TrainerCallback

from fem.train.distributed import GO_ON, Ranks

ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
TIME_IS_UP = 1000  # the number of no signal
SLACK = 10.0  # seconds


class SaveAndStop(TrainerCallback):
    """In its `with` block, the first SIGTERM, SIGUSR1, SIGHUP or SIGINT makes the training save a checkpoint and end.

    So does the deadline, a value of `time.monotonic`, early enough for one more step and two saves. Where there is one
    process, a second SIGINT ends it at once.
    """

    def __init__(self, ranks: Ranks, deadline: float | None = None):
        self.ranks, self.deadline = ranks, deadline
        self.asked = self.stopped_by = 0
        self.last = time.monotonic()
        self.longest_step = self.longest_save = 0.0

    def __enter__(self) -> SaveAndStop:
        self.before = {number: signal.signal(number, self._ask) for number in ASKED}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _) -> None:
        if number == signal.SIGINT and self.asked and self.ranks.world == 1:
            raise KeyboardInterrupt
        self.asked = self.asked or number

    def on_step_begin(self, args, state, control, **_):
        self.last = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        now = time.monotonic()
        self.longest_step = max(self.longest_step, now - self.last)
        need = self.longest_step + 2 * self.longest_save + SLACK
        late = self.deadline is not None and now + need > self.deadline
        self.stopped_by = self.ranks.largest(self.asked or (TIME_IS_UP if late else 0))
        if self.stopped_by:
            control.should_save = control.should_training_stop = True
        self.last = time.monotonic()

    def on_save(self, args, state, control, **_):
        self.longest_save = max(self.longest_save, time.monotonic() - self.last)

    @property
    def reason(self) -> str:
        if self.stopped_by == TIME_IS_UP:
            return "the time limit"
        return signal.Signals(self.stopped_by).name

    @property
    def code(self) -> int:
        return 128 + signal.SIGINT if self.stopped_by == signal.SIGINT else GO_ON


def seconds_of(limit: str | None) -> float | None:
    """The seconds of a time limit as Slurm writes it: "90" minutes, "1:30:00" hours, "2-12" days and hours.

    Raises ValueError on anything else.
    """
    if limit is None:
        return None
    days, dash, rest = limit.rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        shapes = {1: [*parts, 0, 0], 2: [*parts, 0]} if dash else {1: [0, *parts, 0], 2: [0, *parts]}
        hours, minutes, seconds = (shapes | {3: parts})[len(parts)]
        found = ((int(days if dash else 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    except (ValueError, KeyError):
        found = 0
    if found <= 0:
        raise ValueError(f"time_limit must be minutes, MM:SS, HH:MM:SS, D-HH or D-HH:MM:SS, got {limit!r}.")
    return float(found)
