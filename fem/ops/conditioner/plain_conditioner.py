"""The conditioner by operations of torch: the reference of its kernels, on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.precision import upcast
from fem.ops.common.tokens import Tokens
from fem.ops.decay_scan.decaying_sum import decay_scan


class ConvForm(NamedTuple):
    """What multiplies the normalised state: y = length z, or SiLU(y) where it bends; z is of unit length."""

    length: float
    bends: bool

    @classmethod
    def named(cls, name: str, width: int) -> ConvForm:
        """The form that a configuration's `conv_form` names, for `width` channels."""
        return cls(1.0 if name == "paper" else width**0.5, name != "authors")


def plain_condition(
    projected: Float[Tensor, "b t three_c"],
    tokens: Tokens,
    hidden: Float[Tensor, "b c"] | None,
    norm: Callable[[Tensor], Tensor],
    form: ConvForm,
    backend: str = "auto",
    bidirectional: bool = False,
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c"]]:
    """h and h~_T of [f, u, a], in their dtype:

        h_t = SiLU(length l2norm(softplus(a_t))) * norm(h~_t)        h~_t = exp(-softplus(f_t)) h~_{t-1} + u_t

    hidden: h~ before the first token; None: 0. norm: any, over the channels. form: the length, and whether there is a
    SiLU. backend "triton": the decaying sum by a package's kernel. Bidirectional: half of the channels run backwards.
    """
    decay, u, shortcut = projected.chunk(3, -1)
    state = _directed_scan(
        -F.softplus(decay), upcast(u), tokens, hidden, backend, bidirectional
    )  # a stream carries float32 on
    unit = F.normalize(F.softplus(upcast(shortcut)), dim=-1)  # in float16 all of a shut one could be 0
    shortcut = unit.to(shortcut.dtype) * form.length
    h = (F.silu(shortcut) if form.bends else shortcut) * norm(state.to(shortcut.dtype))
    if u.shape[1] == 0:  # no token: the hidden state is what it was, or the sum of nothing, 0
        return h, state.sum(1) if hidden is None else hidden
    return h, state[:, -1].clone()


def _directed_scan(
    log_decay: Tensor, u: Tensor, tokens: Tokens, hidden: Tensor | None, backend: str, bidirectional: bool
) -> Tensor:
    if not bidirectional:
        return _masked_scan(log_decay, u, tokens, hidden, backend)
    half = u.shape[-1] // 2
    forward = _masked_scan(log_decay[..., :half], u[..., :half], tokens, None, backend)
    future = tokens.reversed()
    backward = _masked_scan(log_decay[..., half:].flip(1), u[..., half:].flip(1), future, None, backend)
    return torch.cat([forward, backward.flip(1)], -1)


def _masked_scan(log_decay: Tensor, u: Tensor, tokens: Tokens, hidden: Tensor | None, backend: str) -> Tensor:
    if tokens.keep is not None:
        log_decay = log_decay.masked_fill(~tokens.keep[..., None], 0)
        u = u.masked_fill(~tokens.keep[..., None], 0)
    if tokens.start is not None:
        log_decay = log_decay.masked_fill(tokens.start[..., None], float("-inf"))
    return decay_scan(log_decay, u, hidden, backend)
