"""Appendix P: can one read fetch every channel's maximum, each from a token of its own?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from jaxtyping import Float, Int
from rich.progress import Progress
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.experiments.common.options import recipe_options
from fem.experiments.common.run import Run, command_line, cpu_threads, open_run, option, progress, provenance
from fem.experiments.common.tables import markdown_table, show_table, write_page, write_table
from fem.functional import softmax_read
from fem.gates import Temperature, TwoLevelGate
from fem.projection import Projection
from fem.theory import index_accuracy

MARGIN, NOISE = 1.0, 0.05
PAPER = {"fem": "about 100 %", "softmax": "1-2 %"}
SPLITS = ("train", "validation")

Score = dict[str, int | float]
Curves = dict[str, list[Score]]


@dataclass(frozen=True, kw_only=True)
class ArgmaxRecipe:
    """The task's size and how the readers are trained. The defaults take well under two minutes on two cores."""

    tokens: int = option(64, "Tokens T of an example.")
    channels: int = option(64, "Channels D of an example.")
    heads: int = option(4, "Heads of both readers.")
    train_examples: int = option(200_000, "Training examples.")
    validation_examples: int = option(2_000, "Validation examples.")
    batch: int = option(64, "Examples a step.")
    steps: int = option(4_000, "Most optimiser steps of each reader.")
    enough: float = option(0.999, "Stop a reader at this validation index accuracy.")
    learning_rate: float = option(1e-2, "Learning rate of AdamW.")
    eval_every: int = option(100, "Steps between two validations.")
    seed: int = option(0, "Seed of the data and of both readers.")
    threads: int = option(1, "CPU threads; more help where the machine is idle, and hurt where it is busy.")

    def __post_init__(self):
        for name, value in asdict(self).items():
            if name not in ("enough", "seed") and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if self.channels % self.heads:
            raise ValueError(f"heads must divide channels = {self.channels}, got heads = {self.heads}.")
        if self.train_examples < self.batch:
            raise ValueError(f"train_examples must fill one batch of {self.batch}, got {self.train_examples}.")


SMALL = ArgmaxRecipe()
FULL = ArgmaxRecipe(tokens=128, channels=512, steps=2_000)


class Examples(NamedTuple):
    """values V (B, T, D) and the token that wins each channel (B, D)."""

    values: Float[Tensor, "b t d"]
    winner: Int[Tensor, "b d"]

    @property
    def target(self) -> Float[Tensor, "b d"]:
        return self.values.amax(1)


def draw(recipe: ArgmaxRecipe, split: str, number: int, size: int) -> Examples:
    """Batch `number` of a split, of `size` examples: the same at every call.

    V_ij ~ N(0, 0.05^2),        V_{a_j j} = 1 + eps_j, eps_j ~ N(0, 0.05^2),        a_j uniform         (Appendix P)
    """
    stream = np.random.default_rng([recipe.seed, SPLITS.index(split), number])
    winner = torch.from_numpy(stream.integers(recipe.tokens, size=(size, recipe.channels)))
    noise = torch.from_numpy(stream.standard_normal((size, recipe.tokens, recipe.channels), dtype=np.float32))
    return Examples((NOISE * noise).scatter_add_(1, winner[:, None], torch.full(winner[:, None].shape, MARGIN)), winner)


class Reader(nn.Module):
    """The last token's read of raw values: V (B, T, D) -> y (B, D), the values themselves neither projected nor gated.

        y_j = (1 - lambda_j) mean_j + lambda_j F_j        under p = softmax(q_T . k_i / sqrt(d_k)), q, k learnt from V

    Without free energy the read is the mean alone: softmax attention.
    """

    def __init__(self, channels: int, heads: int, free_energy: bool):
        super().__init__()
        config = FreeEnergyMixerConfig(
            n_embd=channels,
            n_head=heads,
            fem_dim=channels,
            use_temperature=free_energy,
            use_lse=free_energy,
            use_outer_gate=False,
            use_conv=False,
        )
        self.heads = heads
        self.query = Projection(channels, channels)
        self.key = Projection(channels, channels)
        self.beta = Temperature(config, (heads, config.value_width)) if free_energy else None
        self.gate = TwoLevelGate(config)

    def forward(self, values: Float[Tensor, "b t d"]) -> Float[Tensor, "b d"]:
        last = values[:, -1:]
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (self.query(last), self.key(values), values))
        read = softmax_read(q, k, v, None if self.beta is None else self.beta())
        return self.gate(last, read).flatten(1)


def train(recipe: ArgmaxRecipe, free_energy: bool, device: torch.device) -> Iterator[Score]:
    """Train one reader; yields {"step", "mse", "index_accuracy"} of every validation, step 0 and the last included."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        reader = Reader(recipe.channels, recipe.heads, free_energy).to(device)
    optimiser = torch.optim.AdamW(reader.parameters(), lr=recipe.learning_rate)
    batches = recipe.train_examples // recipe.batch
    for step in range(recipe.steps + 1):
        if step % recipe.eval_every == 0 or step == recipe.steps:
            score = {"step": step, **validate(reader, recipe, device)}
            yield score
            if score["index_accuracy"] >= recipe.enough:
                return
        if step < recipe.steps:
            batch = draw(recipe, "train", step % batches, recipe.batch)
            loss = F.mse_loss(reader(batch.values.to(device)), batch.target.to(device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


@torch.no_grad()
def validate(reader: Reader, recipe: ArgmaxRecipe, device: torch.device) -> Score:
    """Mean squared error and index accuracy over the validation set."""
    mse = accuracy = 0.0
    for number, first in enumerate(range(0, recipe.validation_examples, recipe.batch)):
        size = min(recipe.batch, recipe.validation_examples - first)
        examples = Examples(*(tensor.to(device) for tensor in draw(recipe, "validation", number, size)))
        prediction = reader(examples.values)
        share = size / recipe.validation_examples
        mse += share * F.mse_loss(prediction, examples.target).item()
        accuracy += share * index_accuracy(prediction, *examples).item()
    return {"mse": mse, "index_accuracy": accuracy}


def compare(recipe: ArgmaxRecipe, run: Run, bars: Progress) -> Curves:
    """Train FEM and softmax attention on the task; every validation of both, by name, logged to the run as well."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    curves: Curves = {}
    for name in ("fem", "softmax"):
        bar = bars.add_task(f"argmax: {name}", total=recipe.steps)
        curves[name] = []
        for score in train(recipe, name == "fem", device):
            curves[name].append(score)
            run.log(experiment="argmax", model=name, **score)
            shown = f"argmax: {name}, index accuracy {score['index_accuracy']:.1%}"
            bars.update(bar, completed=score["step"], description=shown)
        bars.update(bar, total=curves[name][-1]["step"])
    return curves


def scores(curves: Curves) -> dict[str, Score]:
    """The last validation of each reader."""
    return {name: dict(curve[-1]) for name, curve in curves.items()}


def rows(curves: Curves) -> list[dict]:
    return [
        {
            "read": name,
            "index accuracy": f"{score['index_accuracy']:.1%}",
            "MSE": score["mse"],
            "steps": score["step"],
            "paper (T=128, D=512)": PAPER[name],
        }
        for name, score in scores(curves).items()
    ]


def plot(curves: Curves, recipe: ArgmaxRecipe, path: Path) -> None:
    """MSE and index accuracy over steps, as Figure 3."""
    from fem.plots import Panel, learning_curves

    series = lambda metric: {  # noqa: E731
        name: ([score["step"] for score in curve], [score[metric] for score in curve]) for name, curve in curves.items()
    }
    chance = 1 / recipe.tokens
    learning_curves(
        path,
        f"Every channel's maximum in one read: T = {recipe.tokens}, D = {recipe.channels}, {recipe.heads} heads",
        [
            Panel("validation MSE", "step", series("mse")),
            Panel("index accuracy", "step", series("index_accuracy"), level=chance, level_name="guessing"),
        ],
    )


def run(recipe: ArgmaxRecipe, output: Path) -> dict:
    """The experiment, written to `output`; returns what results.json holds."""
    with cpu_threads(recipe.threads), open_run(output, "argmax", recipe) as under_way:
        with progress() as bars:
            curves = compare(recipe, under_way, bars)
        write_table(under_way.folder, "table", rows(curves))
        plot(curves, recipe, under_way.folder / "argmax.png")
        write_page(
            under_way.folder,
            "Every channel's maximum in one read",
            f"{recipe.tokens} tokens of {recipe.channels} channels; in each channel the largest value is to be read "
            "(Appendix P). Index accuracy: the share of channels whose nearest value is the winner.",
            markdown_table(rows(curves)),
            "![validation error and index accuracy over steps](argmax.png)",
            provenance(command_line("argmax", recipe, SMALL)),
        )
        results = under_way.finish(scores(curves))
    show_table("Channel-wise argmax (Appendix P)", rows(curves))
    return results


@recipe_options(SMALL)
def command(
    changes: dict,
    full: Annotated[bool, typer.Option("--full", help="The paper's size: T=128, D=512, 2000 steps.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/argmax"),
):
    """Can one read fetch every channel's maximum? FEM against softmax attention (Appendix P)."""
    run(replace(FULL if full else SMALL, **changes), output)
    typer.echo(f"written to {output}")
