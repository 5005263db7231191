"""Any linear, causal, non-negative operator of your own as a prior."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from fem.checks import SMALLEST
from fem.config import FreeEnergyMixerConfig
from fem.ops.common.backend import transformed
from fem.ops.common.precision import LEAST_PROVEN, upcast, without_autocast
from fem.ops.common.read import Read, connected_zeros
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.packing import SMALL_SPAN
from fem.priors.base import Prior

_DIGITS = 1e3  # a sum is this much larger than what op is off by
_ROUNDING = 1e-4  # allowed error of an operator (by FFT, for instance), relative to the largest sum of weights


class OperatorPrior(Prior):
    """mean = op(v) / op(1),   F = m + (1 / beta) log(op(exp(beta (v - m))) / op(1)),   m = max_i v_i       (Prop. 2.9)

    op maps (B, T, C) to (B, T, C), C = d: linear, causal, non-negative and channel by channel; it may have parameters.
    Used as `FreeEnergyMixer(config, prior=OperatorPrior(op))`. Masked tokens are taken out before op sees the sequence
    and every document runs on its own, so masks and segments are exact. It keeps no state.

    The numerator has one shift for the whole row, so a value may exceed what a row sees by 60 / beta at most, and by
    less where op rounds as an FFT does; beyond that (in eager mode) a ValueError says so. Raises ValueError where op
    changes the shape, where (in eager mode) its results for ones and for exp(beta (v - m)) <= 1 show a negative weight
    or NaN, or those of the first call that op is not linear, not causal or mixes channels, on segment_ids under vmap,
    and on fields that an operator cannot follow: causal=False, normalize=False, n_kv_head, window, free_share,
    value_logexp_cap; TypeError on an op that cannot be called, or that changes the dtype. op runs in float32 at least,
    its parameters too.
    """

    name = "operator"
    per_channel = True
    takes_pairs = False
    FIXED: ClassVar[dict] = {"causal": True, "normalize": True} | dict.fromkeys(
        ("n_kv_head", "window", "free_share", "value_logexp_cap")
    )

    def __init__(self, op: Callable[[Tensor], Tensor]):
        super().__init__(config=None)
        if not callable(op) or isinstance(op, type):
            raise TypeError(f"op must be a function or module that maps (B, T, C) to (B, T, C), got {op!r}.")
        self.op = op
        self._tried, self._noise = False, 0.0  # what op is off by, of its largest result, as a first call showed

    @staticmethod
    def widths(config):
        raise TypeError("an operator prior has no widths to solve for: its weights are the operator's own.")

    def linear_weights(self, config: FreeEnergyMixerConfig) -> int:
        """The weights of the operator's matrices."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)

    def check(self, config: FreeEnergyMixerConfig) -> None:
        for name, wanted in self.FIXED.items():
            if getattr(config, name) != wanted:
                raise ValueError(
                    f"an operator prior is causal, normalised and reads one kind of values; leave out {name}, "
                    f"got {name}={getattr(config, name)!r}."
                )

    def read(self, features, v, beta, tokens, memory, free_values=None):
        """The operator's sums of 1, v and exp(beta (v - m)), each document apart, and F from their ratios."""
        if memory is not None:
            raise ValueError(
                "an operator prior keeps no state; call the layer on whole sequences, without state and return_state."
            )
        if not v.numel():
            zeros = connected_zeros(v, v.shape, features, v, beta)
            return Read(zeros, None if beta is None else zeros), None
        dtype, v = v.dtype, upcast(v)
        if not self._tried and _eager(v):
            self._check_op(v.detach().flatten(2))
        weight = self._over_documents(torch.ones_like(v), tokens)
        _check_weights(weight, None)
        empty = weight <= 0
        total = weight.masked_fill(empty, 1)
        mean = (self._over_documents(v, tokens) / total).masked_fill(empty, 0)
        if beta is None:
            return Read(mean.to(dtype), None), None
        kept = torch.ones_like(v, dtype=torch.bool) if tokens.keep is None else tokens.keep[..., None, None]
        shift = v.detach().masked_fill(~kept, -math.inf).amax(1, keepdim=True).nan_to_num(neginf=0.0)
        z = (beta * (v - shift)).masked_fill(~kept, 0)
        near = (z.detach() > -SMALL_SPAN).all(1, keepdim=True)  # where e^z - 1 keeps the digits of a small beta
        energy = self._over_documents(torch.where(near, z.expm1(), z.exp()), tokens)
        _check_weights(torch.where(near, weight + energy, energy), weight)
        ratio = energy / total
        if _eager(ratio) and bool((~empty & ~near & self._lost(energy, ratio)).any()):
            raise ValueError(
                "v spreads too far for an operator prior: exp(beta v) is lost at a row that comes before a far "
                "larger value; keep beta (max v - v) under 60, under 6 for an op by FFT unless that runs in float64, "
                "or use a prior of PRIORS, which has no such bound."
            )
        log = torch.where(near, ratio.where(near, 0).log1p(), ratio.masked_fill(empty | near, 1).log())
        free_energy = shift + log / beta
        return Read(mean.to(dtype), torch.where(empty, 0, torch.maximum(free_energy, mean)).to(dtype)), None

    def _lost(self, energy: Tensor, ratio: Tensor) -> Tensor:
        """Where a sum may have lost its digits: to the range of float32, or beside a sum that op rounds with it."""
        return (ratio < LEAST_PROVEN[torch.float32]) | (energy < _DIGITS * self._noise * energy.amax(1, keepdim=True))

    def selection(self, features, v, tokens):
        """An operator's weights as a table; rounding errors are removed, so that they are weights again."""
        weights, values = super().selection(features, v, tokens)
        weights = weights.clamp(min=0)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1), values

    def _over_documents(self, x: Tensor, tokens: Tokens) -> Tensor:
        """op on every document of every row, as if masked tokens were not there."""
        flat = x.flatten(2)
        if tokens.keep is None and tokens.start is None:
            return self._checked(flat).view_as(x)
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if tokens.keep is None else tokens.keep
        document = torch.zeros_like(keep, dtype=torch.long) if tokens.document is None else tokens.document
        out = torch.zeros_like(flat)
        for number in range(_documents(tokens)):
            chosen = keep & (document == number)
            order = (~chosen).long().argsort(dim=1, stable=True)[..., None].expand_as(flat)
            moved = (flat * chosen[..., None]).gather(1, order)
            out = out + torch.zeros_like(flat).scatter(1, order, self._checked(moved)) * chosen[..., None]
        return out.view_as(x)

    def _checked(self, x: Tensor) -> Tensor:
        """op of x in float32 at least, on a copy: an op may work in place."""
        with without_autocast(x.device):
            y = self._run(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise ValueError(f"op must map (B, T, C) to the same shape, got {got} from {tuple(x.shape)}.")
        if y.dtype != x.dtype:
            raise TypeError(f"op must return the dtype of its input, {x.dtype}, got {y.dtype}; cast its result.")
        return y

    @torch.no_grad()
    def _check_op(self, like: Tensor) -> None:
        """Raise unless op of some numbers shaped as `like` is the sum of what it makes of their past and future, the
        past's part knows nothing of the future, and a factor of a channel is one of its result alone."""
        generator = torch.Generator().manual_seed(0)
        x, factor = (torch.rand(shape, generator=generator).to(like) for shape in (like.shape, like.shape[-1:]))
        past = torch.arange(x.shape[1], device=x.device)[:, None] < (x.shape[1] + 1) // 2
        total, before, after = (self._checked(part) for part in (x, x * past, x * ~past))
        off = lambda difference: bool((difference.abs() > 10 * _ROUNDING * total.abs().amax()).any())  # noqa: E731
        if off(total - before - after):
            raise ValueError("op must be linear, got op(x + y) that is not op(x) + op(y).")
        if off(after * past):
            raise ValueError("op must be causal, got a result for a token that depends on later ones.")
        if off(self._checked(x * factor) - total * factor):
            raise ValueError("op must leave channels apart, got a result in one channel that depends on another.")
        if x.shape[1] > 1:  # else nothing came before
            self._tried = True
            self._noise = float((after * past).abs().amax() / total.abs().amax().clamp_min(SMALLEST))

    def _run(self, x: Tensor) -> Tensor:
        parameters = dict(self.op.named_parameters()) if isinstance(self.op, nn.Module) else {}
        if all(p.dtype == upcast(p).dtype for p in parameters.values()):
            return self.op(x)
        return torch.func.functional_call(self.op, {name: upcast(p) for name, p in parameters.items()}, (x,))


def _documents(tokens: Tokens) -> int:
    """The largest number of documents in a row. Raises ValueError under vmap, where the number is unknown."""
    if tokens.document is None:
        return 1
    try:
        return int(tokens.document.max()) + 1
    except RuntimeError as error:
        if not transformed():
            raise
        raise ValueError(
            "segment_ids cannot be mapped over by vmap with an operator prior, which runs op once for each document; "
            "leave them out or call the layer once for each row."
        ) from error


def _eager(x: Tensor) -> bool:
    """Whether x has values that may decide what happens: not in graphs, in `torch.func`'s transforms and on meta."""
    return not (torch.compiler.is_compiling() or x.is_meta or transformed(x))


def _check_weights(part: Tensor, whole: Tensor | None) -> None:
    """Raise unless 0 <= op(x) <= op(1), as it must be of weights >= 0 and 0 <= x <= 1."""
    if not _eager(part):
        return
    most = (part if whole is None else whole).abs().amax()
    wrong = ~(part >= -_ROUNDING * most)  # NaN too
    wrong = wrong if whole is None else wrong | (part > whole + _ROUNDING * most)
    if bool(wrong.any()):
        raise ValueError(
            "op must be non-negative, got a negative weight or NaN: op(1) or op(x) of some 0 <= x <= 1 leaves "
            "[0, op(1)]; pass its weights through a softplus."
        )
