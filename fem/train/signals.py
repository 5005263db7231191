"""Asked to end by a signal, a training saves at the end of its step, the same step on every process.

transformers' just-in-time checkpoint handles SIGTERM only, waits three seconds, asks no other rank and exits with 0.
"""

from __future__ import annotations

import gc
import os
import signal

import torch
import torch.distributed as dist
from transformers import TrainerCallback

GO_ON = 75  # EX_TEMPFAIL of sysexits.h: not finished, the same command resumes
ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Paused(Exception):
    """The training has stopped early and saved a checkpoint. code: the exit status of the process."""

    def __init__(self, sentence: str, code: int = GO_ON):
        super().__init__(sentence)
        self.code = code


class SaveAndStop(TrainerCallback):
    """In its `with` block, the first SIGTERM, SIGUSR1, SIGHUP or SIGINT makes the training save a checkpoint and end.

    Where there is one process, a second SIGINT ends it at once.
    """

    def __init__(self):
        self.asked = self.stopped_by = 0

    def __enter__(self) -> SaveAndStop:
        heard = [number for number in ASKED if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        self.before = {number: signal.signal(number, self._ask) for number in heard}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _) -> None:
        if number == signal.SIGINT and self.asked and os.environ.get("WORLD_SIZE", "1") == "1":
            raise KeyboardInterrupt
        self.asked = self.asked or number

    def on_step_end(self, args, state, control, **_):
        self.stopped_by = self.asked
        if args.world_size > 1:
            asked = torch.tensor(self.asked, device=args.device)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            self.stopped_by = int(asked)
        if self.stopped_by:
            control.should_save = control.should_training_stop = True

    def paused(self, step: int, steps: int) -> Paused:
        """The exception of a training that was stopped."""
        code = 128 + signal.SIGINT if self.stopped_by == signal.SIGINT else GO_ON
        name = signal.Signals(self.stopped_by).name
        return Paused(f"stopped by {name}; step {step} of {steps} is saved", code)


def end_process_group() -> None:
    """Destroy the process group that a Trainer created, if any. Call it when no reference to the Trainer is left.

    gloo's threads need the GIL to free the tensors of finished operations. The group's destructor holds the GIL while
    it waits for these threads, a deadlock. The handle of a barrier keeps all operations before it alive: while this
    function holds it, the threads have nothing to free.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    last = dist.barrier(async_op=True)
    last.wait()
    dist.destroy_process_group()
