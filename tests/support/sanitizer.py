"""What kernels do to memory in Triton's interpreter, watched as compute-sanitizer watches it on a card.

On a card a kernel's programs run side by side, and so do a program's threads. A launch raises where a program

* reads or writes outside of the tensors that the launch was given;
* reads what another program writes, or writes what another one reads or wrote otherwise;
* reads or overwrites what it wrote itself, with no barrier between.

The interpreter runs one program after another, so that none of this would change its results.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, interpreter_builder

NOBODY, SEVERAL = 0, -1  # programs are counted from 1


class Storage:
    """The bytes of a tensor: which program wrote each last, behind how many barriers, and which one has read it."""

    def __init__(self, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.begin, self.size = storage.data_ptr(), storage.nbytes()
        self.writer, self.reader, self.barriers = np.zeros((3, self.size), np.int32)


class Launch:
    """A launch of a kernel, which raises AssertionError at a fault."""

    def __init__(self, kernel: str, arguments: list):
        self.kernel, self.barriers = kernel, 0
        found = {x.untyped_storage().data_ptr(): Storage(x) for x in tensors(arguments) if x.untyped_storage().nbytes()}
        self.begins = sorted(found)
        self.storages = [found[begin] for begin in self.begins]

    def load(self, pointers, mask) -> None:
        own = program()
        for storage, at in self.touched(pointers, mask.data):
            writer, reader = storage.writer[at], storage.reader[at]
            self.refuse((writer != NOBODY) & (writer != own), "reads what another program writes")
            self.refuse((writer == own) & (storage.barriers[at] == self.barriers), "reads what it has just written")
            storage.reader[at] = np.where((reader == NOBODY) | (reader == own), own, SEVERAL)

    def store(self, pointers, value, mask) -> None:
        own, found = program(), interpreter._interpreter.load(pointers.data, mask.data, value.data, value.data.dtype)
        for storage, at in self.touched(pointers, mask.data & (found != value.data)):
            writer, reader = storage.writer[at], storage.reader[at]
            self.refuse((writer != NOBODY) & (writer != own), "writes what another program writes")
            self.refuse((reader != NOBODY) & (reader != own), "writes what another program reads")
        for storage, at in self.touched(pointers, mask.data):
            again = (storage.writer[at] == own) & (storage.barriers[at] == self.barriers)
            self.refuse(again, "writes what it has just written")
            self.refuse(len(np.unique(at)) < len(at), "writes one number twice at once")
            storage.writer[at], storage.barriers[at] = own, self.barriers

    def touched(self, pointers, mask) -> Iterator[tuple[Storage, np.ndarray]]:
        """The storages that pointers fall into, and where in them."""
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        left = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.int64)
        while left.size:
            place = bisect_right(self.begins, left[0]) - 1
            storage = self.storages[place]
            inside = (left >= storage.begin) & (left + size <= storage.begin + storage.size)
            self.refuse(place < 0 or not inside[0], "leaves its tensors")
            yield storage, left[inside] - storage.begin
            left = left[~inside]

    def refuse(self, fault: np.ndarray | bool, what: str) -> None:
        if np.any(fault):
            raise AssertionError(f"{self.kernel} {what}")


def tensors(arguments: list) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from tensors(argument)
        elif isinstance(argument, torch.Tensor):
            yield argument


def program() -> int:
    (x, y, z), (_, rows, columns) = interpreter_builder.grid_idx, interpreter_builder.grid_dim
    return 1 + (x * rows + y) * columns + z


def watch() -> None:
    """Watch every launch from here on."""
    builder, launch = type(interpreter_builder), Launch("", [])
    load, store, barrier = builder.create_masked_load, builder.create_masked_store, builder.create_barrier
    arguments_of = GridExecutor._init_args_hst

    def launched(self, arguments, keywords):
        nonlocal launch
        found, named = arguments_of(self, arguments, keywords)
        launch = Launch(self.fn.__name__, [*found, *named.values()])
        return found, named

    def watched_load(self, pointers, mask, *rest):
        launch.load(pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        launch.store(pointers, value, mask)
        return store(self, pointers, value, mask, *rest)

    def counted_barrier(self):
        launch.barriers += 1
        return barrier(self)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.create_barrier, GridExecutor._init_args_hst = counted_barrier, launched
