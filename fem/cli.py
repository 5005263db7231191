"""The command line, `fem`. A command is a module of fem/experiments with a function `command`, and its name here."""

from __future__ import annotations

import signal
import sys

from fem.extras import missing_package

try:
    import typer

    from fem.experiments import argmax, bench, demo, doctor, forecast, inspect, mad, regimes, report, vision
    from fem.experiments.lm import ablate, eval, finetune, generate, train
except ModuleNotFoundError as error:
    sys.exit(f"error: {missing_package(error)}")

app = typer.Typer(
    help="Free Energy Mixer: experiments, models and reports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for experiment in (
    demo,
    train,
    finetune,
    ablate,
    eval,
    generate,
    inspect,
    argmax,
    doctor,
    bench,
    mad,
    forecast,
    vision,
    regimes,
    report,
):
    app.command(experiment.__name__.rpartition(".")[2])(experiment.command)


def main() -> None:
    """Run a command. An error of the user's making is one sentence on standard error and exit status 2."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except ModuleNotFoundError as error:
        sys.exit(_say(missing_package(error)))
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.exit(_say(str(error)))


def _say(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
