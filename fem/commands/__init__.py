"""The commands of the library, one module each. A command imports torch only when it begins, so help is quick."""

from collections.abc import Callable
from importlib import import_module

HELP = {
    "train": "Train a language model, on one process or under torchrun.",
    "generate": "Continue a prompt, printing the text as it comes.",
    "inspect": "A page that shows what each channel of each head reads from a text.",
    "doctor": "What runs on this machine, and what is missing.",
}
RESUMABLE = ()


def command(name: str) -> Callable:
    """The function behind `fem NAME`."""
    return import_module(f"{__name__}.{name}").command
