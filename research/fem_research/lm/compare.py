"""Language models of equal size, side by side: same data in the same order, same seeds, different mixers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from rich.progress import Progress

from fem.models import FEMForCausalLM
from fem.plots import Panel, learning_curves
from fem.runs.run import Run, steps_bar
from fem.train.model import build_model
from fem.train.watch import Score
from fem_research.common.names import by_name, colours, display
from fem_research.common.paired import spread
from fem_research.lm.small import LanguageRecipe, model_config, train
from fem_research.lm.text import Corpus


@dataclass(frozen=True)
class Comparison:
    """Results and curves of every mixer in the order of the seeds, and its model of the first seed."""

    results: dict[str, list[Score]]
    curves: dict[str, list[list[Score]]]
    models: dict[str, FEMForCausalLM]

    def scores(self) -> dict[str, dict]:
        """Means over the seeds, and every seed's validation loss."""
        return {
            name: {metric: mean(seed[metric] for seed in seeds) for metric in ("val_loss", "tokens_per_second")}
            | {"parameters": int(seeds[0]["parameters"]), "val_losses": [seed["val_loss"] for seed in seeds]}
            for name, seeds in self.results.items()
        }

    def rows(self, bytes_per_token: float) -> list[dict]:
        """A table: validation loss in nats per token, its standard deviation over seeds, and in bits per byte."""
        return [
            {
                "mixer": display(name),
                "loss": score["val_loss"],
                "sd": spread(score["val_losses"]),
                "seeds": len(score["val_losses"]),
                "bits/byte": score["val_loss"] / math.log(2) / bytes_per_token,
                "parameters": score["parameters"],
                "tokens/s": score["tokens_per_second"],
            }
            for name, score in self.scores().items()
        ]


def redraw(results: Mapping, path: Path) -> None:
    """Validation loss over steps and over training time, a line per seed, from what results.json holds."""
    curves = results["lm_curves"]

    def lines(x: str) -> dict:
        return {
            name: [([point[x] for point in curve], [point["val_loss"] for point in curve]) for curve in seeds]
            for name, seeds in by_name(curves).items()
        }

    panels = [
        Panel("validation loss (nats per token)", "step", lines("step")),
        Panel("the same over time", "seconds of training on this machine", lines("seconds")),
    ]
    learning_curves(path, "Language models of equal size", panels, colours(curves))


def compare(
    mixers: Mapping[str, dict], recipe: LanguageRecipe, seeds: Sequence[int], corpus: Corpus, run: Run, bars: Progress
) -> Comparison:
    """Train a model of every mixer with every seed; measurements are appended to the run's metrics.jsonl."""
    comparison = Comparison({name: [] for name in mixers}, {name: [] for name in mixers}, {})
    for seed in seeds:
        for name, mixer in mixers.items():
            seeded = replace(recipe, seed=seed)
            model = build_model(model_config(seeded, mixer, len(corpus.tokenizer)), seed)
            curve: list[Score] = []
            shown = f"language model: {display(name)}" + (f", seed {seed}" if len(seeds) > 1 else "")
            _, advance = steps_bar(bars, shown, recipe.steps)

            def log(metrics, name=name, seed=seed, curve=curve):
                run.log(experiment="lm", model=name, seed=seed, **metrics)
                if "val_loss" in metrics:
                    curve.append(metrics)

            comparison.results[name].append(train(model, corpus, seeded, log, advance))
            comparison.curves[name].append(curve)
            comparison.models.setdefault(name, model)
    return comparison
