"""The Trainer of `fem train`: it resumes in the middle of its data, and checks that every step is finite."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Generator, Tensor, full_like, nn, tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from fem.models import FEMForCausalLM
from fem.models.loss import IGNORED, cross_entropy_of_logits, next_tokens
from fem.train.packing import ShuffledRows
from fem.train.saving import NotFinite, SavingTrainer, kept
from fem.train.start import copy_run

ADVICE = "a smaller learning rate, more warm-up steps or float32 may help"


class Milestones(TrainerCallback):
    """Logs at every checkpoint, so that a kill loses no losses summed up since the last log; validates at the end."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True
        control.should_log = control.should_log or control.should_save or control.should_evaluate


def next_token_loss(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
    """The loss of another library's model: FEM's own, of the model's logits."""
    return cross_entropy_of_logits(outputs.logits, next_tokens(labels), num_items_in_batch)


class TextTrainer(SavingTrainer):
    """Reads rows from where the checkpoint left off, and stops at a gradient that is not finite.

    rows: those that this process reads. extended: the schedule is longer than the checkpoint's. The validation loss is
    the mean over all tokens that are predicted, however they are dealt to batches.
    """

    def __init__(self, *, rows: ShuffledRows, extended: bool, **options):
        self.rows = rows
        self.hides_documents = isinstance(options["model"], FEMForCausalLM)
        if not self.hides_documents:  # libraries differ in what they do with accumulated steps
            options["compute_loss_func"] = next_token_loss
        super().__init__(**options)
        if not self.hides_documents:
            self.model_accepts_loss_kwargs = False
        self.extended = extended
        if self.eval_dataset:  # in whole batches, of which accelerate would else repeat rows
            blank = {name: full_like(x, IGNORED) if name == "labels" else x for name, x in self.eval_dataset[0].items()}
            missing = -len(self.eval_dataset) % (self.args.eval_batch_size * self.args.world_size)
            self.eval_dataset = [*self.eval_dataset, *[blank] * missing]
        held_out = [int((row["labels"][1:] != IGNORED).sum()) for row in self.eval_dataset or ()]
        self.predicted = tensor(sum(held_out) / max(1, len(held_out)))  # tokens of a held-out row, on average

    def get_train_dataloader(self) -> DataLoader:
        """This process's rows."""
        return self._loader(self.rows, self.args.per_device_train_batch_size)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """This process's held-out rows, all of one length."""
        return self.accelerator.prepare(self._loader(self.eval_dataset, self.args.eval_batch_size))

    def _loader(self, rows, size: int) -> DataLoader:
        """With its own generator, the loader draws nothing from the global random state."""
        return DataLoader(rows, size, generator=Generator(), pin_memory=self.args.dataloader_pin_memory)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """transformers' loss. In validation that of the last token's logits alone, and by the mean number of tokens.

        A model of another library gets the same rows, in which it sees the documents before.
        """
        if not self.hides_documents:
            inputs = {name: x for name, x in inputs.items() if name != "segment_ids"}
        if not model.training:
            inputs = inputs | ({"logits_to_keep": 1} if self.hides_documents else {})
            num_items_in_batch = len(inputs["input_ids"]) * self.predicted * self.accelerator.num_processes
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial):
        start = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial)
        if checkpoint is not None:
            self.state.compute_steps(self.args, max_steps)  # the intervals of this command, not of the checkpoint
            self.rows.step = self.state.global_step
        return start

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.extended:
            self.lr_scheduler.last_epoch -= 1
            self.lr_scheduler.step()  # the learning rate of this step in the longer schedule

    def _clip_grad_norm(self, model: nn.Module):
        norm = super()._clip_grad_norm(model)
        size = float(norm)
        if not math.isfinite(size):
            loss = float(self._tr_loss)
            what = f"the gradient is {size}" if math.isfinite(loss) else f"the loss is {loss}"
            raise NotFinite(f"{what} at step {self.state.global_step + 1}; {ADVICE}; {kept(self.output)}")
        return norm

    def add_files(self, checkpoint: Path) -> None:
        if self.args.process_index == 0:
            copy_run(self.output, checkpoint)
