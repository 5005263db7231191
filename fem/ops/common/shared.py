"""What all layers of a model ask of the same marks, such as where documents begin, computed once a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_known: ContextVar[dict | None] = ContextVar("known", default=None)


class Known:
    """What was found in a forward pass, for all its layers, and for those that the backward computes again.

    No dictionary, which FSDP and accelerate copy for every block that is given one.
    """

    def __init__(self):
        self.results = {}


@contextmanager
def shared_by_layers(known: Known | None) -> Iterator[None]:
    """Within it, a function that is `shared` is called once for equal arguments, and for the same tensors.

    Not in a graph of torch.compile, which merges equal results itself.
    """
    if known is None or torch.compiler.is_compiling():
        yield
        return
    token = _known.set(known.results)
    try:
        yield
    finally:
        _known.reset(token)


def shared(function: Callable) -> Callable:
    """The function, of hashable arguments."""

    @functools.wraps(function)
    def run(*arguments):
        known = None if torch.compiler.is_compiling() else _known.get()
        if known is None:
            return function(*arguments)
        key = function, *arguments
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return run


def known_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a tensor and flags, called once for a tensor that lives on, as one that all layers of somebody's
    model are given, until PyTorch counts a change of it. It does not count those of tensors of inference mode. A graph
    that is captured asks for itself: replayed, it would read what was found of numbers that have changed since."""
    known = WeakIdKeyDictionary()

    @functools.wraps(function)
    def run(x: Tensor, *flags: bool):
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return function(x, *flags)
        version = None if x.is_inference() else (x._version, torch.is_inference_mode_enabled(), *flags)
        found = known.get(x)
        if found is None or version is None or found[0] != version:
            found = known[x] = version, function(x, *flags)
        return found[1]

    return run
