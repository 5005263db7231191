"""`fem train` itself: from a recipe to a model, data and a Trainer, and from there to results."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedConfig, TrainingArguments

from fem.models import FEMConfig, preset
from fem.models.presets import PRESETS
from fem.provenance import RESULTS, check_output, note, read_json, write_json
from fem.recipes import nearest
from fem.train import hub
from fem.train.architecture import other_config
from fem.train.checkpoints import STAGING, load_language_model
from fem.train.data import TOKENS, check_data, documents_of, identity, load_data, load_tokenizer, say_unread
from fem.train.distributed import Paused, Ranks, end_process_group, end_with_parent, in_touch
from fem.train.documents import check_outside, local_files
from fem.train.frame import Run, progress
from fem.train.integrity import LOCK, one_writer
from fem.train.metrics import MetricsCallback, summary
from fem.train.model import build_model
from fem.train.packing import SOURCE, Share, write_tokens
from fem.train.recipe import TrainRecipe
from fem.train.saving import kept
from fem.train.signals import SaveAndStop
from fem.train.start import Start, add_event, drop_later, find_start, read_metrics, write_config
from fem.train.throughput import flops_per_token
from fem.train.tokenizer import as_trained, entries
from fem.train.trainer import Milestones, TextTrainer

# Environment variables that change the arithmetic behind the recipe's back.
REFUSED = (
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_DYNAMO_BACKEND",
    *(f"ACCELERATE_USE_{what}" for what in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "SAGEMAKER")),
)
RECORDED = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY"),
    *("ACCELERATE_", "FSDP_", "ONEDNN_", "DNNL_", "MKL_"),
)


def run(recipe: TrainRecipe, output: Path, resume: bool = False, *, allow_changed_data: bool = False) -> dict:
    """Train by the recipe; returns what results.json holds.

    A run that is finished is left as it is. Raises ValueError where output holds another run or data have changed,
    OSError where a checkpoint cannot be saved, `Paused` where a signal stopped it.
    """
    end_with_parent()
    check(recipe, output)
    with ExitStack() as held:
        held.enter_context(in_touch())
        held.enter_context(told_of_a_full_disk(output))
        args = training_arguments(recipe, output)
        ranks = Ranks(recipe.comm_timeout)
        start, finished = ranks.first(lambda: prepare(recipe, output, resume, allow_changed_data, held))
        if finished is None and local_files(recipe.data) is None:
            stream_tokens(recipe, output, ranks)
        outcome = fit(recipe, output, args, start, ranks) if finished is None else finished
    end_process_group()
    if isinstance(outcome, Paused):
        raise outcome
    return outcome


@contextmanager
def told_of_a_full_disk(output: Path) -> Iterator[None]:
    """Add to the system's error the folder, and the checkpoint to resume from."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(f"{str(output)!r} could not be written to: {error.strerror}; {kept(output)}.") from error


def check(recipe: TrainRecipe, output: Path) -> None:
    """Raises ValueError where no training can begin; writes nothing."""
    check_output(output)
    check_data(recipe)
    if recipe.preset not in PRESETS:
        families = ", ".join(dict.fromkeys(name.rpartition("-")[0] for name in PRESETS))
        sizes = ", ".join(dict.fromkeys(name.rpartition("-")[2] for name in PRESETS))
        raise ValueError(
            f"preset must be one of FAMILY-SIZE with a family of {families} and a size of {sizes}; got "
            f"{recipe.preset!r}{nearest(recipe.preset, PRESETS)}"
        )
    model_config(recipe, recipe.model_fields().get("vocab_size", recipe.vocabulary))
    for name in REFUSED:
        value = os.environ.get(name, "")
        same = name == "ACCELERATE_MIXED_PRECISION" and value == {"bfloat16": "bf16"}.get(recipe.dtype, "no")
        if value.lower() not in ("", "no", "false", "0") and not same:
            raise ValueError(
                f"{name}={value} would change the arithmetic behind the recipe; unset it: --dtype says the precision, "
                "and torchtitan splits weights over processes (docs/training.md#torchtitan)."
            )


def prepare(
    recipe: TrainRecipe, output: Path, resume: bool, allow_changed_data: bool, held: ExitStack
) -> tuple[Start, dict | None]:
    """On the first process only: hold the lock, decide where to begin, and write tokenizer and tokens.

    Returns the start, and the results where the run there is finished. A folder created here is removed again where the
    data cannot be used.
    """
    if output.exists():
        find_start(recipe, output, resume)  # raises before anything is written, even a lock
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    held.enter_context(one_writer(output))
    fresh = output in made and {path.name for path in output.iterdir()} <= {LOCK}
    try:
        start = find_start(recipe, output, resume)
        if start.step >= recipe.max_steps:
            return start, finished_results(recipe, output, start)
        stored = start.config["recipe"]
        if stored["max_steps"] < recipe.max_steps and start.step:
            add_event(start.config, f"max_steps {stored['max_steps']} -> {recipe.max_steps}", start.step)
        start.config["recipe"] = asdict(recipe)
        if not (output / "config.json").exists():
            write_config(output, start.config)
        take_data(recipe, output, start, allow_changed_data)
        if outside := {name: value for name, value in os.environ.items() if name.startswith(RECORDED)}:
            start.config["environment"] = outside
        write_config(output, start.config)
        drop_later(output, start.checkpoint)
        return start, None
    except ValueError:
        if fresh:
            shutil.rmtree(output, ignore_errors=True)
            with suppress(OSError):  # another run may use a folder by now
                for folder in made[1:]:
                    folder.rmdir()
        raise


def take_data(recipe: TrainRecipe, output: Path, start: Start, allow_changed: bool) -> None:
    """Write tokenizer and tokens to `output`. Raises ValueError where the run began with others."""
    check_outside(recipe.data, output)
    say_unread(recipe)
    tokenizer = load_tokenizer(recipe, output)
    source = identity(recipe, tokenizer)
    known = start.config.get("data")
    changed = [name for name in source if known is not None and known.get(name) != source[name]]
    if changed and not allow_changed:
        raise ValueError(
            f"data have changed since the run in {str(output)!r} began: another {' and '.join(changed)}; give another "
            "--output, or --allow-changed-data to go on with them all the same."
        )
    if changed:
        add_event(start.config, f"data taken as they are now: {json.dumps(source)}", start.step)
    if known is not None and read_json(output / TOKENS / SOURCE) != source:  # a resumption may have taken others
        shutil.rmtree(output / TOKENS, ignore_errors=True)
    start.config["data"] = source
    model_config(recipe, entries(tokenizer))
    if local_files(recipe.data) is None:
        hub.begin(recipe, output / TOKENS, source)
        return
    write_tokens(documents_of(recipe), tokenizer, output / TOKENS, source)
    load_data(recipe, output, Share(1, 1))  # raises where there are too few


def stream_tokens(recipe: TrainRecipe, output: Path, ranks: Ranks) -> None:
    """Write what is missing of the tokens of a dataset of the hub, each process those of its files."""
    folder = output / TOKENS
    if not ranks.first(hub.staging(folder).exists):
        return
    tokenizer = load_tokenizer(recipe, output)
    ranks.each(lambda: hub.write_shards(recipe, folder, tokenizer, ranks.rank, ranks.world))
    ranks.first(lambda: hub.finish(recipe, folder))
    load_data(recipe, output, Share(1, 1))  # raises where there are too few


def finished_results(recipe: TrainRecipe, output: Path, start: Start) -> dict:
    """The results of a run that has reached its last step; written now where it was killed before it wrote them."""
    note(f"the run in {str(output)!r} is finished, {start.step} of {recipe.max_steps} steps; --steps extends it.")
    if (known := read_json(output / RESULTS)) is not None:
        return known
    model, _ = load_language_model(start.checkpoint)
    facts = {"parameters": model.num_parameters(), "flops_per_token": flops_per_token(model, recipe.context)}
    last = [line for line in read_metrics(output) if line["step"] <= start.step]
    results = Run(output, recipe.seed).finish({"train": summary(last) | facts}) | {"seconds": None}
    write_json(output / RESULTS, results)
    return results


def fit(recipe: TrainRecipe, output: Path, args: TrainingArguments, start: Start, ranks: Ranks) -> dict | Paused:
    """Train from the start's checkpoint, or from the beginning. `Paused` is returned and not raised: a traceback would
    keep the Trainer alive, and the process groups must end after it."""
    share = Share(recipe.batch_size, args.per_device_train_batch_size, ranks.rank, ranks.world)
    tokenizer = load_tokenizer(recipe, output)
    data = load_data(recipe, output, share)
    model = build_model(model_config(recipe, entries(tokenizer)), recipe.seed)
    with progress() if ranks.rank == 0 else nullcontext() as bars:
        under_way = Run(output, recipe.seed)
        metrics = MetricsCallback(recipe, under_way, model, data.probe, bars)
        stop = SaveAndStop(ranks)
        trainer = TextTrainer(
            output=output,
            rows=data.train,
            keep=recipe.keep,
            extended=start.checkpoint is not None and trained_for(start.checkpoint) != recipe.max_steps,
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.validation or None,
            processing_class=as_trained(tokenizer),
            callbacks=[stop, Milestones(), metrics],
        )
        with stop:
            trainer.train(resume_from_checkpoint=None if start.checkpoint is None else str(start.checkpoint))
        if stop.stopped_by and trainer.state.global_step < recipe.max_steps:
            return Paused(
                f"stopped by {stop.reason}; step {trainer.state.global_step} of {recipe.max_steps} is saved",
                stop.code,
            )
        trainer.accelerator.wait_for_everyone()  # each still lists the staging folder, which the first removes below
    facts = {"parameters": model.num_parameters(), "flops_per_token": metrics.flops}
    results = {"train": summary(read_metrics(output)) | facts}
    if ranks.rank != 0:
        return results
    shutil.rmtree(output / STAGING, ignore_errors=True)
    return under_way.finish(results)


def trained_for(checkpoint: Path) -> int:
    """The number of steps for which the checkpoint's schedule was made."""
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]


def model_config(recipe: TrainRecipe, vocabulary: int) -> PreTrainedConfig:
    """The preset with the recipe's changes, or another library's model, for rows of the recipe's context."""
    if recipe.architecture is not None:
        return other_config(recipe, vocabulary)
    known, given = {*inspect.signature(FEMConfig).parameters, "rope_parameters"}, recipe.model_fields()
    if "dtype" in given:
        raise ValueError(f"model_fields must leave the dtype to --dtype, got {given['dtype']!r}.")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"model_fields must be fields of FEMConfig, got {unknown[0]!r}{nearest(unknown[0], known)}")
    fields = {"vocab_size": vocabulary, "max_position_embeddings": recipe.context} | given
    config = preset(recipe.preset, mlp=recipe.mlp, **fields)
    if config.vocab_size < vocabulary:
        raise ValueError(f"vocab_size must cover the tokenizer's {vocabulary} entries, got {config.vocab_size}.")
    if config.max_position_embeddings is not None and config.max_position_embeddings < recipe.context:
        raise ValueError(
            f"context must be at most max_position_embeddings = {config.max_position_embeddings}, got {recipe.context}."
        )
    return config


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
        activation_checkpointing=recipe.checkpointing,
        seed=recipe.seed,
        eval_strategy="steps" if recipe.validation_rows else "no",
        eval_steps=recipe.eval_steps,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        save_steps=recipe.save_steps,
        ignore_data_skip=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        use_cpu=not cuda,
        ddp_timeout=recipe.comm_timeout,
        dataloader_pin_memory=cuda,
        use_cache=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )
    micro = recipe.micro_batch or max(1, recipe.batch_size // args.world_size)
    args.per_device_train_batch_size = args.per_device_eval_batch_size = micro
    args.gradient_accumulation_steps = Share(recipe.batch_size, micro, world=args.world_size).accumulation
    return args
