"""What a training logs: losses, learning rate, beta, lambda, recomputed reads, speed and memory."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from importlib.util import find_spec

import torch
from rich.progress import Progress
from transformers import PreTrainedModel, TrainerCallback

from fem.gates import Temperature, TwoLevelGate
from fem.ops.common.fallback_count import fallbacks
from fem.train.frame import Run
from fem.train.packing import Row
from fem.train.recipe import TrainRecipe
from fem.train.saving import NotFinite, kept
from fem.train.throughput import flops_per_token, peak_flops, peak_memory
from fem.train.trainer import ADVICE

LOGGED = {"loss": "train_loss", "eval_loss": "val_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}


class MetricsCallback(TrainerCallback):
    """Writes metrics.jsonl, TensorBoard's files where it is installed, and a bar and a line of text, on process 0 only.

    A line has the step, the losses, beta (smallest, mean, largest), the mean of lambda on the row `probe`, the share of
    free energies that were recomputed, tokens per second, seconds left, and on a known GPU the share of its peak (MFU).
    """

    def __init__(self, recipe: TrainRecipe, run: Run, model: PreTrainedModel, probe: Row, bars: Progress | None):
        self.recipe, self.run, self.probe, self.bars = recipe, run, probe, bars
        self.flops = flops_per_token(model, recipe.context)

    def on_train_begin(self, args, state, control, **_):
        fallbacks.reset()
        self.start_clock()
        self.processes, self.writer = args.world_size, None
        if self.bars is not None:
            self.bar = self.bars.add_task("training", total=state.max_steps, completed=state.global_step)
            if find_spec("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(self.run.folder / "tensorboard", purge_step=state.global_step + 1)

    def start_clock(self) -> None:
        """Start to time steps, their data included. The loss is read before and after, which waits for the GPU."""
        self.steps, self.began = 0, time.perf_counter()

    def on_evaluate(self, args, state, control, **_):
        self.start_clock()

    on_save = on_evaluate

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        if self.bars is not None:
            self.bars.update(self.bar, completed=state.global_step)

    def on_log(self, args, state, control, logs, model, **_):
        line = {ours: float(logs[theirs]) for theirs, ours in LOGGED.items() if theirs in logs}
        for name in ("train_loss", "val_loss"):
            if name in line and not math.isfinite(line[name]):
                what = f"the {'validation loss' if name == 'val_loss' else 'loss'} is {line[name]}"
                raise NotFinite(f"{what} at step {state.global_step}; {ADVICE}; {kept(self.run.folder)}")
        line = {name: value for name, value in line.items() if math.isfinite(value)}
        if "train_loss" in line:
            line |= self.speed(state.max_steps - state.global_step) | read_statistics(model, self.probe)
            self.start_clock()
        if line and self.bars is not None:
            self.run.log(step=state.global_step, **line)
            self.bars.console.print(in_words(state.global_step, state.max_steps, line), soft_wrap=True)
            for name, value in line.items() if self.writer is not None else ():
                self.writer.add_scalar(name, value, state.global_step)

    def on_train_end(self, args, state, control, **_):
        if self.writer is not None:
            self.writer.close()

    def speed(self, steps_left: int) -> dict[str, float]:
        if not self.steps:
            return {}
        a_step = (time.perf_counter() - self.began) / self.steps
        tokens = self.recipe.batch_size * self.recipe.context / a_step
        speed = {
            "tokens_per_second": tokens,
            "seconds_left": a_step * steps_left,
            "peak_memory_bytes": peak_memory(),
        }
        if peak := peak_flops():
            speed["mfu"] = tokens * self.flops / (peak * self.processes)
        return speed


def in_words(step: int, steps: int, line: dict) -> str:
    """A line of a log: "step 10/1000, loss 5.104, grad norm 1.2, 8,432 tokens/s, 0:12:09 left"."""
    parts = [f"step {step}/{steps}"]
    for name, shown in (("train_loss", "loss"), ("val_loss", "validation loss"), ("grad_norm", "grad norm")):
        if name in line:
            parts.append(f"{shown} {line[name]:.4g}")
    if "tokens_per_second" in line:
        left = timedelta(seconds=round(line["seconds_left"]))
        parts += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{left} left"]
    return ", ".join(parts)


def summary(metrics: list[dict]) -> dict:
    """The last value of everything that was measured, with the steps of the last validation and of the end."""
    last: dict = {}
    for line in metrics:
        last |= line | ({"validated_at": line["step"]} if "val_loss" in line else {})
    return {name: value for name, value in last.items() if name != "seconds_left"}


@torch.no_grad()
def read_statistics(model: PreTrainedModel, row: Row) -> dict[str, float]:
    """beta over all channels, lambda over all channels and the row's tokens, and the share of recomputed reads."""
    statistics: dict[str, float] = {}
    betas = [module() for module in model.modules() if isinstance(module, Temperature)]
    if betas:
        beta = torch.cat([beta.flatten() for beta in betas])
        statistics |= {"beta_min": beta.min().item(), "beta_mean": beta.mean().item(), "beta_max": beta.max().item()}
    if fallbacks.entries:
        statistics["recomputed_share"] = fallbacks.recomputed / fallbacks.entries
    statistics |= gate_statistics(model, row)
    fallbacks.reset()
    return statistics


def gate_statistics(model: PreTrainedModel, row: Row) -> dict[str, float]:
    lambdas: list[float] = []
    inner = [gate.inner for gate in model.modules() if isinstance(gate, TwoLevelGate) and gate.inner is not None]
    hooks = [
        part.register_forward_hook(lambda _, x, y: lambdas.append(y.float().sigmoid().mean().item())) for part in inner
    ]
    if not inner:
        return {}
    training = model.training
    try:
        model.eval()
        shown = {name: x[None].to(model.device) for name, x in row.items() if name != "labels"}
        model(**shown, logits_to_keep=1)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {"lambda_mean": sum(lambdas) / len(lambdas)} if lambdas else {}
