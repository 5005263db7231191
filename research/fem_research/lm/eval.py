"""`fem eval`: scores of a language model by lm-evaluation-harness, on the paper's tasks or any others."""

from __future__ import annotations

import math
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fem.provenance import provenance
from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive
from fem.tables import markdown_table, show_table
from fem_research.lm.suites import SUITES, paper_row, table_2
from fem_research.runs.run import check_output, command_line, open_run
from fem_research.runs.tables import write_page, write_table

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


GROUP = re.compile(r"^task:\s*(\[|#|$)", re.MULTILINE)  # in a task file: a list of other tasks


@dataclass(frozen=True, kw_only=True)
class EvalRecipe:
    """A model, and the tasks that score it."""

    model: str = option("", "Folder of a model, or the output of fem train: its newest whole checkpoint.")
    suite: str | None = option(None, f"A list of tasks by name: {', '.join(SUITES)}.")
    tasks: str = option("", "Names of the harness's tasks, with commas between them.")
    include_path: str | None = option(None, "Folder with task files (YAML) of your own; needs --allow-code.")
    allow_code: bool = option(False, "Let task files run code: the harness's YAML may name functions in files.")
    batch_size: int = option(8, "Sequences per batch.")
    limit: int | None = option(None, "Use at most this many examples of each task, to try things out.")
    beside: str = option("340M FEM", "Row of the paper's Table 2 to print beside the suite's scores.")
    seed: int = option(42, "Seed of the few-shot examples and of sampling.")

    def __post_init__(self):
        if not self.model:
            raise ValueError("model must be given: --model with the folder of a model or of a training.")
        if self.suite is not None:
            require_one_of("suite", self.suite, SUITES)
        if not self.task_names():
            raise ValueError("tasks must be given: --suite with a suite, or --tasks with names.")
        require_positive(self, "batch_size", "limit")
        require_not_negative(self, "seed")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(f"include_path must be a folder of task files, got {self.include_path!r}.")
        if self.include_path is not None and not self.allow_code:
            raise ValueError(
                "include_path needs --allow-code: the harness's task files may run code of their own (!function, "
                f"templates, other files); read those in {self.include_path!r} first."
            )
        paper_row(self.beside)

    def task_names(self) -> list[str]:
        suite = [score.task for score in SUITES.get(self.suite, ())]
        return list(dict.fromkeys(suite + listed(self.tasks)))


def evaluate(
    recipe: EvalRecipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
) -> dict[str, dict[str, float]] | None:
    """{task: {metric: score}}, of groups and of tasks; "METRIC_stderr" where the harness estimates an error.

    Each of several processes scores a part of every task's examples; the first has the scores of all, others None.
    Raises ValueError on unknown tasks, and on tasks that do not fit into the model's context.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    longest = getattr(model.config, "max_position_embeddings", None)

    class Manager(TaskManager):
        """The harness's, which refuses tasks that the model has no room for before any is scored."""

        def load(self, task_list):
            loaded = super().load(task_list)
            _check_room(loaded["tasks"], longest)
            return loaded

    class Harness(HFLM):
        """The harness's model, in one of the accelerator's processes."""

        rank = property(lambda self: accelerator.process_index)
        world_size = property(lambda self: accelerator.num_processes)

    manager = Manager(include_path=recipe.include_path, include_defaults=_needs_own_tasks(recipe))
    matched = {name: manager.match_tasks([name]) for name in recipe.task_names()}
    unknown = [name for name, found in matched.items() if not found]
    if unknown:
        raise ValueError(f"tasks must be known to lm-evaluation-harness or lie in --include-path, got {unknown[0]!r}.")
    harness = Harness(
        pretrained=model,
        tokenizer=tokenizer,
        device=str(model.device),
        max_length=longest,
        batch_size=recipe.batch_size,
    )
    harness.accelerator = accelerator  # which gathers the scores
    seeds = {f"{name}_random_seed": recipe.seed for name in ("numpy", "torch", "fewshot")}
    try:
        results = simple_evaluate(
            harness,
            tasks=list(dict.fromkeys(chain.from_iterable(matched.values()))),
            task_manager=manager,
            limit=recipe.limit,
            log_samples=False,
            random_seed=recipe.seed,
            **seeds,
        )
    except AssertionError as error:  # the harness's, without words, of an answer longer than the context
        said = f": {error}" if str(error) else "; an answer may be longer than the context"
        raise ValueError(
            f"tasks must fit into the model's context of {longest} tokens, which one does not{said}."
        ) from error
    if results is None:
        return None
    return {task: _scores(scores) for task, scores in (results["results"] | results.get("groups", {})).items()}


def _needs_own_tasks(recipe: EvalRecipe) -> bool:
    """True if the harness's own tasks are needed, for a group of one's own too: to load their list takes seconds."""
    if recipe.suite is not None or recipe.include_path is None:
        return True
    files = {path.stem: path for path in Path(recipe.include_path).rglob("*.yaml")}
    groups = any(GROUP.search(path.read_text(encoding="utf-8")) for path in files.values())
    return groups or not set(recipe.task_names()) <= set(files)


def _check_room(tasks: dict, longest: int | None) -> None:
    """Raise ValueError where a task wants texts that leave no room for a prompt in a context of `longest` tokens."""
    from lm_eval.models.utils import normalize_gen_kwargs

    writing = {name: task for name, task in tasks.items() if task.get_config("output_type") == "generate_until"}
    asked = {name: normalize_gen_kwargs(task.get_config("generation_kwargs")) for name, task in writing.items()}
    longer = [name for name, given in asked.items() if given["max_gen_toks"] >= (longest or math.inf)]
    if longer:
        found = ", ".join(f"{name} ({asked[name]['max_gen_toks']:,} tokens)" for name in longer)
        raise ValueError(
            f"tasks must leave room for a prompt in the model's context of {longest} tokens, got texts to write of "
            f"{found}; name the others with --tasks."
        )


def _scores(scores: dict) -> dict[str, float]:
    """Scores by metric: the harness's "acc,none" is "acc"; of several filters of a metric, the first counts."""
    by_metric: dict[str, float] = {}
    for name, value in scores.items():
        if isinstance(value, int | float) and "," in name:
            by_metric.setdefault(name.partition(",")[0], float(value))
    return by_metric


def rows(recipe: EvalRecipe, scores: dict[str, dict[str, float]]) -> list[dict]:
    """The suite's scores beside the paper's, then every metric of the other tasks."""
    suite = SUITES.get(recipe.suite, ())
    paper = paper_row(recipe.beside)
    table = [
        {
            "task": score.column,
            "metric": score.metric,
            "score": scores.get(score.task, {}).get(score.metric),
            "stderr": scores.get(score.task, {}).get(f"{score.metric}_stderr"),
            "paper": paper[score.column],
        }
        for score in suite
    ]
    known = [score.task for score in suite]
    asked = [task for task in recipe.task_names() if task not in known]
    if not all(task in scores for task in asked):  # a pattern, or a tag whose tasks have no common score
        asked = [task for task in scores if task not in known]
    for task in asked:
        for metric, value in scores.get(task, {}).items():
            if not metric.endswith("_stderr"):
                error = scores[task].get(f"{metric}_stderr")
                table.append({"task": task, "metric": metric, "score": value, "stderr": error, "paper": None})
    return table


def _beside_table_2(recipe: EvalRecipe, table: list[dict]) -> list[str]:
    """The suite's section: the paper's models of the size that is beside, ranked together with this one."""
    if recipe.suite is None:
        return []
    size = recipe.beside.partition(" ")[0]
    ours = {score.column: row["score"] for score, row in zip(SUITES[recipe.suite], table)}
    said = "Ranks are those among the paper's rows of this size and ours; ours is blank unless every task was scored."
    return [f"## Table 2, {size}", said, markdown_table(table_2(size, ours), {"average rank": min, "firsts": max})]


def run(recipe: EvalRecipe, output: Path) -> dict:
    """Score the model, under torchrun on all of its processes, and write the results to `output`.

    Returns what results.json holds, in the first process; nothing in the others.
    """
    import torch
    from accelerate import Accelerator

    from fem.train.checkpoints import load_language_model

    check_output(output, "eval", recipe)
    # first: it gives each process a GPU of its own, to which its model is loaded; by itself it finds no others on a CPU
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    writes = accelerator.is_main_process
    with open_run(output, "eval", recipe) if writes else nullcontext() as under_way:  # before hours of scoring
        scores = evaluate(recipe, *load_language_model(recipe.model), accelerator)
        accelerator.end_training()  # lets the processes go
        if under_way is None:
            return {}
        table = rows(recipe, scores)
        for task, by_metric in scores.items():
            under_way.log(task=task, **by_metric)
        write_table(under_way.folder, "table", table)
        title = f"lm-evaluation-harness; paper: Table 2, {recipe.beside}" if recipe.suite else "Scores"
        made = provenance(command_line("eval", recipe, EvalRecipe))
        parts = [markdown_table(table), *_beside_table_2(recipe, table)]
        write_page(under_way.folder, f"{Path(recipe.model).name}: {title}", *parts, made)
        results = under_way.finish({"eval": scores, "model": recipe.model})
    show_table(title, table)
    return results
