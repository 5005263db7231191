"""Which of the GPU's softmax reads is the fastest for a kind of call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.fastest import fastest
from fem.ops.common.read import Read
from fem.ops.common.tokens import Tokens

CANDIDATES = ("sdpa", "triton")


class ReadKind(NamedTuple):
    """Reads that one measurement speaks for; numbers of tokens within a factor of 2."""

    device: str
    dtype: str
    trains: bool
    rules: tuple[str, ...]
    widths: tuple[int, int]
    group: int
    queries_below: int
    keys_below: int


def fastest_backend(
    read: Callable[..., Read], q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, tokens: Tokens | None, **how
) -> str:
    """The backend under which `read` takes least time on random tensors like these, with the backward in training.

    Without a beta it is "sdpa"; in float64, "plain". The random state stays as it is.
    """
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "plain"
    if beta is None:
        return "sdpa"
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, beta))

    def step(backend: str) -> None:
        with torch.set_grad_enabled(trains), torch.random.fork_rng([q.device] if q.is_cuda else []):
            *alike, beta_alike = (torch.randn_like(x).requires_grad_(trains) for x in (q, k, v, beta.detach()))
            found = read(*alike, beta_alike.square() + 0.1, tokens=tokens, backend=backend, **how)
            if trains:
                (found.mean.sum() + found.free_energy.sum()).backward()

    kind = _kind(q, k, v, trains, tokens, **how)
    return fastest.choose(kind, {name: functools.partial(step, name) for name in CANDIDATES})


def _kind(q, k, v, trains, tokens, causal, window, bias, scale) -> ReadKind:
    rules = {
        "causal": causal,
        "window": window is not None,
        "bias": bias is not None,
        "mask": tokens is not None and tokens.keep is not None,
        "documents": tokens is not None and tokens.document is not None,
    }
    return ReadKind(
        device=str(q.device),
        dtype=str(q.dtype).removeprefix("torch."),
        trains=trains,
        rules=tuple(name for name, holds in rules.items() if holds),
        widths=(q.shape[3], v.shape[3]),
        group=q.shape[2] // k.shape[2],
        queries_below=1 << q.shape[1].bit_length(),
        keys_below=1 << k.shape[1].bit_length(),
    )
