"""`fem ablate`: what each part of FEM adds to a language model of equal size, trained on the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import mean

import torch
from rich.progress import Progress

from fem.provenance import note, provenance, read_json, write_json
from fem.tables import markdown_table
from fem.train.model import build_model
from fem_research.common import pictures
from fem_research.common.blocks import convolve
from fem_research.common.grid import Grid, digest_of, one_by_one, publish, smallest
from fem_research.common.loops import descend
from fem_research.common.measure import Step, alternate, cpu_threads
from fem_research.common.names import KEY, display
from fem_research.common.paired import by_seed, shown, spread
from fem_research.lm.settings import AblateRecipe, mixer_name, remark, row_fields
from fem_research.lm.small import LanguageRecipe, model_config, train
from fem_research.lm.text import Corpus, build_corpus, source_name
from fem_research.runs.run import RUNS, check_output, command_line, progress
from fem_research.runs.tables import write_page

SECONDS = 60.0  # for all rows
COSTS = "costs.json"
PLAIN, GATED = "-C,G,T,L", "+G"
ON_THE_PAGE_ALONE = ("what", "sd", "by seed", "parameters", "tokens/s")  # a terminal has no room for them
EQUAL_TIME = (
    " All rows train for equal time: one whose step takes longer than the fastest row's takes fewer steps, and its "
    "learning rate falls to 0 within these. ms a step: median process time of forward, backward and AdamW, in turn."
)


def step_seconds(recipe: AblateRecipe, output: Path) -> dict[str, float]:
    """Median seconds of forward, backward and AdamW of every row's model, the rows in turn; on a CPU, process time.

    They are measured once and kept in `output`, so that this command, and others that train some of these rows there,
    go on with the same steps.
    """
    language = recipe.language(recipe.rates()[0], recipe.seed)
    sizes = ("layers", "width", "heads", "mlp_width", "mlp", "vocabulary", "context", "batch")
    model = {name: getattr(recipe, name) for name in sizes} | {"prior": recipe.prior, "threads": recipe.threads}
    if (output / COSTS).exists():
        kept = read_json(output / COSTS) or {"model": None}
        if kept["model"] != model or not kept["seconds"].keys() >= set(recipe.row_names()):
            raise ValueError(
                f"{str(output / COSTS)!r} holds what other models cost, or is damaged; remove it to measure again, or "
                "give another --output."
            )
        return kept["seconds"]
    note("measuring what a step of every row costs.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.randint(recipe.vocabulary, (recipe.batch, recipe.context), device=device)

    def step(row: str) -> Step:
        config = model_config(language, row_fields(row, recipe.prior), recipe.vocabulary)
        model = convolve(build_model(config, recipe.seed), row).to(device)
        optimiser = torch.optim.AdamW(model.parameters())
        return lambda: descend(model(ids, labels=ids).loss, optimiser)

    seconds = alternate({row: step(row) for row in recipe.row_names()}, SECONDS, device)
    (output / RUNS).mkdir(parents=True, exist_ok=True)  # by which the folder is known for this comparison's
    write_json(output / COSTS, {"model": model, "seconds": seconds})
    return seconds


def steps_of(row: str, steps: int, seconds: Mapping[str, float]) -> int:
    """Steps of a row in the time that the fastest takes for `steps`."""
    return max(1, round(steps * min(seconds.values()) / seconds[row]))


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that decides the result of one training."""

    row: str
    mixer: dict
    language: LanguageRecipe
    text: str  # a digest of its tokens

    @property
    def key(self) -> str:
        digest = digest_of(asdict(self))
        return f"{self.row.replace('/', '_')}-lr{self.language.learning_rate:g}-seed{self.language.seed}-{digest}"


@dataclass(frozen=True)
class Ablation:
    """The records of every row: by learning rate on the first seed, and by seed at the best learning rate."""

    prior: str
    tuning: dict[str, dict[float, dict]]
    chosen: dict[str, list[dict]]
    seconds: dict[str, float]  # of a step, where all rows train for equal time; else empty

    def name(self, row: str) -> str:
        return display(mixer_name(row, self.prior))

    def best(self, row: str) -> float:
        return smallest({rate: record["val_loss"] for rate, record in self.tuning[row].items()})

    def table(self) -> list[dict]:
        """Validation loss in nats per token, and by how much it is below the prior's and the outer gate's."""
        rows = []
        for row, records in self.chosen.items():
            losses = self._losses(row)
            rows.append(
                {
                    "mixer": self.name(row),
                    "what": remark(row),
                    "loss": mean(losses),
                    "sd": spread(losses),
                    **{
                        f"below {self.name(other)}, paired": shown(self._losses(other), losses) if other != row else ""
                        for other in (PLAIN, GATED)
                        if other in self.chosen
                    },
                    "by seed": by_seed(losses),
                    **(self._time(row) if self.seconds else {}),
                    "learning rate": f"{self.best(row):g}",
                    "parameters": records[0]["parameters"],
                    "tokens/s": round(mean(record["tokens_per_second"] for record in records)),
                }
            )
        return rows

    def _time(self, row: str) -> dict:
        return {"steps": self.chosen[row][0]["job"]["language"]["steps"], "ms a step": round(1e3 * self.seconds[row])}

    def _losses(self, row: str) -> list[float]:
        return [record["val_loss"] for record in self.chosen[row]]

    def summary(self) -> dict[str, dict]:
        """Every loss of every row, by seed and by learning rate; and what a step takes, where it was measured."""
        return {
            self.name(row): {
                "loss": self._losses(row),
                "learning_rate": self.best(row),
                "validation_by_rate": {f"{rate:g}": record["val_loss"] for rate, record in self.tuning[row].items()},
                "steps": records[0]["job"]["language"]["steps"],
                "ms": 1e3 * self.seconds[row] if self.seconds else None,
                "parameters": records[0]["parameters"],
                "tokens_per_second": mean(record["tokens_per_second"] for record in records),
            }
            for row, records in self.chosen.items()
        }

    def tuning_table(self) -> list[dict]:
        """A line per row of the ablation, a column per learning rate."""
        return [
            {"mixer": self.name(row)} | {f"{rate:g}": record["val_loss"] for rate, record in records.items()}
            for row, records in self.tuning.items()
        ]


def run(recipe: AblateRecipe, output: Path) -> dict:
    """The ablation, written to `output`; trainings with a record there do not run again."""
    check_output(output, "ablate", recipe)
    for row in recipe.row_names():  # an error here comes before the text is read
        model_config(recipe.language(recipe.rates()[0], recipe.seed), row_fields(row, recipe.prior), recipe.vocabulary)
    with cpu_threads(recipe.threads), progress() as bars:
        corpus = build_corpus(recipe.text, recipe.vocabulary, recipe.context)
        text = hashlib.blake2b(corpus.train["input_ids"][:].numpy(), digest_size=8).hexdigest()
        seconds = step_seconds(recipe, output) if recipe.equal_time else {}

        def job(row: str, rate: float, seed: int) -> Job:
            mixer = {"lambda_init": 0.0} | row_fields(row, recipe.prior)  # named, as in the keys of earlier records
            language = recipe.language(rate, seed)
            if seconds:
                language = replace(language, steps=steps_of(row, recipe.steps, seconds))
            return Job(row=row, mixer=mixer, language=language, text=text)

        train_all = partial(one_by_one, train=lambda job, checkpoints: train_job(job, corpus, bars, checkpoints))
        grid, seeds = Grid(output / RUNS, train_all, bars, "trainings"), range(recipe.seed, recipe.seed + recipe.seeds)
        tuned = grid.tuned(recipe.row_names(), recipe.rates(), seeds, job, itemgetter("val_loss"))
    ablation = Ablation(recipe.prior, *tuned, seconds)
    table = ablation.table()
    return publish(
        output,
        "ablate",
        recipe,
        (record for records in ablation.chosen.values() for record in records),
        ("row", "learning_rate", "seed"),
        tables={"table": table, "learning_rates": ablation.tuning_table()},
        page=lambda folder: page(folder, ablation, recipe),
        results={
            "ablate": ablation.summary(),
            "curves": {
                ablation.name(row): [[as_drawn(point) for point in record["curve"]] for record in records]
                for row, records in ablation.chosen.items()
            },
        },
        draw=curves,
        shown=(
            f"Validation loss, {recipe.prior} prior, equal parameters",
            [{name: value for name, value in row.items() if name not in ON_THE_PAGE_ALONE} for row in table],
        ),
    )


def as_drawn(point: Mapping) -> dict:
    """A point of a curve by the names of the record."""
    return {"step": point["step"], "tokens": point["tokens"], "loss": point["val_loss"]}


def train_job(job: Job, corpus: Corpus, bars: Progress, place: Path) -> dict:
    """Train, with checkpoints in `place`; returns {"job", "val_loss", "parameters", "tokens_per_second", "curve"}."""
    recipe = job.language
    mixer = display(mixer_name(job.row, job.mixer["prior_type"]))
    model = convolve(build_model(model_config(recipe, job.mixer, len(corpus.tokenizer)), recipe.seed), job.row)
    found = train(model, corpus, recipe, bars, f"{mixer}, rate {recipe.learning_rate:g}, seed {recipe.seed}", place)
    step = recipe.batch * recipe.context
    curve = [{"step": x["step"], "tokens": x["step"] * step, "val_loss": x["val_loss"]} for x in found["curve"]]
    return {"job": asdict(job), **found, "curve": curve}


def page(folder: Path, ablation: Ablation, recipe: AblateRecipe) -> None:
    tokens = recipe.steps * recipe.batch * recipe.context
    parameters = next(iter(ablation.chosen.values()))[0]["parameters"]
    write_page(
        folder,
        f"The parts of FEM in a language model: {recipe.prior} prior, {parameters / 1e6:.2f}M parameters, "
        f"{tokens / 1e6:.1f}M tokens{', equal time' if recipe.equal_time else ''}",
        f"Blocks: {recipe.layers}, of width {recipe.width}; heads: {recipe.heads}; {recipe.steps} steps of "
        f"{recipe.batch} x {recipe.context} tokens of {source_name(recipe.text)}, "
        f"byte-pair vocabulary of {recipe.vocabulary}. {KEY} All rows have "
        f"{'the same parameters within 1 %' if recipe.mlp == 'narrowed' else 'the same SwiGLU'}, the same "
        "initialisation, and per seed the same rows of text in the same order; each has the best "
        "of the learning rates on the first seed. /r8: gates of rank 8, whose width goes to the values. Loss: "
        "validation, nats per token after the last step, mean over seeds; sd: over seeds; below ..., paired: the "
        "difference from that row on the same "
        "seeds, ± its standard error. "
        f"{tokens:,} tokens a training{' of the fastest row' if recipe.equal_time else ''}, about "
        f"{6.0 * parameters * tokens:.2g} floating-point operations (6 a parameter and token)."
        + (EQUAL_TIME if recipe.equal_time else ""),
        markdown_table(ablation.table(), {"loss": min}),
        "![last validation loss of every row, a dot per seed](scores.png)",
        "![validation loss over steps, a line per seed](curves.png)",
        "## Learning rates",
        f"Seed {recipe.seed}, validation loss after the last step.",
        markdown_table(ablation.tuning_table()),
        provenance(command_line("ablate", recipe, AblateRecipe())),
    )


def curves(results: Mapping, folder: Path) -> None:
    """curves.png: the validation loss of every row over the steps, a line per seed."""
    title, panel = "Validation loss over steps: a line per seed", ("nats per token", "step", "step", "loss")
    pictures.curves(folder / "curves.png", title, results["curves"], [panel], logarithmic=True)
