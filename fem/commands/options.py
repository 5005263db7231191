"""A recipe's fields as options of a command."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape

Command = Callable[..., Any]


def called(field: Field) -> str:
    """The name of a recipe's field on the command line, without dashes in front."""
    return (field.metadata.get("called") or field.name).replace("_", "-")


def recipe_options(recipe: type) -> Callable[[Command], Command]:
    """Give a command every field of `recipe` as an option.

    The command's first argument receives the fields that the user gave, {field: value}, so that
    `replace(recipe, **changes)` is the recipe to run; its other arguments stay options of their own. The help shows the
    defaults of `recipe`, a dataclass.
    """
    types = get_type_hints(recipe)

    def as_option(field: Field) -> inspect.Parameter:
        default, name = field.default, called(field)
        if isinstance(default, bool):
            flag, default = f"--{name}/--no-{name}", f"{'' if default else 'no-'}{name}"
        else:
            flag = f"--{name}"
        default = default.replace(",", ", ") if isinstance(default, str) else default  # a narrow terminal breaks there
        shown = "" if default in (None, "") else f" [default: {default}]"
        info = typer.Option(flag, help=escape(field.metadata["help"] + shown), show_default=False)
        annotation = Annotated[types[field.name] | None, info]
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def decorate(command: Command) -> Command:
        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        options = [as_option(field) for field in fields(recipe)]
        names = {option.name for option in options}

        @wraps(command)
        def run(**values):
            changes = {name: value for name, value in values.items() if name in names and value is not None}
            try:
                return command(changes, **{name: value for name, value in values.items() if name not in names})
            except ValueError as error:
                raise ValueError(_as_typed(str(error), recipe)) from error

        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]
        parameters = [*keyword_only, *options]
        run.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _as_typed(sentence: str, recipe: type) -> str:
    """The sentence of an error, with options for names of fields: its first word, any with a value or a line in it, and
    those of "steps (12 there, 11 here)"."""
    typed = {name: f"--{called(x)}" for x in fields(recipe) for name in (x.name, called(x).replace("-", "_"))}
    names = r"^\w+(?= )|\b\w+_\w+\b|\b\w+(?= = | \(.* there, )"
    return re.sub(names, lambda match: typed.get(match[0], match[0]), sentence)
