"""The command line, `fem`. Its commands are those of fem/commands, and those of packages of the entry-point group
`fem.commands`. Such a package has HELP (a line by name), RESUMABLE (names) and command(name), which is the function.
"""

from __future__ import annotations

import shlex
import signal
import sys
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Annotated

from fem import __version__
from fem.extras import missing_package

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:
    sys.exit(f"error: {missing_package(error)}")

RESEARCH = "The paper's experiments are commands of a package of their own: pip install ./research in your copy."
TERMINATED = 128 + signal.SIGTERM  # the exit status of a shell
UsageError = typer.BadParameter.__base__  # typer raises it for unknown commands


@cache
def commands() -> dict[str, ModuleType]:
    """Every command and the package whose module it is: those of the library, and those of installed packages."""
    packages = [import_module("fem.commands"), *(entry.load() for entry in entry_points(group="fem.commands"))]
    return {name: package for package in packages for name in package.HELP}


class Commands(TyperGroup):
    """Commands whose modules are imported only when they are called, so that `fem --help` answers at once."""

    def __init__(self, **options):
        super().__init__(**options)
        for name, package in commands().items():
            panel = "Use a model" if package.__name__ == "fem.commands" else "Run experiments"
            self.commands[name] = TyperCommand(name, help=package.HELP[name], rich_help_panel=panel)

    def resolve_command(self, context, args: list[str]):
        try:
            name, _, rest = super().resolve_command(context, args)
        except UsageError as error:
            if not entry_points(group="fem.commands"):
                error.message += f" {RESEARCH}"
            raise
        return name, load(name), rest


def load(name: str) -> TyperCommand:
    """The command itself, with its options."""
    command = commands()[name].command(name)

    @wraps(command)
    def interruptible(*args, **options):
        try:
            return command(*args, **options)
        except (KeyboardInterrupt, SystemExit) as stop:
            status = 130 if isinstance(stop, KeyboardInterrupt) else stop.code
            if status not in (130, TERMINATED):
                raise
            print(stopped(name), file=sys.stderr)
            raise typer.Exit(status) from None

    single = typer.Typer(add_completion=False)
    single.command(name)(interruptible)
    return typer.main.get_command(single)


def stopped(name: str) -> str:
    """The message after Ctrl-C or SIGTERM: whether anything is kept, and the command that continues."""
    resumes = name in commands()[name].RESUMABLE
    kept = "finished parts are saved, and the same command goes on" if resumes else "to begin again"
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
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {missing_package(error) if isinstance(error, ModuleNotFoundError) else error}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # while Python shuts down, exceptions are printed and dropped


if __name__ == "__main__":
    main()
