"""What `fem train` does: a recipe becomes a model, rows and a Trainer whose checkpoints are whole."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback, TrainingArguments

from fem.experiments.common.checkpoints import checkpoints, newest, publish, step_of
from fem.experiments.common.distributed import end_process_group
from fem.experiments.common.run import RESULTS, Run, hardware, now, progress, versions, write_json
from fem.experiments.common.trainer import LanguageTrainer
from fem.experiments.lm.documents import hub_documents, local_documents, local_files
from fem.experiments.lm.metrics import Journal, summary
from fem.experiments.lm.packing import Row, Share, ShuffledRows, StreamedRows, write_tokens
from fem.experiments.lm.recipe import TrainRecipe, differences
from fem.experiments.lm.small import build_model
from fem.experiments.lm.text import train_tokenizer
from fem.models import FEMConfig, preset

TOKENIZER_DOCUMENTS = 20_000
STAGING, METRICS = ".saving", "metrics.jsonl"


def run(recipe: TrainRecipe, output: Path, resume: bool = False) -> dict:
    """Train by the recipe; returns what results.json holds.

    Raises ValueError where output holds another run, OSError where a checkpoint cannot be saved.
    """
    results = fit(recipe, output, starting_point(recipe, output, resume))
    end_process_group()
    return results


def fit(recipe: TrainRecipe, output: Path, checkpoint: Path | None) -> dict:
    """Train from the checkpoint, or from the beginning."""
    args = training_arguments(recipe, output)
    share = Share(recipe.batch_size, args.per_device_train_batch_size, args.process_index, args.world_size)
    with args.main_process_first(local=False):
        output.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(recipe, output)
        data = load_data(recipe, output, tokenizer, share)
    model = build_model(model_config(recipe, len(tokenizer)), recipe.seed)
    with progress() if args.process_index == 0 else nullcontext() as bars:
        under_way = Run(output, recipe.seed)
        journal = Journal(recipe, under_way, model, data.probe, bars)
        trainer = TextTrainer(
            output=output,
            rows=data.train,
            keep=recipe.keep,
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.validation or None,
            processing_class=tokenizer,
            callbacks=[Milestones(), WrapperCheck(recipe.parallel), journal],
        )
        trainer.remove_callback(PrinterCallback)
        if args.process_index == 0:
            begin(recipe, output, checkpoint)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    facts = {"parameters": model.num_parameters(), "flops_per_token": journal.flops}
    results = {"train": summary(read_metrics(output)) | facts}
    return under_way.finish(results) if args.process_index == 0 else results


def starting_point(recipe: TrainRecipe, output: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from. Raises ValueError where `output` is in use, or was begun with another recipe."""
    if not recipe.data:
        raise ValueError("data must be given: --data with a file, a folder or the name of a dataset on the hub.")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(output)!r}; choose another name.")
    if not checkpoints(output):
        return None
    if not resume:
        raise ValueError(f"output holds {checkpoints(output)[-1].name} already; add --resume auto, or choose another.")
    stored = json.loads((output / "config.json").read_text(encoding="utf-8"))["recipe"]
    if changed := differences(stored, recipe):
        raise ValueError(f"the run in {str(output)!r} has another recipe: {', '.join(changed)}; choose another output.")
    if newest(output) is None:
        raise ValueError(f"no checkpoint in {str(output)!r} is whole; remove them to begin again, or choose another.")
    return newest(output)


def begin(recipe: TrainRecipe, output: Path, checkpoint: Path | None) -> None:
    """Leave in `output` what belongs to this run and no later than its checkpoint."""
    shutil.rmtree(output / STAGING, ignore_errors=True)
    (output / RESULTS).unlink(missing_ok=True)
    step = 0 if checkpoint is None else step_of(checkpoint)
    for later in checkpoints(output):
        if step_of(later) > step:
            shutil.rmtree(later)
    earlier = [json.dumps(line) + "\n" for line in read_metrics(output) if line["step"] <= step]
    (output / "metrics.tmp").write_text("".join(earlier), encoding="utf-8")
    (output / "metrics.tmp").replace(output / METRICS)
    config = {"experiment": "train", "recipe": asdict(recipe), "seed": recipe.seed}
    write_json(output / "config.json", config | {"versions": versions(), "hardware": hardware(), "date": now()})


def read_metrics(output: Path) -> list[dict]:
    """The whole lines of metrics.jsonl: a kill may have cut off the last."""
    if not (output / METRICS).exists():
        return []
    lines = (output / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def load_tokenizer(recipe: TrainRecipe, output: Path) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, or one trained on the beginning of the local data and kept in `output`/tokenizer."""
    own = output / "tokenizer"
    if recipe.tokenizer is None and not own.exists():
        files = local_files(recipe.data)
        if files is None:
            raise ValueError(
                f"data must be a file or a folder that exists, or a dataset of the hub together with --tokenizer, got "
                f"{recipe.data!r} and no tokenizer."
            )
        documents = list(islice(local_documents(files, recipe.field), TOKENIZER_DOCUMENTS))
        staging = own.with_name(".tokenizer")
        train_tokenizer(documents, recipe.vocabulary).save_pretrained(staging)
        staging.replace(own)
    name = str(own) if recipe.tokenizer is None else recipe.tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {name!r} cannot be read: {str(error).strip().splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer must have an end-of-text token to part documents, got {name!r} without one.")
    return tokenizer


@dataclass(frozen=True)
class Data:
    """Rows to train on, rows to validate on, and one row to look at the gates with."""

    train: ShuffledRows | StreamedRows
    validation: list[Row]
    probe: Row | None


def load_data(recipe: TrainRecipe, output: Path, tokenizer: PreTrainedTokenizerFast, share: Share) -> Data:
    """Local files as tokens in `output`/tokens, or a stream. Raises ValueError where there is too little of it."""
    files = local_files(recipe.data)
    if files is None:
        stream = hub_documents(recipe.data, recipe.subset, share.rank, share.world)
        return Data(StreamedRows(stream, recipe.field, tokenizer, recipe.context), [], None)
    source = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    file = write_tokens(local_documents(files, recipe.field), tokenizer, output / "tokens", source)
    rows = file.rows(recipe.context)
    held_out = min(recipe.validation_rows, max(1, rows // 10))
    train = rows - held_out
    if train < 1:
        raise ValueError(
            f"data are too short: {len(file.tokens)} tokens make {rows} rows of {recipe.context}; give more text, or a "
            "smaller context."
        )
    validation = [file.row(index, recipe.context) for index in range(train, rows)]
    probe = file.row(train - 1, recipe.context)
    return Data(ShuffledRows(file, recipe.context, train, share, recipe.seed), validation, probe)


def model_config(recipe: TrainRecipe, vocabulary: int) -> FEMConfig:
    """The preset with the recipe's changes, for rows of the recipe's context."""
    fields = {"vocab_size": vocabulary, "max_position_embeddings": recipe.context} | recipe.model_fields()
    config = preset(recipe.preset, **fields)
    if config.vocab_size < vocabulary:
        raise ValueError(f"vocab_size must cover the tokenizer's {vocabulary} entries, got {config.vocab_size}.")
    if config.max_position_embeddings is not None and config.max_position_embeddings < recipe.context:
        raise ValueError(
            f"context must be at most max_position_embeddings = {config.max_position_embeddings}, got {recipe.context}."
        )
    return config


def training_arguments(recipe: TrainRecipe, output: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    if recipe.parallel == "fsdp" and not cuda:
        raise ValueError("parallel='fsdp' needs GPUs: without them transformers trains with ddp and does not say so.")
    args = TrainingArguments(
        output_dir=str(output / STAGING),
        max_steps=recipe.max_steps,
        warmup_steps=recipe.warmup_steps,
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
        fsdp=True if recipe.parallel == "fsdp" else None,
        dataloader_pin_memory=cuda,
        use_cache=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    given = recipe.micro_batch or max(1, recipe.batch_size // args.world_size)
    args.per_device_train_batch_size = args.per_device_eval_batch_size = given
    args.gradient_accumulation_steps = Share(recipe.batch_size, given, args.process_index, args.world_size).accumulation
    return args


class Milestones(TrainerCallback):
    """Logs at every checkpoint, so that no kill loses a part of the losses summed up since; validates at the end."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True
        control.should_log = control.should_log or control.should_save or control.should_evaluate


class WrapperCheck(TrainerCallback):
    """Raises RuntimeError where the model is not wrapped as the recipe says."""

    def __init__(self, parallel: str):
        self.parallel = parallel

    def on_train_begin(self, args, state, control, model: nn.Module | None = None, **_):
        from torch.distributed.fsdp import FSDPModule

        if self.parallel == "fsdp" and not isinstance(model, FSDPModule):
            raise RuntimeError(f"parallel='fsdp' must shard the model, got {type(model).__name__} that is not sharded.")


class TextTrainer(LanguageTrainer):
    """The Trainer on rows that know where they are, with checkpoints that appear whole."""

    def __init__(self, *, output: Path, rows: ShuffledRows | StreamedRows, keep: int, **given):
        super().__init__(**given)
        self.output, self.rows, self.keep = output, rows, keep

    def get_train_dataloader(self) -> DataLoader:
        """The process's own rows. A generator of its own keeps the loader's start out of the random state."""
        return DataLoader(
            self.rows,
            batch_size=self.args.per_device_train_batch_size,
            generator=torch.Generator(),
            pin_memory=self.args.dataloader_pin_memory,
        )

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial):
        found = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial)
        if checkpoint is not None:
            state = json.loads((Path(checkpoint) / self._rows_name).read_text(encoding="utf-8"))
            self.rows.load_state_dict(state, self.state.global_step)
        return found

    @property
    def _rows_name(self) -> str:
        return f"rows_{self.args.process_index}.json"

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        name = f"checkpoint-{self.state.global_step}"
        staging = Path(self.args.output_dir)
        try:
            super()._save_checkpoint(model, trial)
            write_json(staging / name / self._rows_name, self.rows.state_dict())
            self.accelerator.wait_for_everyone()
            if self.args.process_index == 0:
                publish(staging / name, self.output / name)
                for old in checkpoints(self.output)[: -self.keep]:
                    shutil.rmtree(old)
            self.accelerator.wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            last = newest(self.output)
            kept = "no earlier one is there" if last is None else f"{last.name} is whole, --resume auto goes on from it"
            raise OSError(f"{name} could not be saved in {str(self.output)!r}: {error}; {kept}.") from error
