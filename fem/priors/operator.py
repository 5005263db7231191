"""Any linear, causal, non-negative operator of your own as a prior."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from fem.checks import SMALLEST
from fem.config import FreeEnergyMixerConfig
from fem.ops.common.backend import transformed
from fem.ops.common.precision import LEAST_PROVEN, upcast, without_autocast
from fem.ops.common.read import Read, connected_zeros
from fem.ops.common.tokens import Tokens, filled
from fem.ops.softmax.packing import Packing
from fem.prior_table import Widths
from fem.priors.base import Prior

_DIGITS = 1e3  # a sum is this much larger than what op is off by
_ROUNDING = 1e-4  # allowed error of an operator (by FFT, for instance), relative to the largest sum of weights
_FIELDS = {"causal": True, "normalize": True} | dict.fromkeys(["n_kv_head", "window", "free_share", "value_logexp_cap"])


class OperatorPrior(Prior):
    """mean = op(v) / op(1),   F = m + (1 / beta) log(op(exp(beta (v - m))) / op(1)),   m = max_i v_i       (Prop. 2.9)

    op maps (B, T, C) to (B, T, C), C = d: linear, causal, non-negative and channel by channel; it may have parameters.
    Used as `FreeEnergyMixer(config, prior=OperatorPrior(op))`. Masked tokens are taken out before op sees the sequence
    and every document runs on its own, so masks and segments are exact. It keeps no state.

    The numerator has one shift for the whole row, so a value may exceed what a row sees by 60 / beta at most, and by
    less where op rounds as an FFT does. In eager mode a ValueError says where one does, or op's sums are not positive,
    and at the first call where op has a negative weight, is not linear, not causal or mixes channels. Raises ValueError
    where op changes the shape and on fields that it cannot follow: causal=False, normalize=False, n_kv_head, window,
    free_share, value_logexp_cap; TypeError on an op that cannot be called, or that changes the dtype. op runs in
    float32 at least, its parameters and buffers too.
    """

    name = "operator"
    per_channel = True
    takes_pairs = False

    def __init__(self, op: Callable[[Tensor], Tensor]):
        super().__init__(config=None)
        if not callable(op) or isinstance(op, type):
            raise TypeError(f"op must be a function or module that maps (B, T, C) to (B, T, C), got {op!r}.")
        self.op = op
        self._tried, self._noise = False, 0.0  # what op is off by, of its largest result, as a first call showed

    def widths(self, config):
        """Those of this operator's own matrices."""
        return Widths(sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1), key_maps=0)

    def check(self, config: FreeEnergyMixerConfig) -> None:
        for name, wanted in _FIELDS.items():
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
        eager = not (torch.compiler.is_compiling() or v.is_meta or transformed(v))
        y = upcast(v).flatten(2)
        if eager and not self._tried:
            self._check_op(y.detach())
        weight = self._over_documents(torch.ones_like(y), tokens)
        sees = weight > 0
        total = weight.where(sees, 1)
        mean = self._over_documents(y, tokens) / total
        as_given = lambda x: x.view_as(v).where(sees.view_as(v), 0).to(v.dtype)  # noqa: E731
        if beta is None:
            return Read(as_given(mean), None), None
        y = y if tokens.keep is None else filled(y, tokens.keep[..., None])
        packing = Packing.of(y, beta.flatten())
        energy = self._over_documents(packing.energies(packing.exponents(y)), tokens)
        ratio = energy / total
        least, sums = LEAST_PROVEN[ratio.dtype], packing.slope(ratio) * total  # op(exp(beta (v - m)))
        proven = (sums >= least * total) & (sums >= _DIGITS * self._noise * sums.amax(1, keepdim=True))
        if eager and not bool(((~sees | proven) & (weight >= -_ROUNDING * weight.amax())).all()):  # as NaN never is
            raise ValueError(
                "v spreads too far for an operator prior, or op has a negative weight: op(exp(beta (v - m))) is not "
                "positive, or is lost at a row that comes before a far larger value; keep beta (max v - v) under 60, "
                "under 6 for an op by FFT unless that runs in float64, pass the weights of op through a softplus, or "
                "use a prior of PRIORS, which has no such bound."
            )
        free_energy = packing.shift + packing.logarithm(ratio.where(sees, 1)) / packing.beta
        return Read(as_given(mean), as_given(free_energy)), None

    def _over_documents(self, x: Tensor, tokens: Tokens) -> Tensor:
        """op of every document of every row, which is moved to the front of an empty row, without its masked tokens."""
        if tokens.keep is None and tokens.start is None:
            return self._run(x)
        document = torch.zeros_like(x[..., 0], dtype=torch.long) if tokens.document is None else tokens.document
        place, out = tokens.position[..., None].expand_as(x), torch.zeros_like(x)
        for number in range(1 if tokens.document is None else int(document.max()) + 1):
            chosen = (document == number if tokens.keep is None else tokens.keep & (document == number))[..., None]
            alone = torch.zeros_like(x).scatter_add(1, place, x * chosen)
            out = out + self._run(alone).gather(1, place) * chosen
        return out

    def _run(self, x: Tensor) -> Tensor:
        """op of x in float32 at least, on a copy: an op may work in place."""
        narrow = {}
        if isinstance(self.op, nn.Module):
            held = chain(self.op.named_parameters(), self.op.named_buffers())
            narrow = {name: part.float() for name, part in held if part.dtype in (torch.bfloat16, torch.float16)}
        with without_autocast(x.device):
            y = torch.func.functional_call(self.op, narrow, (x.clone(),)) if narrow else self.op(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise ValueError(f"op must map (B, T, C) to the same shape, got {got} from {tuple(x.shape)}.")
        if y.dtype != x.dtype:
            raise TypeError(f"op must return the dtype of its input, {x.dtype}, got {y.dtype}; cast its result.")
        return y

    @torch.no_grad()
    def _check_op(self, like: Tensor) -> None:
        """Raise unless op of some numbers >= 0, most of them near 0, shaped as `like`, is as it must be."""
        generator = torch.Generator().manual_seed(0)
        x, factor = (
            torch.rand(shape, generator=generator, device="cpu").to(like) for shape in (like.shape, like.shape[-1:])
        )
        x, past = x**8, torch.arange(x.shape[1], device=x.device)[:, None] < (x.shape[1] + 1) // 2
        total, negated, after, scaled = (self._run(part) for part in (x, -x * past, x * ~past, x * factor))
        for wanted, error in {
            "be non-negative, got a negative weight or NaN; pass its weights through a softplus": total.clamp(max=0),
            "be linear, got op(x + y) that is not op(x) + op(y)": total + negated - after,
            "be causal, got a result for a token that depends on later ones": after * past,
            "leave channels apart, got a result in one channel that depends on another": scaled - total * factor,
        }.items():
            if not bool((error.abs() <= 10 * _ROUNDING * total.abs().amax()).all()):
                raise ValueError(f"op must {wanted}.")
        if x.shape[1] > 1:  # else nothing came before
            self._tried = True
            self._noise = float((after * past).abs().amax() / total.abs().amax().clamp_min(SMALLEST))
