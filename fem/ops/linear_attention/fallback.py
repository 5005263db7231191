"""The fast computation of a chunk where it is proven exact, and two slower ones where it is not.

Every chunk is computed by matrix products in the dtype of its inputs. Chunks in which a row is in doubt are computed
again in float64, and those still in doubt by logarithms, in float64 too. A backward pass computes each chunk in the way
that the forward pass took for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

ENTRIES_AT_A_TIME = 2**20
Record: TypeAlias = tuple  # a named tuple of tensors with one row per chunk, or None


class Way(NamedTuple):
    """The ways to compute something for a number of chunks; arguments and results are tuples of tensors or None."""

    fast: Callable  # -> results, and the rows in doubt
    backward: Callable  # gradients of the results, and the arguments -> gradients of these; rows in doubt pass none
    exact: Callable  # -> results, at any magnitude
    alive: Callable  # -> rows that see any weight: the others are in doubt for no reason


def compute(way: Way, *arguments: Record) -> tuple[Record, Tensor]:
    """The results, and which fallback each chunk took: 0 (none), 1 (float64) or 2 (logarithms)."""
    result, doubt = way.fast(*arguments)
    fallback = torch.zeros(len(doubt), dtype=torch.uint8, device=doubt.device)
    chunks = doubt.any(1).nonzero().squeeze(1)
    if len(chunks):
        chunks = chunks[(doubt[chunks] & way.alive(*_take(arguments, chunks))).any(1)]
    entries = _entries(result)
    if len(chunks) and doubt.numel() and result.mean.dtype != torch.float64:
        doubled = _take(arguments, chunks, torch.float64)
        better, doubt = way.fast(*doubled)
        _put(result, chunks, better)
        fallback[chunks] = 1
        chunks = chunks[(doubt & way.alive(*doubled)).any(1)]
    if len(chunks):
        fallback[chunks] = 2
        for part in _groups(chunks, entries * result.mean.shape[1]):
            _put(result, part, way.exact(*_take(arguments, part, torch.float64)))
    return result, fallback


def differentiate(way: Way, fallback: Tensor, grad: Record, *arguments: Record) -> tuple[Record, ...]:
    """Gradients of the arguments; chunks that took a fallback are differentiated in the same way."""
    result = way.backward(grad, *arguments)
    doubled = (fallback == 1).nonzero().squeeze(1)
    if len(doubled):
        better = way.backward(*_take((grad, *arguments), doubled, torch.float64))
        for record, with_ in zip(result, better):
            _put(record, doubled, with_)
    exact = (fallback == 2).nonzero().squeeze(1)
    for part in _groups(exact, _entries(grad) * grad.mean.shape[1]):
        better = _backward(way.exact, *_take((grad, *arguments), part, torch.float64))
        for record, with_ in zip(result, better):
            _put(record, part, with_)
    return result


def _backward(compute: Callable, grad: Record, *arguments: Record) -> tuple[Record, ...]:
    """Gradients of the arguments of `compute`, from those of its results."""
    tensors = [tensor for record in arguments for tensor in record if tensor is not None]

    def of_tensors(*tensors):
        return tuple(tensor for tensor in compute(*_like(arguments, tensors)) if tensor is not None)

    backward = torch.func.vjp(of_tensors, *tensors)[1]
    return _like(arguments, backward(tuple(tensor for tensor in grad if tensor is not None)))


def _like(records: tuple[Record, ...], tensors) -> tuple[Record, ...]:
    """The tensors, in the places that tensors have in the records."""
    tensors = iter(tensors)
    return tuple(type(record)(*(None if x is None else next(tensors) for x in record)) for record in records)


def _take(records: tuple[Record, ...], chunks: Tensor, dtype: torch.dtype | None = None) -> tuple[Record, ...]:
    return tuple(type(r)(*(None if x is None else x[chunks].to(dtype or x.dtype) for x in r)) for r in records)


def _put(record: Record, chunks: Tensor, better: Record) -> None:
    for tensor, with_ in zip(record, better):
        if tensor is not None:
            tensor[chunks] = with_.to(tensor.dtype)


def _entries(results: Record) -> int:
    """Numbers that one chunk gives."""
    return sum(x[0].numel() for x in results if x is not None)


def _groups(chunks: Tensor, entries: int):
    return chunks.split(max(1, ENTRIES_AT_A_TIME // entries)) if len(chunks) else ()
