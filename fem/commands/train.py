"""`fem train`: a language model from a recipe, on one process or many."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fem.commands.options import recipe_options
from fem.recipes import require_one_of
from fem.train.recipe import RECIPES, TrainRecipe


@recipe_options(TrainRecipe)
def command(
    changes: dict,
    recipe: Annotated[str, typer.Option(help=f"Defaults of all other options: {', '.join(RECIPES)}.")] = "laptop",
    output: Annotated[Path, typer.Option(help="Folder of checkpoints, metrics.jsonl and results.json.")] = Path(
        "runs/train"
    ),
    resume: Annotated[
        str | None, typer.Option(help='"auto": go on from the newest checkpoint in output, if there is one.')
    ] = None,
):
    """Train a language model, on one process or under torchrun; --resume auto continues a stopped run.

    Exit status: 0 finished; 75 saved and to go on (a signal); 130 Ctrl-C; 2 a mistake, said in a sentence.
    """
    require_one_of("recipe", recipe, RECIPES)
    if resume not in (None, "auto"):
        raise ValueError(f"resume must be auto, or left out, got {resume!r}.")
    chosen = replace(RECIPES[recipe], **changes)
    from transformers.utils.logging import disable_progress_bar

    from fem.train.signals import Paused
    from fem.train.train import run

    disable_progress_bar()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # before training: an exception in a destructor would be lost
    try:
        results = run(chosen, output, resume == "auto")
        _say(ending(results["train"], output, inspectable=chosen.architecture is None))
    except Paused as stopped:
        _say(f"{stopped}; to go on: {again()}")
        raise typer.Exit(stopped.code) from None
    except KeyboardInterrupt:
        _say(f"stopped at once; to go on from the last checkpoint: {again()}")
        raise typer.Exit(130) from None


def ending(trained: dict, output: Path, inspectable: bool) -> str:
    """A finished training's losses, the folder of its model, and the commands to type next."""
    from fem.train.checkpoints import newest

    losses = [
        f"{label} loss {trained[name]:.4f}"
        for name, label in (("train_loss", "training"), ("val_loss", "validation"))
        if trained.get(name) is not None
    ]
    folder = shlex.quote(str(output))
    inspect = f'; fem inspect --model {folder} --text "..."' if inspectable else ""
    return (
        f"finished: {', '.join(losses)} nats per token. The model is in {newest(output)}, which from_pretrained "
        f'opens.\nnext: fem generate --model {folder} --prompt "..."{inspect}'
    )


def again() -> str:
    """The command that goes on where this one stopped."""
    words = sys.argv[1:]
    command = shlex.join(["fem", *words, *([] if "--resume" in words else ["--resume", "auto"])])
    return command if os.environ.get("WORLD_SIZE", "1") == "1" else f"{command}, by the same launcher"


def _say(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr)
