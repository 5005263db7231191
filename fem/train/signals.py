"""Asked to end by a signal, a training saves at the end of its step, the same step on every process.

transformers' just-in-time checkpoint handles SIGTERM only, waits three seconds, asks no other rank and exits with 0.
"""

from __future__ import annotations

import signal

from transformers import TrainerCallback

from fem.train.distributed import GO_ON, Ranks

ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class SaveAndStop(TrainerCallback):
    """In its `with` block, the first SIGTERM, SIGUSR1, SIGHUP or SIGINT makes the training save a checkpoint and end.

    Where there is one process, a second SIGINT ends it at once.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.asked = self.stopped_by = 0

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

    def on_step_end(self, args, state, control, **_):
        self.stopped_by = self.ranks.largest(self.asked)
        if self.stopped_by:
            control.should_save = control.should_training_stop = True

    @property
    def reason(self) -> str:
        return signal.Signals(self.stopped_by).name

    @property
    def code(self) -> int:
        return 128 + signal.SIGINT if self.stopped_by == signal.SIGINT else GO_ON
