"""`fem train`, top to bottom: a recipe, its data, its model, transformers' Trainer with a callback, and the results."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Generator, Tensor, full_like, nn, tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedConfig, TrainerCallback, TrainingArguments, default_data_collator
from transformers.integrations import TensorBoardCallback

from fem.models import FEMConfig, FEMForCausalLM
from fem.models.loss import IGNORED, cross_entropy_of_logits, next_tokens
from fem.models.presets import check_preset
from fem.provenance import CONFIG, RESULTS, check_output, circumstances, note, read_json, versions, write_json
from fem.train.checkpoints import STAGING, newest, one_writer, step_of
from fem.train.data import TOKENIZER, TOKENS, check_data, identity, load_rows, load_tokenizer, say_unread, write_tokens
from fem.train.metrics import ADVICE, Metrics, summary
from fem.train.model import build_model, check_causal, model_config
from fem.train.recipe import TrainRecipe, differences
from fem.train.saving import NotFinite, SavingTrainer, kept
from fem.train.signals import Paused, SaveAndStop, end_process_group
from fem.train.tokenizer import as_trained, entries

FORMAT = 2  # of an output folder
CHECKPOINTING = next(x for x in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, x))
OUTSIDE = ("MIXED_PRECISION", "DYNAMO_BACKEND")  # ACCELERATE_..., which change the arithmetic behind the recipe's back
OUTSIDE += tuple(f"USE_{what}" for what in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER"))


def run(recipe: TrainRecipe, output: Path, resume: bool = False) -> dict:
    """Train by the recipe; returns what results.json holds. A run that is finished is left as it is.

    Raises ValueError where output holds another run or data have changed, OSError where a checkpoint cannot be saved,
    `Paused` where a signal stopped it.
    """
    check(recipe, output, resume)
    with ExitStack() as held, told_of_a_full_disk(output):
        args = training_arguments(recipe, output)  # under torchrun, begins the process group
        if args.process_index == 0:
            prepare(recipe, output, resume, held)
        else:
            while not (output / TOKENS).exists():  # the first process writes them; torchrun ends this one if it fails
                time.sleep(0.1)
        if args.world_size > 1:
            dist.barrier()
        outcome = finished(recipe, output) or fit(recipe, output, args)
    end_process_group()
    if isinstance(outcome, Paused):
        raise outcome
    return outcome


def check(recipe: TrainRecipe, output: Path, resume: bool) -> None:
    """Raises ValueError where no training can begin; writes nothing."""
    check_data(recipe, output)
    check_preset(recipe.preset)
    model_config(recipe, recipe.model_fields().get("vocab_size", recipe.vocabulary))
    for name in OUTSIDE:
        value = os.environ.get(f"ACCELERATE_{name}", "").lower()
        same = name == "MIXED_PRECISION" and value == {"bfloat16": "bf16"}.get(recipe.dtype, "no")
        if value not in ("", "no", "false", "0") and not same:
            raise ValueError(f"ACCELERATE_{name}={value} would change the arithmetic behind the recipe; unset it.")
    if output.exists():
        begun(recipe, output, resume)


def begun(recipe: TrainRecipe, output: Path, resume: bool) -> dict | None:
    """The config.json of the run that `output` holds, None where it holds none. Raises ValueError where the recipe may
    not go on with what is there."""
    check_output(output, "train")
    checkpoint, config = newest(output), read_json(output / CONFIG)
    if config is None:
        return None
    if config.get("format") != FORMAT:
        raise ValueError(
            f"output must be new or a run of this version of fem train, got {str(output)!r} of an earlier one; choose "
            "another (its checkpoints still load as models)."
        )
    if checkpoint is not None and not resume:
        raise ValueError(f"output holds {checkpoint.name} already; add --resume auto, or choose another.")
    if changed := differences(config["recipe"], recipe):
        begin = "" if checkpoint is not None else ", or remove it to begin again"
        raise ValueError(
            f"the run in {str(output)!r} has another recipe: {', '.join(changed)}; choose another output{begin}."
        )
    return config


def prepare(recipe: TrainRecipe, output: Path, resume: bool, held: ExitStack) -> None:
    """On the first process: hold the lock, write config.json, tokenizer and tokens, and drop what is later than the
    checkpoint to go on from. A folder created here is removed again where the data cannot be used."""
    made = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    held.enter_context(one_writer(output))
    config = begun(recipe, output, resume)
    new = made and config is None
    if config is not None and finished(recipe, output):
        refuse_changed(config, identity(recipe), output)
        note(f"the run in {str(output)!r} is finished, all of {recipe.max_steps} steps; --steps extends it.")
        return
    config = config or {"experiment": "train", "format": FORMAT, "data": None, "seed": recipe.seed}
    config["model_type"] = "fem"  # so that from_pretrained(output) asks FEMConfig, which says what to open
    config["recipe"] = asdict(recipe)
    try:
        say_unread(recipe)
        write_json(output / CONFIG, config | circumstances())
        if config["data"] is None:  # a command that was stopped may have had other data
            shutil.rmtree(output / TOKENIZER, ignore_errors=True)
        tokenizer = load_tokenizer(recipe, output)
        model = model_config(recipe, entries(tokenizer))
        if not isinstance(model, FEMConfig):
            note(f"in {recipe.architecture!r} a token sees the documents before its own in the row.")
            say_how_to_open_the_tokenizer(recipe, output, tokenizer, model)
        source = identity(recipe, tokenizer)
        refuse_changed(config, source, output)
        config["data"] = source
        write_json(output / CONFIG, config | circumstances())
        write_tokens(recipe, tokenizer, source, output / TOKENS)
        load_rows(recipe, output)  # raises where there are too few
    except ValueError:
        if new:
            shutil.rmtree(output, ignore_errors=True)
        raise
    shutil.rmtree(output / STAGING, ignore_errors=True)
    (output / RESULTS).unlink(missing_ok=True)


def say_how_to_open_the_tokenizer(recipe: TrainRecipe, output: Path, tokenizer, model: PreTrainedConfig) -> None:
    """A note where another class than the tokenizer's is made of its files beside a model of this type."""
    folder = recipe.tokenizer or str(output / TOKENIZER)
    made = type(AutoTokenizer.from_pretrained(folder, config=model, trust_remote_code=False))
    if made is not type(tokenizer):
        note(
            f"beside a {model.model_type!r} AutoTokenizer makes a {made.__name__} of the tokenizer, which splits text "
            f"otherwise; open {folder!r} instead (vllm serve --tokenizer, lm-eval tokenizer=)."
        )


def refuse_changed(config: dict, source: dict, output: Path) -> None:
    """Raises ValueError where the run of this config.json began with data of another `identity`."""
    if changed := [name for name in source if (config["data"] or source)[name] != source[name]]:
        told = f"data have changed since the run in {str(output)!r} began: another {' and '.join(changed)}"
        raise ValueError(f"{told}; give another --output.")


def finished(recipe: TrainRecipe, output: Path) -> dict | None:
    """The results of a run that has reached the recipe's last step, None of any other."""
    last = newest(output)
    return read_json(output / RESULTS) if last is not None and step_of(last) >= recipe.max_steps else None


def fit(recipe: TrainRecipe, output: Path, args: TrainingArguments) -> dict | Paused:
    """Train from the newest checkpoint, or from the beginning. `Paused` is returned and not raised: a traceback would
    keep the Trainer alive, and the process groups must end after it."""
    tokenizer = load_tokenizer(recipe, output)
    train, validation, probe = load_rows(recipe, output)
    model = build_model(model_config(recipe, entries(tokenizer)), recipe.seed)
    metrics, stop = Metrics(recipe, output, model, probe), SaveAndStop()
    trainer = TextTrainer(
        output=output,
        keep=recipe.keep,
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation or None,
        processing_class=as_trained(tokenizer),
        data_collator=default_data_collator,
        callbacks=[GoOn(), stop, metrics, *curves(output, args)],
    )
    if recipe.architecture is not None:
        with trainer.accelerator.autocast():
            check_causal(recipe.architecture, model, train[0]["input_ids"])
    with stop:
        log = trainer.go_on()
    if stop.stopped_by and trainer.state.global_step < recipe.max_steps:
        return stop.paused(trainer.state.global_step, recipe.max_steps)
    trainer.accelerator.wait_for_everyone()  # each still lists the staging folder, which the first removes below
    facts = {"parameters": model.num_parameters(), "flops_per_token": metrics.flops}
    results = {"train": summary(log) | facts, "versions": versions(), "seed": recipe.seed}
    if args.process_index == 0:
        shutil.rmtree(output / STAGING, ignore_errors=True)
        write_json(output / RESULTS, results)
    return results


def curves(output: Path, args: TrainingArguments) -> list[TensorBoardCallback]:
    """TensorBoard's files, where it is installed."""
    if args.process_index != 0 or not find_spec("tensorboard"):
        return []
    from torch.utils.tensorboard import SummaryWriter

    return [TensorBoardCallback(SummaryWriter(output / "tensorboard"))]


def training_arguments(recipe: TrainRecipe, output: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(output / STAGING),
        max_steps=recipe.max_steps,
        warmup_steps=recipe.warmup,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        adam_beta2=recipe.beta2,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        bf16=recipe.dtype == "bfloat16",
        torch_compile=recipe.compile,
        seed=recipe.seed,
        train_sampling_strategy="sequential",  # `Shuffled` has the order
        eval_strategy="steps" if recipe.validation_rows else "no",
        eval_steps=recipe.eval_steps,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        save_steps=recipe.save_steps,
        remove_unused_columns=False,
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        use_cache=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        **({CHECKPOINTING: True} if recipe.checkpointing else {}),
    )
    micro = recipe.micro_batch or max(1, recipe.batch_size // args.world_size)
    if recipe.batch_size % (micro * args.world_size):
        raise ValueError(
            f"batch_size must be a multiple of micro_batch x processes = {micro} x {args.world_size}, got "
            f"{recipe.batch_size}."
        )
    args.per_device_train_batch_size = args.per_device_eval_batch_size = micro
    args.gradient_accumulation_steps = recipe.batch_size // (micro * args.world_size)
    return args


class GoOn(TrainerCallback):
    """From a checkpoint on, the intervals are those of this command, and so is the rate, of a schedule that may be
    longer by now."""

    def on_train_begin(self, args, state, control, lr_scheduler, **_):
        state.compute_steps(args, state.max_steps)
        if state.global_step > 0:
            lr_scheduler.last_epoch -= 1
            lr_scheduler.step()


def next_token_loss(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
    """The loss of another library's model: FEM's own, of the model's logits."""
    return cross_entropy_of_logits(outputs.logits, next_tokens(labels), num_items_in_batch)


class TextTrainer(SavingTrainer):
    """Stops at a gradient that is not finite; validates by the mean over all tokens that are predicted, however they
    are dealt to batches."""

    def __init__(self, **options):
        self.hides_documents = isinstance(options["model"], FEMForCausalLM)
        super().__init__(**options, compute_loss_func=None if self.hides_documents else next_token_loss)
        if not self.hides_documents:  # libraries differ in what they do with accumulated steps
            self.model_accepts_loss_kwargs = False
        if self.eval_dataset:  # in whole batches, of which accelerate would else repeat rows
            blank = {name: full_like(x, IGNORED) if name == "labels" else x for name, x in self.eval_dataset[0].items()}
            missing = -len(self.eval_dataset) % (self.args.eval_batch_size * self.args.world_size)
            self.eval_dataset = [*self.eval_dataset, *[blank] * missing]
        held_out = [int((row["labels"][1:] != IGNORED).sum()) for row in self.eval_dataset or ()]
        self.predicted = tensor(sum(held_out) / max(1, len(held_out)))  # tokens of a held-out row, on average

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """This process's held-out rows. With its own generator, the loader draws nothing from the training's."""
        return self.accelerator.prepare(DataLoader(self.eval_dataset, self.args.eval_batch_size, generator=Generator()))

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

    def _clip_grad_norm(self, model: nn.Module):
        norm = super()._clip_grad_norm(model)
        if not math.isfinite(float(norm)):
            loss = float(self._tr_loss)
            what = f"the gradient is {float(norm)}" if math.isfinite(loss) else f"the loss is {loss}"
            raise NotFinite(f"{what} at step {self.state.global_step + 1}; {ADVICE}; {kept(self.output)}")
        return norm


@contextmanager
def told_of_a_full_disk(output: Path) -> Iterator[None]:
    """Add to the system's error the folder, and the checkpoint to resume from."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(f"{str(output)!r} could not be written to: {error.strerror}; {kept(output)}.") from error
