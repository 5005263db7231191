"""The commands of the experiments, which the entry-point group `fem.commands` adds to `fem`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, NamedTuple

HELP = {
    "demo": "What FEM does, in minutes: two language models on real text, and a look inside.",
    "finetune": "Train a small GPT-2 or Llama further, as it is and turned into FEM.",
    "eval": "Score a language model with lm-evaluation-harness. (Table 2)",
    "ablate": "What each part of FEM adds to a language model, with controls.",
    "argmax": "Can one read fetch every channel's maximum? (Appendix P)",
    "regimes": "Tasks that separate reading one mixture from reading per channel.",
    "natural": "Pool sets and series that have natural labels.",
    "mad": "Six synthetic tasks that probe a sequence mixer. (Table 1)",
    "forecast": "Forecast time series at equal parameters. (Table 4)",
    "vision": "Classify images at equal parameters. (Table 3)",
    "bench": "Time and memory beside attention of equal weights. (Tables 5 and 7)",
    "plan": "What a training costs before it runs: memory, messages, predicted time.",
    "report": "Add finished runs to the record, and draw its pages again.",
}
# The same command resumes a stopped run.
RESUMABLE = ("ablate", "mad", "regimes", "natural", "forecast", "vision")


class Experiment(NamedTuple):
    """Where an experiment is: recipe and `run`; its further options, how its folder ends, what is said at last."""

    recipe: str
    run: str
    options: tuple[str, ...] = ()
    suffix: str = ""
    ends: str = "written to {0}"


DEMO = """
Look:  {0}/report.md: first of all the word that each channel reads.
Next:  fem inspect --model {0}/model --text "A list is a sequence.\""""
EXPERIMENTS = {
    "demo": Experiment("demo.settings.DemoRecipe", "demo.experiment", ends=DEMO),
    "finetune": Experiment("lm.settings.FinetuneRecipe", "lm.finetune", suffix="-{architecture}"),
    "ablate": Experiment("lm.settings.AblateRecipe", "lm.ablate", suffix="-{prior}"),
    "argmax": Experiment("argmax.settings.ArgmaxRecipe", "argmax.experiment", ("paper",)),
    "regimes": Experiment("regimes.settings.RegimesRecipe", "regimes.experiment", ("workers",)),
    "natural": Experiment("natural.settings.NaturalRecipe", "natural.experiment", ("workers",)),
    "mad": Experiment("mad.settings.MADRecipe", "mad.experiment", ("workers",), "-{profile}"),
    "forecast": Experiment("forecast.settings.ForecastRecipe", "forecast.experiment", ("profile",), "-{profile}"),
    "vision": Experiment("vision.settings.VisionRecipe", "vision.experiment", ("profile",), "-{profile}"),
    "bench": Experiment("bench.cases.BenchRecipe", "bench.experiment"),
}


def command(name: str) -> Callable:
    """The function behind `fem NAME`, which imports the experiment's `run` only when it is called."""
    if name not in EXPERIMENTS:
        return import_module(f"{__name__}.{name}").command
    import typer

    from fem.commands.options import recipe_options
    from fem.recipes import require_one_of

    recipe, run, further, suffix, ends = EXPERIMENTS[name]
    module, _, recipe = f"fem_research.{recipe}".rpartition(".")
    settings = import_module(module)
    profiles = getattr(settings, "PROFILES", {})

    def start(changes: dict, output: Path | None, paper: bool | None = None, **options) -> None:
        fixed = settings.PAPER if paper else {}
        if "profile" in further:
            options["profile"] = options["profile"] or next(iter(profiles))
            require_one_of("profile", options["profile"], profiles)
            fixed = profiles[options["profile"]]
        made = getattr(settings, recipe)(**fixed | changes)
        folder = output or Path(f"runs/{name}{suffix.format(**vars(made) | options)}")
        import_module(f"fem_research.{run}").run(made, folder, *options.values())
        typer.echo(ends.format(folder))

    options = {
        "output": (Path | None, typer.Option(help=f"Folder of the run; default: runs/{name}{suffix}.")),
        "workers": (int | None, typer.Option(min=1, help="Runs at a time; default: one per core, or four per GPU.")),
        "profile": (str | None, typer.Option(help=f"Defaults of all other options: {', '.join(profiles)}.")),
        "paper": (bool, typer.Option("--paper", help="Appendix P as the paper has it: its form, size and training.")),
    }
    keyword = lambda key, kind: Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind])  # noqa: E731
    parameters = [keyword(key, options[key]) for key in ("output", *further)]
    start.__signature__ = Signature([Parameter("changes", Parameter.POSITIONAL_OR_KEYWORD), *parameters])
    start.__name__, start.__doc__ = name, HELP[name]
    if name in RESUMABLE:
        start.__doc__ += " The same command resumes a stopped run."
    return recipe_options(getattr(settings, recipe))(start)
