"""The command line, `fem`. A command is a module of fem/experiments/commands with a function `command`, and
its line here.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from typing import Annotated

from fem import __version__
from fem.extras import missing_package

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:
    sys.exit(f"error: {missing_package(error)}")

COMMANDS = {
    "demo": "What FEM does, in minutes: two language models on real text, and a look inside.",
    "train": "Train a language model, on one process or under torchrun.",
    "finetune": "Train a small GPT-2 or Llama further, as it is and turned into FEM.",
    "ablate": "What each part of FEM adds to a language model, with controls.",
    "eval": "Score a language model with lm-evaluation-harness.",
    "generate": "Continue a prompt, printing the text as it comes.",
    "inspect": "A page that shows what each channel of each head reads from a text.",
    "argmax": "Can one read fetch every channel's maximum? (Appendix P)",
    "regimes": "Tasks that separate reading one mixture from reading per channel.",
    "mad": "Six synthetic tasks that probe a sequence mixer. (Table 1)",
    "forecast": "Forecast time series at equal parameters. (Table 4)",
    "vision": "Classify images at equal parameters. (Table 3)",
    "bench": "Time and memory beside attention of equal weights. (Tables 5 and 7)",
    "doctor": "What runs on this machine, and what is missing.",
    "report": "Turn finished runs into pages beside the paper's tables.",
}

UsageError = typer.BadParameter.__base__  # typer raises it for unknown options and commands, too
RESUMABLE = ("ablate", "mad", "regimes", "forecast", "vision")


class Commands(TyperGroup):
    """Commands whose modules are imported only when they are called, so that `fem --help` answers at once."""

    def list_commands(self, context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context, name: str) -> TyperCommand | None:
        return TyperCommand(name, help=COMMANDS[name]) if name in COMMANDS else None

    def resolve_command(self, context, args: list[str]):
        name, *rest = args
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}."
            context.fail(f"there is no command {name!r}; {hint}")
        return name, load(name), rest


def load(name: str) -> TyperCommand:
    """The command itself, with its options."""
    command = import_module(f"fem.experiments.commands.{name}").command

    @wraps(command)
    def interruptible(*args, **options):
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            print(stopped(name), file=sys.stderr)
            raise typer.Exit(130) from None

    single = typer.Typer(add_completion=False)
    single.command(name)(interruptible)
    return typer.main.get_command(single)


def stopped(name: str) -> str:
    """The message after Ctrl-C: whether anything is kept, and the command that continues."""
    kept = "what had ended is kept, and the same command goes on" if name in RESUMABLE else "to begin again"
    return f"stopped; {kept}: {shlex.join(['fem', *sys.argv[1:]])}"


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"free-energy-mixer {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")


@app.callback()
def options(version: Annotated[bool | None, VERSION] = None) -> None:
    """Free Energy Mixer: experiments, models and reports."""


def main() -> None:
    """Run a command. An error of the user's making is one sentence on standard error and exit status 2."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(app(standalone_mode=not _under_torchrun()))
    except UsageError as error:
        sys.exit(_say(error.format_message()))
    except ModuleNotFoundError as error:
        sys.exit(_say(missing_package(error)))
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.exit(_say(str(error)))


def _say(sentence: str) -> int:
    if _first_to_say():
        print(f"error: {sentence}", file=sys.stderr)
    return 2


def _under_torchrun() -> bool:
    """Whether this is one of several processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "TORCHELASTIC_RUN_ID" in os.environ


def _first_to_say() -> bool:
    """Whether this process is to print the error: under torchrun, where all meet the same one, the first does."""
    if not _under_torchrun():
        return True
    from fem.experiments.common.distributed import store_key, torchrun_store

    return torchrun_store().add(f"{store_key()}/error", 1) == 1


if __name__ == "__main__":
    main()
