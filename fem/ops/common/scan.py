"""How a scan is called, and what all scans do with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fem.ops.common.precision import compute_dtype, upcast
from fem.ops.common.read import LOG_ZERO, Read, Terms, merge, read_of, rounded
from fem.ops.common.tokens import PLAIN, Tokens

State = dict[str, Tensor]
LEAST_BETA = 1e-8  # below, F = log(R) / beta of float64 sums loses more digits than F - mean has
MOST_BETA = 1e20  # above, F is the largest value in float64 too, and beta v could reach LOG_ZERO


class ScanCall(NamedTuple):
    """The options of a scan of `fem.functional`, with tokens in the place of masks and documents."""

    causal: bool = True
    tokens: Tokens = PLAIN
    initial_state: State | None = None
    return_state: bool = False
    normalize: bool = True
    backend: str = "auto"

    def both_ways(
        self,
        one_way: Callable[..., tuple[Terms, State | None]],
        inputs: Sequence[Tensor | None],
        beta: Tensor,
        widen: bool = True,
    ) -> tuple[Terms, State | None]:
        """The read of all tokens that a row may see, and the state after the last.

        one_way(*inputs, beta, tokens, state, present): the same of the tokens up to each, or before each unless
        `present`. Inputs are (B, T, ...), and so are the terms. one_way gets them in one dtype, where that is to widen
        them, and beta between LEAST_BETA and MOST_BETA. Raises ValueError on states of a reference, which keeps none.
        """
        if self.backend == "reference" and (self.initial_state is not None or self.return_state):
            raise ValueError(
                "backend='reference' reads whole sequences and keeps no state; use backend='auto' with states."
            )
        beta, dtype = upcast(beta).clamp(LEAST_BETA, MOST_BETA), self.dtype(*inputs)
        if widen:
            first = [next(i for i, y in enumerate(inputs) if y is x) for x in inputs]
            wide = [x if x is None or i < n else x.to(dtype) for n, (i, x) in enumerate(zip(first, inputs))]
            inputs = [wide[i] for i in first]  # v and f may be one tensor, and stay one
        past, state = one_way(*inputs, beta, self.tokens, self.initial_state, True)
        if self.causal:
            return past, state
        flip = lambda x: None if x is None else x.flip(1)  # noqa: E731
        future, _ = one_way(*map(flip, inputs), beta, self.tokens.reversed(), None, False)
        past, future = (Terms(*map(upcast, terms)) for terms in (past, future))
        return merge(past, Terms(*map(flip, future)), beta.to(past.mean.dtype)), state

    def dtype(self, *inputs: Tensor | None) -> torch.dtype:
        """In which the scan computes."""
        return torch.float64 if self.backend == "reference" else compute_dtype(*inputs)

    def result(
        self, terms: Terms, state: State, rate: Tensor, dtype: torch.dtype, beta: Tensor | None
    ) -> Read | tuple[Read, State]:
        """What the scan returns: a read, and with `return_state` the state; no free energy without a beta."""
        read = rounded(read_of(terms, rate, self.normalize), dtype, beta)
        if not self.return_state:
            return read
        return read, {name: x for name, x in state.items() if beta is not None or name != "free_energy"}


def memory_before(state: State | None, like: Tensor, *shapes: tuple[int, ...]) -> Terms:
    """What cells of these shapes have kept, as a read: that of a state, or of no token."""
    if state is None:
        return Terms(like.new_full(shapes[0], LOG_ZERO), *(like.new_zeros(shape) for shape in shapes[1:]))
    kept = [state.get(name) for name in Terms._fields]
    return Terms(*(like.new_zeros(shape) if x is None else x.reshape(shape) for x, shape in zip(kept, shapes)))


def split_channels(x: Tensor | None, widths: tuple[int, int], dim: int = -1) -> tuple[Tensor | None, ...]:
    """What belongs to the channels of v, and to those of the free values; all of it to both, where they are the same
    channels, as under a cap."""
    return (x, x) if x is None or x.shape[dim] < sum(widths) else x.split(widths, dim)


def read_pair(reads: Sequence[Callable], v: Tensor, free_values: Tensor, call: ScanCall) -> Read | tuple[Read, State]:
    """The mean of v by the first of two reads, and the free energy of the free values by the second.

    Channels do not know each other, so a pair is two reads, and its state two states. A read of no channel is left out.
    """
    results, after = [v, free_values], {}
    for n, name in enumerate(("mean.", "free.")):
        if results[n].shape[-1] == 0:
            continue
        state = {key.removeprefix(name): x for key, x in (call.initial_state or {}).items() if key.startswith(name)}
        read = reads[n](call=call._replace(initial_state=state or None))
        read, state = read if call.return_state else (read, {})
        results[n] = read[n]
        after |= {name + key: x for key, x in state.items()}
    return (Read(*results), after) if call.return_state else Read(*results)
