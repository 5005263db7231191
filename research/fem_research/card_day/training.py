"""The slice `train`: language models of one size, a row after the other, by transformers' Trainer.

Each row has one JSON, which is written again whenever something new is known. A training saves every two minutes, and
when its time is over or a signal asks; the same command goes on from there.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from fem.models import FEMConfig, FEMForCausalLM
from fem.models.presets import preset
from fem.provenance import note, read_json, write_json
from fem.train.model import build_model
from fem.train.saving import NotFinite, SavingTrainer
from fem.train.signals import SaveAndStop
from fem.train.throughput import flops_per_token, peak_flops, peak_memory
from fem_research.card_day.cells import GRAPHS
from fem_research.card_day.facts import circumstances_of_card
from fem_research.card_day.kernels import shares
from fem_research.card_day.linux_text import HELD_OUT, TOKENS, read_tokens
from fem_research.card_day.recipe import TrainingRecipe
from fem_research.common.blocks import convolve
from fem_research.common.mixers import fields_of
from fem_research.common.names import display
from fem_research.common.trainer import training_arguments

LOG_STEPS = 10
SAVE_SECONDS = 120.0
FLOPS = (
    "6 N + 6 sum over softmax layers of (T / 2) (width of q + heads x width of a head's read), a token: N parameters, "
    "tied ones once; scans, gates and the conditioner's recurrence are left out (fem.train.throughput)"
)


class Rows(Dataset):
    """Rows of `context` tokens, one behind the other: rows may begin and end inside a file."""

    def __init__(self, tokens: np.ndarray, context: int):
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index * self.context : (index + 1) * self.context]
        ids = torch.from_numpy(row.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class Clock(TrainerCallback):
    """Times every step, puts the median of the last ones into the log, and asks for validations, saves and the end."""

    def __init__(self, recipe: TrainingRecipe, deadline: float, report):
        self.recipe, self.deadline, self.report = recipe, deadline, report
        self.cuda = torch.cuda.is_available()
        parts = range(1, recipe.validations + 1)
        self.points = {max(1, round(recipe.steps * part / recipe.validations)) for part in parts}
        self.first: float | None = None  # seconds of the first step of this process, which compiles
        self.out_of_time = False

    def mark(self) -> torch.cuda.Event | float:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start, end) -> float:
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start

    def on_train_begin(self, args, state, control, **_):
        self.marks: list[tuple] = []
        self.saved = time.monotonic()

    def on_step_begin(self, args, state, control, **_):
        self.begun, self.wall = self.mark(), time.monotonic()

    def on_step_end(self, args, state, control, **_):
        end = self.mark()
        if self.first is None:
            if self.cuda:
                torch.cuda.synchronize()
            self.first = time.monotonic() - self.wall
        else:
            self.marks.append((self.begun, end))
        now = time.monotonic()
        self.out_of_time = now > self.deadline and state.global_step < state.max_steps
        control.should_evaluate = state.global_step in self.points or self.out_of_time
        control.should_log = control.should_log or control.should_evaluate
        if self.out_of_time or (now - self.saved > SAVE_SECONDS and state.global_step < state.max_steps):
            control.should_save, self.saved = True, now
        control.should_training_stop = control.should_training_stop or self.out_of_time

    def on_log(self, args, state, control, logs, **_):
        """Raises NotFinite where a loss is none."""
        for loss in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(loss, 0.0)):
                del state.log_history[-1]
                raise NotFinite(f"the loss is {logs[loss]} at step {state.global_step}")
        if "loss" in logs and self.marks:
            if self.cuda:
                torch.cuda.synchronize()
            state.log_history[-1]["step_seconds"] = statistics.median(self.between(*pair) for pair in self.marks)
            self.marks = []

    def on_evaluate(self, args, state, control, **_):
        self.report()

    def on_save(self, args, state, control, **_):
        self.report()


class CardTrainer(SavingTrainer):
    """Held-out losses are those of the plain blocks: no second graph is compiled for them."""

    def __init__(self, *, recipe: TrainingRecipe, held_out: Rows, **options):
        self.recipe, self.held_out = recipe, held_out
        super().__init__(**options)

    def evaluate(self, *_, **__) -> dict[str, float]:
        """The held-out loss of some rows, and at the end that of all; nats per token."""
        quick = np.linspace(0, len(self.held_out) - 1, min(self.recipe.quick_rows, len(self.held_out))).astype(int)
        found = {"eval_loss": self.mean_loss(quick.tolist())}
        if self.state.global_step == self.state.max_steps:
            found["eval_loss_of_all"] = self.mean_loss(range(len(self.held_out)))
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def one_pass(self, rows: Rows) -> None:
        """Forward and backward over the first rows of a forward pass, as in training."""
        ids = torch.stack([rows[index]["input_ids"] for index in range(self.recipe.micro)]).to(self.args.device)
        model = self.accelerator.unwrap_model(self.model).train()
        with torch.autocast(self.args.device.type, torch.bfloat16, self.args.bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[int]) -> float:
        model, device, total = self.accelerator.unwrap_model(self.model), self.args.device, 0.0
        model.eval()
        with torch.compiler.set_stance("force_eager"), torch.autocast(device.type, torch.bfloat16, self.args.bf16):
            for start in range(0, len(rows), self.recipe.micro):
                part = rows[start : start + self.recipe.micro]
                ids = torch.stack([self.held_out[int(i)]["input_ids"] for i in part]).to(device)
                total += float(model(input_ids=ids, labels=ids, logits_to_keep=1).loss) * len(part)
        model.train()
        return total / len(rows)


def model_config(recipe: TrainingRecipe, vocabulary: int) -> FEMConfig:
    """The model of a row, with as many parameters as attention's by a narrower SwiGLU."""
    fields = fields_of(recipe.mixer)
    return preset(
        "fem-sm-tiny",
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=recipe.mlp_width,
        max_position_embeddings=recipe.context,
        prior_type=fields.pop("prior_type"),
        mixer=fields,
    )


def arguments(recipe: TrainingRecipe, output: Path) -> TrainingArguments:
    return training_arguments(
        recipe,
        recipe.rate,
        output,
        per_device_train_batch_size=recipe.micro,
        gradient_accumulation_steps=recipe.batch // recipe.micro,
        bf16=recipe.bf16,
        eval_strategy="no",  # `Clock` asks for validations and saves
        save_strategy="no",
        logging_steps=LOG_STEPS,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        dataloader_drop_last=True,
        use_cpu=not torch.cuda.is_available(),
    )


def train(recipe: TrainingRecipe, tokens: Path, output: Path, deadline: float = float("inf")) -> dict:
    """Train one row, or go on with it; returns what its JSON holds. A finished row is not trained again.

    deadline: of `time.monotonic`; the training is saved and ends there. Raises ValueError where `output` holds a row of
    this name with another recipe or another text, `Paused` where a signal stopped it.
    """
    file, folder = output / f"{recipe.key}.json", output / "checkpoints" / recipe.key
    train_tokens, held_out, text = read_tokens(tokens)
    known = read_json(file)
    fixed = {"recipe": asdict(recipe), "text": text}
    if known is not None and {name: known[name] for name in fixed} != fixed:
        raise ValueError(f"{str(file)!r} holds a row of another recipe or text; give another output.")
    if known is not None and known["finished"]:
        return known
    output.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    begun = time.monotonic()
    model = convolve(build_model(model_config(recipe, text["vocabulary"]), recipe.seed), recipe.mixer)
    if recipe.compile:
        for block in model.model.layers:
            block.compile(dynamic=False)
    fixed |= facts_of(model, recipe) | circumstances_of_card()
    earlier = 0.0 if known is None else known["seconds"]
    clock = Clock(recipe, deadline, lambda: write())
    stop = SaveAndStop()
    trainer = CardTrainer(
        recipe=recipe,
        held_out=Rows(held_out, recipe.context),
        output=folder,
        model=model,
        args=arguments(recipe, folder),
        train_dataset=Rows(train_tokens, recipe.context),
        callbacks=[clock, stop],
    )

    def write(finished: bool = False) -> dict:
        found = measured(trainer.state.log_history, recipe, fixed["flops_per_token"])
        compiling = clock.first - found["step_seconds"] if clock.first and found["step_seconds"] else None
        found |= {"first_step_seconds": clock.first, "compile_seconds": compiling}
        found |= {"peak_memory_bytes": peak_memory(), "seconds": earlier + time.monotonic() - begun}
        found = fixed | {"finished": finished, "steps": trainer.state.global_step, "of_steps": recipe.steps} | found
        write_json(file, found)
        return found

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with stop, torch._dynamo.config.patch(GRAPHS):
        try:
            trainer.go_on()
        except NotFinite as error:
            fixed["diverged"] = str(error)
    found = write(finished=trainer.state.global_step == recipe.steps or "diverged" in fixed)
    if found["finished"]:
        shutil.rmtree(folder, ignore_errors=True)
        if fixed["hardware"]["gpus"]:  # last, as a profiler may fail, and what was measured is written
            fixed["kernels"] = shares(lambda: trainer.one_pass(trainer.train_dataset))
            found = write(finished=True)
    if stop.stopped_by:
        raise stop.paused(found["steps"], recipe.steps)
    return found


def facts_of(model: FEMForCausalLM, recipe: TrainingRecipe) -> dict:
    return {
        "model": {"intermediate_size": model.config.intermediate_size, "mixer": model.config.mixer},
        "parameters": model.num_parameters(),
        "flops_per_token": flops_per_token(model, recipe.context),
        "flops_formula": FLOPS,
    }


def measured(log: list[dict], recipe: TrainingRecipe, flops: int) -> dict:
    """Losses, and speed by the median of the steps' times, from the Trainer's log."""
    at = lambda line: {"step": line["step"], "tokens": line["step"] * recipe.step_tokens}  # noqa: E731
    losses = [
        at(line) | {"loss": line["loss"], "rate": line["learning_rate"], "step_seconds": line.get("step_seconds")}
        for line in log
        if "loss" in line
    ]
    held_out = [at(line) | {"loss": line["eval_loss"]} for line in log if "eval_loss" in line]
    times = [line["step_seconds"] for line in losses if line["step_seconds"]]
    median = statistics.median(times) if times else None
    speed = recipe.step_tokens / median if median else None
    return {
        "held_out_loss": next((line["eval_loss_of_all"] for line in log if "eval_loss_of_all" in line), None),
        "held_out": held_out,
        "losses": losses,
        "step_seconds": median,
        "tokens_per_second": speed,
        "mfu": speed * flops / peak_flops() if speed and peak_flops() else None,
    }


def run(recipes: Sequence[TrainingRecipe], tokens: Path, output: Path, minutes: float = float("inf")) -> list[dict]:
    """The trainings one after the other, until the time is over."""
    deadline, found = time.monotonic() + 60 * minutes, []
    for recipe in recipes:
        if time.monotonic() > deadline:
            break
        name = f"{display(recipe.mixer)}, rate {recipe.rate:g}, seed {recipe.seed}"
        note(f"{name}: begins, {deadline - time.monotonic():.0f} s left.")
        try:
            found.append(train(recipe, tokens, output, deadline))
            note(f"{name}: {in_words(found[-1])}")
        except RuntimeError as error:  # of the compiler, or of a card with too little memory
            note(f"{name} failed, the next one begins: {type(error).__name__}: {error}")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return found


def in_words(found: dict) -> str:
    """A row's figures: "finished, held-out loss 1.234, 150.1 ms a step, ..."."""
    shown = {
        "held_out_loss": "held-out loss {:.4f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.3f}",
        "first_step_seconds": "first step {:.1f} s",
        "peak_memory_bytes": "{:,} bytes at most",
        "seconds": "{:.0f} s in all",
    }
    parts = [f"step {found['steps']} of {found['of_steps']}"]
    if found["step_seconds"]:
        parts.append(f"{1e3 * found['step_seconds']:.1f} ms a step")
    return ", ".join(parts + [text.format(found[name]) for name, text in shown.items() if found[name] is not None])


def warm(recipes: Sequence[TrainingRecipe], vocabulary: int) -> None:
    """Train one step of each on random tokens, so that the compiler's cache holds its graphs; nothing is kept."""
    ones = [dataclasses.replace(recipe, tokens=recipe.step_tokens, validations=0) for recipe in recipes]
    with tempfile.TemporaryDirectory() as folder:
        facts = {"vocabulary": vocabulary}
        for part in ("train", HELD_OUT):
            tokens = np.random.default_rng(0).integers(vocabulary, size=ones[0].step_tokens, dtype=np.uint16)
            tokens.tofile(Path(folder, f"{part}.bin"))
            facts[part] = {"tokens": len(tokens)}
        write_json(Path(folder, TOKENS), facts)
        run(ones, Path(folder), Path(folder))
