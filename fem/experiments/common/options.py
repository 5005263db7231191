"""A recipe's fields as options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape

from fem.experiments.common.run import note

Command = Callable[..., Any]


def recipe_options(recipe: Any) -> Callable[[Command], Command]:
    """Give a command every field of `recipe` as an option.

    The command's first argument receives what the user gave, {field: value}, so that `replace(recipe, **changes)` is
    the recipe to run; its other arguments stay options of their own. The help shows the values in `recipe`.
    """
    types = get_type_hints(type(recipe))

    def as_option(field) -> inspect.Parameter:
        default = getattr(recipe, field.name)
        shown = "" if default is None else escape(f" [default: {default}]")
        info = typer.Option(help=field.metadata["help"] + shown, show_default=False)
        annotation = Annotated[types[field.name] | None, info]
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def as_other_name(other: str, field) -> inspect.Parameter:
        annotation = Annotated[types[field.name] | None, typer.Option(hidden=True)]
        return inspect.Parameter(other, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def decorate(command: Command) -> Command:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        options = [as_option(field) for field in fields(recipe)]
        names = {option.name for option in options}
        others = {other: field for field in fields(recipe) for other in field.metadata.get("also", ())}
        options += [as_other_name(other, field) for other, field in others.items()]

        def run(**given):
            for other, field in others.items():
                if (value := given.pop(other)) is not None:
                    note(f"--{other.replace('_', '-')} is called --{field.name.replace('_', '-')} here.")
                    given[field.name] = value
            changes = {name: value for name, value in given.items() if name in names and value is not None}
            return command(changes, **{name: value for name, value in given.items() if name not in names})

        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [*keyword_only, *options]
        run.__name__, run.__doc__ = command.__name__, inspect.cleandoc(command.__doc__ or "")
        run.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
