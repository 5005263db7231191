"""Tokens that hold NaN or infinity: every row that sees one reads NaN, and no other row knows of it.

In a read, 0 times NaN is NaN: rows that a document or the order of time keeps from such a token would still meet it in
a matrix product, or in a state that is multiplied by 0. So it is read as zeros, and NaN is added where it is seen.
"""

from __future__ import annotations

from math import isfinite

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.steps import running_maximum
from fem.ops.common.tokens import Tokens
from fem.ops.common.transforms import may_look


def find_spoilt(x: Float[Tensor, "b t d"], before: Bool[Tensor, " b"] | None) -> Bool[Tensor, "b t"] | None:
    """Which tokens are not finite; None where a CPU knows at once that none is, and that no row of `before` is True."""
    if may_look(x) and isfinite(x.detach().sum().item()) and (before is None or not before.any().item()):
        return None
    return ~x.detach().isfinite().all(-1)


def seen_from(
    spoilt: Bool[Tensor, "b t"], tokens: Tokens, before: Bool[Tensor, " b"] | None, causal: bool
) -> Bool[Tensor, "b t"]:
    """Which places see a spoilt token: those of its document from it on, or all of them without causal.

    before: the rows whose document had one before the first token.
    """
    seen = _behind(spoilt, tokens.start, before)
    if not causal:
        seen = seen | _behind(spoilt.flip(1), tokens.reversed().start, None).flip(1)
    return seen


def _behind(spoilt: Tensor, start: Tensor | None, before: Tensor | None) -> Tensor:
    count = spoilt.long().cumsum(1)
    if before is not None:
        count = count + before[:, None]
    if start is None:
        return count > 0
    return count > running_maximum(torch.where(start, count - spoilt.long(), 0))
