"""`fem argmax`: can one read fetch every channel's maximum? Appendix P's task, and one that no constant solves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from rich.progress import Progress
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.functional import softmax_read
from fem.gates import Temperature, TwoLevelGate
from fem.projection import Projection
from fem.provenance import provenance
from fem.tables import markdown_table, show_table
from fem.theory import index_accuracy
from fem_research.argmax.settings import ArgmaxRecipe
from fem_research.common import pictures
from fem_research.common.blocks import count_parameters
from fem_research.common.loops import descend
from fem_research.common.measure import cpu_threads
from fem_research.common.names import display
from fem_research.common.paired import by_seed
from fem_research.runs.run import Run, command_line, open_run, progress
from fem_research.runs.tables import write_page, write_table

MARGIN, NOISE = 1.0, 0.05
WIDTHS = (0.25, 2.0)
SPLITS = ("train", "validation", "test")
METRICS = ("mse", "error", "index_accuracy", "hits")

Score = dict[str, int | float]
Curves = dict[str, list[list[Score]]]  # by reader, then by seed


class Examples(NamedTuple):
    """values V (B, T, D) and the token that wins each channel (B, D)."""

    values: Float[Tensor, "b t d"]
    winner: Int[Tensor, "b d"]

    @property
    def target(self) -> Float[Tensor, "b d"]:
        return self.values.amax(1)


def draw(recipe: ArgmaxRecipe, split: str, number: int, size: int) -> Examples:
    """Batch `number` of a split, with `size` examples; every call draws the same.

    spread: V_ij = c_j + s_j n_ij,   V_{a_j j} = c_j + 2 s_j,   c_j ~ N(0, 1),   n_ij uniform in [-1, 1], log s_j
            uniform in [log .25, log 2], a_j uniform; c and s are new in every example, so the winner's value varies
            as much as any other, and so does its distance from the mean
    paper:  V_ij ~ N(0, 0.05^2),   V_{a_j j} = 1 + eps_j, eps_j ~ N(0, 0.05^2),   a_j uniform           (Appendix P)
    """
    stream = np.random.default_rng([recipe.seed, SPLITS.index(split), number])
    shape = (size, recipe.tokens, recipe.channels)
    winner = torch.from_numpy(stream.integers(recipe.tokens, size=(size, recipe.channels)))
    if recipe.form == "spread":
        low, high = map(math.log, WIDTHS)
        level = stream.standard_normal((size, 1, recipe.channels), dtype=np.float32)
        width = np.exp(low + (high - low) * stream.random((size, 1, recipe.channels), dtype=np.float32))
        position = torch.from_numpy(2 * stream.random(shape, dtype=np.float32) - 1).scatter_(1, winner[:, None], 2.0)
        return Examples(torch.from_numpy(level) + torch.from_numpy(width) * position, winner)
    noise = torch.from_numpy(stream.standard_normal(shape, dtype=np.float32))
    return Examples((NOISE * noise).scatter_add_(1, winner[:, None], torch.full(winner[:, None].shape, MARGIN)), winner)


class Reader(nn.Module):
    """The last token's read of raw values: V (B, T, D) -> y (B, D); the values are neither projected nor gated.

        y_j = (1 - lambda_j) mean_j + lambda_j F_j        under p = softmax(q_T . k_i / sqrt(d_k)), q, k learnt from V

    Without free energy the read is only the mean: softmax attention. Its queries and keys are wider, so that both
    readers have as many parameters, or, with same="prior", as wide as FEM's.
    """

    def __init__(self, channels: int, heads: int, free_energy: bool, same: str = "parameters"):
        super().__init__()
        parts = {"use_temperature": free_energy, "use_lse": free_energy, "use_outer_gate": False, "use_conv": False}
        config = FreeEnergyMixerConfig(n_embd=channels, n_head=heads, fem_dim=channels, **parts)
        self.heads = heads
        wider = heads * round((3 * channels + 4) * channels / (2 * channels + 2) / heads)
        width = channels if free_energy or same == "prior" else wider
        self.query = Projection(channels, width)
        self.key = Projection(channels, width)
        self.beta = Temperature(config, (heads, config.value_width)) if free_energy else None
        self.gate = TwoLevelGate(config)

    def forward(self, values: Float[Tensor, "b t d"]) -> Float[Tensor, "b d"]:
        last = values[:, -1:]
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (self.query(last), self.key(values), values))
        read = softmax_read(q, k, v, None if self.beta is None else self.beta())
        return self.gate(last, read).flatten(1)


def train(recipe: ArgmaxRecipe, free_energy: bool, device: torch.device) -> Iterator[Score]:
    """Train one reader; yields step and `METRICS` of every validation, and at last those of the test."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        reader = Reader(recipe.channels, recipe.heads, free_energy, recipe.same).to(device)
    optimiser = torch.optim.AdamW(reader.parameters(), lr=recipe.learning_rate)
    batches = recipe.train_examples // recipe.batch
    for step in range(recipe.steps + 1):
        if step % recipe.eval_every == 0 or step == recipe.steps:
            score = {"step": step, **evaluate(reader, recipe, "validation", device)}
            if score["hits"] >= recipe.enough or step == recipe.steps:
                held_out = evaluate(reader, recipe, "test", device)
                yield score | {f"test_{name}": value for name, value in held_out.items()}
                return
            yield score
        batch = draw(recipe, "train", step % batches, recipe.batch)
        loss = F.mse_loss(reader(batch.values.to(device)), batch.target.to(device))
        descend(loss, optimiser)


Predict = Callable[[Tensor], Tensor]


@torch.no_grad()
def evaluate(predict: Predict, recipe: ArgmaxRecipe, split: str, device: torch.device) -> Score:
    """Scores over all examples of a split.

    mse: mean squared error. error: mse over the variance of the targets, 1 for the best constant. index_accuracy: the
    share of channels whose nearest value is the winner, where too large an answer counts as right. hits: the share of
    answers within half the distance between the two largest values.
    """
    total = recipe.validation_examples if split == "validation" else recipe.test_examples
    predictions, targets, gaps, accuracy = [], [], [], 0.0
    for number, first in enumerate(range(0, total, recipe.batch)):
        size = min(recipe.batch, total - first)
        examples = Examples(*(tensor.to(device) for tensor in draw(recipe, split, number, size)))
        predictions.append(predict(examples.values))
        targets.append(examples.target)
        gaps.append(-examples.values.topk(2, 1).values.diff(dim=1)[:, 0])
        accuracy += size / total * index_accuracy(predictions[-1], *examples).item()
    said, wanted = torch.cat(predictions).double(), torch.cat(targets).double()
    mse = (said - wanted).square().mean().item()
    hits = ((said - wanted).abs() <= torch.cat(gaps) / 2).double().mean().item()
    return {"mse": mse, "error": mse / wanted.var(correction=0).item(), "index_accuracy": accuracy, "hits": hits}


def baselines(recipe: ArgmaxRecipe) -> dict[str, Score]:
    """The scores of three predictors without training, a constant and means, which a reader has to beat."""
    batches = range(min(8, recipe.train_examples // recipe.batch))
    seen = [draw(recipe, "train", number, recipe.batch) for number in batches]
    target, mean = torch.cat([of.target for of in seen]), torch.cat([of.values.mean(1) for of in seen])
    level, distance = target.mean(), (target - mean).mean()
    predictors: dict[str, Predict] = {
        "the best constant": lambda values: level.expand(len(values), values.shape[-1]),
        "each channel's mean": lambda values: values.mean(1),
        "its mean and the best constant": lambda values: values.mean(1) + distance,
    }
    return {name: evaluate(predict, recipe, "test", torch.device("cpu")) for name, predict in predictors.items()}


def compare(recipe: ArgmaxRecipe, run: Run, bars: Progress) -> Curves:
    """Train FEM and softmax attention on the task; every validation of both by name, which the run logs too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    curves: Curves = {"fem": [], "softmax": []}
    for seed in range(recipe.seed, recipe.seed + recipe.seeds):
        for name, seeds in curves.items():
            bar = bars.add_task(f"argmax: {display(name)}, seed {seed}", total=recipe.steps)
            seeds.append([])
            for score in train(replace(recipe, seed=seed), name == "fem", device):
                seeds[-1].append(score)
                run.log(experiment="argmax", model=name, seed=seed, **score)
                shown = f"argmax: {display(name)}, seed {seed}, hits {score['hits']:.1%}"
                bars.update(bar, completed=score["step"], description=shown)
            bars.update(bar, total=seeds[-1][-1]["step"])
    return curves


def scores(curves: Curves) -> dict[str, dict]:
    """The test scores of every reader, a figure per seed, and the steps of its training."""
    return {
        name: {metric: [curve[-1][f"test_{metric}"] for curve in seeds] for metric in METRICS}
        | {"steps": [curve[-1]["step"] for curve in seeds]}
        for name, seeds in curves.items()
    }


def rows(curves: Curves, recipe: ArgmaxRecipe, untrained: Mapping[str, Score]) -> list[dict]:
    """The readers and the untrained predictors (`baselines`), on the test."""

    def row(name: str, score: Mapping[str, float], hits: str, parameters: int | None, steps: str) -> dict:
        line = {"read": name, "hits": f"{score['hits']:.1%}", "by seed": hits, "error": score["error"]}
        line |= {"MSE": score["mse"], "index accuracy": f"{score['index_accuracy']:.1%}"}
        return line | {"parameters": parameters, "steps": steps}

    lines = []
    for name, score in scores(curves).items():
        with torch.device("meta"):
            parameters = count_parameters(Reader(recipe.channels, recipe.heads, name == "fem", recipe.same))
        means = {metric: mean(score[metric]) for metric in METRICS}
        lines.append(row(display(name), means, by_seed(score["hits"], ".1%"), parameters, by_seed(score["steps"], ",")))
    return lines + [row(name, score, "", None, "") for name, score in untrained.items()]


def draw_curves(path: Path, curves: Curves, recipe: ArgmaxRecipe) -> None:
    """Error and hits over steps, or Figure 3 of the paper's form: the MSE and the index accuracy."""
    ours = [("validation error (1: a constant)", "step", "step", "error"), ("hits", "step", "step", "hits")]
    figure3 = [("validation MSE", "step", "step", "mse"), ("index accuracy", "step", "step", "index_accuracy")]
    title = "Every channel's maximum in one read: T = {tokens}, D = {channels}, heads: {heads}".format(**asdict(recipe))
    pictures.curves(path, title, curves, figure3 if recipe.form == "paper" else ours)


def ended(curves: Curves, recipe: ArgmaxRecipe) -> str:
    """The sentences that say where the lines of the picture end, and why."""
    if recipe.enough > 1:
        return "Every reader takes all steps."
    ends = {name: [seed[-1]["step"] for seed in seeds] for name, seeds in curves.items()}
    early = {name: [f"{step:,}" for step in steps if step < recipe.steps] for name, steps in ends.items()}
    said = [f"{display(name)} after {', '.join(steps)}" for name, steps in early.items() if steps]
    rule = f"A reader stops when it hits {recipe.enough:.1%} of the channels of the validation: it has converged"
    return f"{rule}, so its line ends there ({'; '.join(said)} steps)." if said else f"{rule}; here none did."


ABOUT = {
    "spread": "Levels and widths of the channels are drawn anew in every example, so the largest value is spread as "
    "wide as all others, and so is its distance from the mean: neither a constant nor a mean with a bias finds it.",
    "paper": "As in Appendix P all winners are 1 +- .05 and all others 0 +- .05, so **the constant 1 finds every "
    "winner**: this form tells whether a reader can say 1, not whether it can choose. Paper (T = 128, D = 512): FEM "
    "about 100 %, softmax 1-2 %.",
}

COMMON = {
    "parameters": "as many parameters as widths that these divide allow",
    "prior": "queries and keys as wide as the values; FEM's temperatures come on top",
}


def run(recipe: ArgmaxRecipe, output: Path) -> dict:
    """The experiment, written to `output`; returns what results.json holds."""
    with cpu_threads(recipe.threads), open_run(output, "argmax", recipe) as under_way:
        with progress() as bars:
            curves = compare(recipe, under_way, bars)
        untrained = baselines(recipe)
        table = rows(curves, recipe, untrained)
        write_table(under_way.folder, "table", table)
        write_page(
            under_way.folder,
            "Every channel's maximum in one read" + (": the paper's form" if recipe.form == "paper" else ""),
            f"{recipe.tokens} tokens of {recipe.channels} channels; in each channel the largest value is to be read. "
            + ABOUT[recipe.form],
            "Hits: the share of channels read within half the distance of the two largest values. Error: mean squared "
            "error over the variance of the winners, 1 for the best constant. Index accuracy, the paper's: the share "
            "whose nearest value is the winner; too large an answer counts as right, so 100 everywhere has 100 %. "
            "Scored on examples that neither trained a reader nor decided when it stopped, mean over seeds. Both "
            f"readers have the same heads ({recipe.heads}), and {COMMON[recipe.same]}.",
            markdown_table(table, {"hits": max, "error": min}),
            "![how both readers do over the steps of their training](argmax.png)",
            ended(curves, recipe),
            provenance(command_line("argmax", recipe, ArgmaxRecipe)),
        )
        draw_curves(under_way.folder / "argmax.png", curves, recipe)
        results = under_way.finish({"argmax": scores(curves), "baselines": untrained, "curves": curves})
    show_table("Every channel's maximum in one read", table)
    return results
