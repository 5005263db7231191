"""A Trainer whose checkpoints are complete as soon as they are there, and hold finite weights only."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from fem.optim import decayed_names
from fem.train.checkpoints import KEPT, checkpoints, newest, not_finite, set_aside_after, step_of, to_go_on_from
from fem.train.distributed import lost_touch
from fem.train.integrity import publish


class NotFinite(ValueError):
    """A loss, a gradient or a weight is infinite or NaN."""


class SavingTrainer(Trainer):
    """Writes checkpoints to a staging folder, then renames them into `output`, where the newest `keep` stay.

    `TrainingArguments.output_dir` must be `output`/.saving. A subclass adds files of its own in `add_files`.
    """

    def __init__(self, *, output: Path, keep: int = KEPT, **options):
        super().__init__(**options)
        self.output, self.keep = output, keep
        self.remove_callback(PrinterCallback)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weights only: not beta, norms and biases."""
        return decayed_names(model)

    def add_files(self, checkpoint: Path) -> None:
        """Add files to the checkpoint before it is renamed; called on every process."""

    def go_on(self) -> list[dict]:
        """Train, from the newest whole checkpoint if there is one; later ones are set aside. Returns the Trainer's log,
        with that of the steps before the checkpoint."""
        checkpoint = to_go_on_from(self.output)
        if checkpoint is not None and self.is_world_process_zero():
            set_aside_after(checkpoint)
        if checkpoint is None or step_of(checkpoint) < self.args.max_steps:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        else:  # the Trainer would take one more step
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(checkpoint / TRAINER_STATE_NAME)
        return self.state.log_history

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        name = f"checkpoint-{self.state.global_step}"
        staging = Path(self.args.output_dir)
        if (weight := not_finite(self.model)) is not None:
            raise NotFinite(f"{weight} is not finite at step {self.state.global_step}; {kept(self.output)}")
        try:
            super()._save_checkpoint(model, trial)
            self.add_files(staging / name)
            self.accelerator.wait_for_everyone()
            if self.args.process_index == 0:
                publish(staging / name, self.output / name)
                for old in checkpoints(self.output)[: -self.keep]:
                    shutil.rmtree(old)
            self.accelerator.wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:
            if lost_touch(error):
                raise
            shutil.rmtree(staging, ignore_errors=True)
            reason = str(error).strip().splitlines()[-1]
            if isinstance(error, RuntimeError):  # torch's writer names its position in the file, not the cause
                reason = f"a file could not be written whole, as on a full disk ({reason})"
            told = f"{name} could not be saved in {str(self.output)!r}: {reason}; {kept(self.output)}."
            raise OSError(told) from error


def kept(output: Path) -> str:
    """The end of a sentence: the checkpoint that a run which stops now can resume from."""
    last = newest(output)
    return "no checkpoint is saved yet" if last is None else f"{last.name} is whole, --resume auto goes on from it"
