"""What torch dispatches while a block runs, and how a function is called."""

from functools import wraps

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatched(TorchDispatchMode):
    """calls: the function of each operation, its arguments, and the tensors that it returns."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        self.calls.append((function, arguments, [x for x in tree_leaves(made) if torch.is_tensor(x)]))
        return made


def watched(monkeypatch, owner, name: str) -> list[tuple[tuple, dict, object]]:
    """The calls of a function from here on: what it is given, by place and by name, and what it returns."""
    function, calls = getattr(owner, name), []

    @wraps(function)
    def call(*arguments, **options):
        calls.append((arguments, options, made := function(*arguments, **options)))
        return made

    monkeypatch.setattr(owner, name, call)
    return calls
