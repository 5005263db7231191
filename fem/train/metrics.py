"""What a training logs beside the Trainer's losses: beta, lambda, recomputed reads, speed and memory."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
from transformers import PreTrainedModel, TrainerCallback

from fem.gates import Temperature, TwoLevelGate
from fem.ops.common.precision import fallbacks
from fem.train.data import Row
from fem.train.recipe import TrainRecipe
from fem.train.saving import NotFinite, kept
from fem.train.throughput import flops_per_token, peak_flops, peak_memory

ADVICE = "a smaller learning rate, more warm-up steps or float32 may help"
OURS = {"loss": "train_loss", "eval_loss": "val_loss"}  # by the Trainer's names
LOGGED = ("grad_norm", "learning_rate", "tokens_per_second", "seconds_left", "peak_memory_bytes", "mfu")
LOGGED += ("beta_min", "beta_mean", "beta_max", "lambda_mean", "recomputed_share")


class Metrics(TrainerCallback):
    """Adds to the Trainer's log beta (smallest, mean, largest), the mean of lambda on the row `probe`, the share of
    free energies that were recomputed, tokens per second, seconds left, and on a known GPU the share of its peak (MFU).

    Writes the log to metrics.jsonl and prints it, on process 0. Logs with every checkpoint, and validates at the end.
    """

    def __init__(self, recipe: TrainRecipe, output: Path, model: PreTrainedModel, probe: Row):
        self.recipe, self.output, self.probe = recipe, output, probe
        self.flops = flops_per_token(model, recipe.context)

    def on_train_begin(self, args, state, control, **_):
        fallbacks.reset()
        self.start_clock()
        if state.is_world_process_zero:  # a checkpoint's log, without the lines of the steps behind it
            text = "".join(json.dumps(line) + "\n" for line in map(told, state.log_history) if len(line) > 1)
            (self.output / "metrics.jsonl").write_text(text, encoding="utf-8")

    def start_clock(self) -> None:
        """Start to time steps, their data included. The loss is read before and after, which waits for the GPU."""
        self.steps, self.began = 0, time.perf_counter()

    def on_evaluate(self, args, state, control, **_):
        self.start_clock()

    on_save = on_evaluate

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        if state.global_step == state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True
        control.should_log = control.should_log or control.should_save or control.should_evaluate

    def on_log(self, args, state, control, logs, model, **_):
        if not math.isfinite(loss := logs.get("eval_loss", 0.0)):
            raise NotFinite(f"the validation loss is {loss} at step {state.global_step}; {ADVICE}; {kept(self.output)}")
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            logs |= self.speed(args.world_size, state.max_steps - state.global_step)
            logs |= read_statistics(model, self.probe)
            state.log_history[-1] |= logs
            self.start_clock()
        line = told(state.log_history[-1])
        if len(line) > 1:
            with open(self.output / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(in_words(line, state.max_steps), file=sys.stderr)

    def speed(self, processes: int, steps_left: int) -> dict[str, float]:
        a_step = (time.perf_counter() - self.began) / self.steps
        tokens = self.recipe.batch_size * self.recipe.context / a_step
        speed = {"tokens_per_second": tokens, "seconds_left": a_step * steps_left, "peak_memory_bytes": peak_memory()}
        if peak := peak_flops():
            speed["mfu"] = tokens * self.flops / (peak * processes)
        return speed


def told(entry: dict) -> dict:
    """A line of metrics.jsonl, from an entry of the Trainer's log."""
    line = {"step": entry["step"]} | {ours: entry[theirs] for theirs, ours in OURS.items() if theirs in entry}
    return line | {name: entry[name] for name in LOGGED if name in entry}


def in_words(line: dict, steps: int) -> str:
    """A line of a log: "step 10/1000, loss 5.104, grad norm 1.2, 8,432 tokens/s, 0:12:09 left"."""
    parts = [f"step {line['step']}/{steps}"]
    for name, shown in (("train_loss", "loss"), ("val_loss", "validation loss"), ("grad_norm", "grad norm")):
        if name in line:
            parts.append(f"{shown} {line[name]:.4g}")
    if "tokens_per_second" in line:
        left = timedelta(seconds=round(line["seconds_left"]))
        parts += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{left} left"]
    return ", ".join(parts)


def summary(log: list[dict]) -> dict:
    """The last value of everything that was measured, with the steps of the last validation and of the end."""
    last: dict = {}
    for line in map(told, log):
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
    inner = [gate.inner for gate in model.modules() if isinstance(gate, TwoLevelGate) and gate.inner is not None]
    lambdas: list[float] = []
    keep = lambda _, x, y: lambdas.append(y.float().sigmoid().mean().item())  # noqa: E731
    if inner:
        with ExitStack() as undo:
            undo.callback(model.train, model.training)
            for part in inner:
                undo.enter_context(part.register_forward_hook(keep))
            model.eval()
            shown = {name: x[None].to(model.device) for name, x in row.items() if name != "labels"}
            model(**shown, logits_to_keep=1)
        statistics["lambda_mean"] = sum(lambdas) / len(lambdas)
    fallbacks.reset()
    return statistics
