"""Every scan read with its inputs and its definition as a table of scores, for tests of what all reads promise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem import functional

RECURRENT = ("aft", "decay", "aft with decay", "ssm")
READS = ("linear", "gla", "gla by channel", *RECURRENT)
SHARED = ("beta", "A", "D")


@dataclass(frozen=True)
class ScanCall:
    """One read and its arguments by name."""

    op: str
    arguments: dict[str, Tensor | None]

    def read(self, **options):
        return getattr(functional, self.op)(**self.arguments, **options)

    def tensors(self) -> list[Tensor]:
        return [x for x in self.arguments.values() if x is not None]

    @property
    def along(self) -> dict[str, Tensor]:
        """The arguments with a time dimension."""
        return {n: x for n, x in self.arguments.items() if x is not None and n not in SHARED}

    def map(self, change) -> ScanCall:
        return replace(self, arguments={n: None if x is None else change(x) for n, x in self.arguments.items()})

    def set(self, **tensors: Tensor) -> ScanCall:
        return replace(self, arguments=self.arguments | tensors)

    def at(self, piece: slice | list[int] | Tensor) -> ScanCall:
        kept = {n: x if x is None or n in SHARED else x[:, piece] for n, x in self.arguments.items()}
        return replace(self, arguments=kept)

    def leaves(self, dtype: torch.dtype | None = None) -> ScanCall:
        return self.map(lambda x: x.detach().to(dtype or x.dtype).clone().requires_grad_())

    def in_pieces(self, *sizes: int, **marks: Tensor):
        """The joined reads of calls that hand the state on; marks: masks and documents."""
        reads, state, first = [], None, 0
        for size in sizes:
            piece = slice(first, first + size)
            here = {name: mark[:, piece] for name, mark in marks.items()}
            read, state = self.at(piece).read(initial_state=state, return_state=True, **here)
            reads.append(read)
            first += size
        return type(read)(*(torch.cat(parts, 1) for parts in zip(*reads)))

    def definition(self):
        """The causal read from a table of all scores' logarithms, in the dtype of the inputs."""
        given = self.arguments
        v, beta = given["v"], given["beta"]
        if self.op == "keyed_scan_read":
            scores = given["q"].log().unsqueeze(2) + given["k"].log().unsqueeze(1)
            if given["log_decay"] is not None:
                decay = given["log_decay"]
                scores = scores + between(decay if decay.ndim == 4 else decay.unsqueeze(-1))
            scores = scores.logsumexp(-1).unsqueeze(-1)
        elif self.op == "channel_scan_read":
            weight = torch.zeros_like(v) if given["log_weight"] is None else given["log_weight"]
            scores = weight.unsqueeze(1)
            scores = (
                scores.expand(-1, v.shape[1], -1, -1, -1)
                if given["log_decay"] is None
                else scores + between(given["log_decay"])
            )
        else:
            delta, B, C = given["delta"], given["B"], given["C"]
            scores = between(delta.unsqueeze(-1) * given["A"]) + delta.log().unsqueeze(1).unsqueeze(-1)
            scores = scores + B.log()[:, None, :, None, None] + C.log()[:, :, None, None, None]
            scores = scores.logsumexp(-1)
            itself = torch.eye(v.shape[1], dtype=torch.bool)[None, :, :, None, None]
            skip = torch.where(itself, given["D"].log(), -torch.inf)
            scores = torch.logaddexp(scores, skip)
        later = torch.ones(v.shape[1], v.shape[1], dtype=torch.bool).triu(1)[None, :, :, None, None]
        return free_energies(scores.masked_fill(later, -torch.inf).log_softmax(2), v.unsqueeze(1), beta)


def free_energies(log_p: Tensor, v: Tensor, beta: Tensor) -> functional.Read:
    """Mean and free energy along dim 2: of e^z - 1 where z = beta (v - mean) is small, so that F keeps its digits."""
    p = log_p.exp()
    mean = (p * v).sum(2)
    z = beta * (v - mean.detach().unsqueeze(2))
    near = torch.log1p((p * torch.expm1(z.clamp(max=1))).sum(2)) / beta + mean.detach()
    far = (log_p + beta * v).logsumexp(2) / beta
    return functional.Read(mean, torch.where(((z.abs() < 1) | (p == 0)).all(2), near, far))


def between(decay: Tensor) -> Tensor:
    """sum_{i<r<=t} decay_r at (t, i), 0 for i >= t: summed, not subtracted."""
    time = decay.shape[1]
    later = torch.ones(time, time, dtype=torch.bool).tril(-1)
    later = later.view(1, time, time, *(1,) * (decay.ndim - 2))
    return torch.where(later, decay.unsqueeze(2), 0).cumsum(1)


def scan_call(
    name: str,
    time: int,
    batch=2,
    heads=2,
    width=3,
    keys=3,
    rank=2,
    beta=2.0,
    spread=1.0,
    weights=2.0,
    decay=0.1,
    dtype=torch.float32,
):
    """Values of that spread, log-weights (or logarithms of features) of that size, decays of that many nats a token.

    The numbers are drawn in float64, so that those of other dtypes are these, rounded.
    """
    to = lambda x: x.to(dtype)  # noqa: E731
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    along = lambda *shape: normal(batch, time, *shape)  # noqa: E731
    v = spread * along(heads, width)
    temperature = beta * (0.5 + torch.rand(heads, width, dtype=torch.float64))
    falls = lambda *shape: -2 * decay * torch.rand(batch, time, *shape, dtype=torch.float64)  # noqa: E731
    if name == "ssm":
        positive = lambda x: softplus(x) + 1e-3  # noqa: E731
        arguments = {
            "delta": positive(along(heads, width)), "A": -10 * decay * softplus(normal(heads, width, rank)),
            "B": positive(along(rank)), "C": positive(along(rank)), "D": positive(normal(heads, width)),
            "v": v, "beta": temperature,
        }  # fmt: skip
        return ScanCall("ssm_read", arguments).map(to)
    if name in ("linear", "gla", "gla by channel"):
        features = lambda: (weights / 2 * along(heads, keys)).exp()  # noqa: E731
        fall = {"linear": None, "gla": (heads,), "gla by channel": (heads, keys)}[name]
        arguments = {"q": features(), "k": features(), "v": v, "beta": temperature}
        arguments["log_decay"] = None if fall is None else falls(*fall)
        return ScanCall("keyed_scan_read", arguments).map(to)
    arguments = {"log_weight": None if name == "decay" else weights * along(heads, width), "v": v, "beta": temperature}
    arguments["log_decay"] = None if name == "aft" else falls(heads, width)
    return ScanCall("channel_scan_read", arguments).map(to)


def gradients_of(call: ScanCall, read, cotangents) -> dict[str, Tensor]:
    names = [n for n, x in call.arguments.items() if x is not None]
    loss = sum((part.double() * c).sum() for part, c in zip(read, cotangents))
    return dict(zip(names, torch.autograd.grad(loss, call.tensors(), materialize_grads=True)))


def relative(got: Tensor, wanted: Tensor, least: float = 1e-30) -> float:
    """The largest error in units of the largest entry, or of `least` where all entries are smaller."""
    wanted = wanted.double()
    return ((got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(least)).item()


def by_reference(call: ScanCall, **options) -> functional.Read:
    return call.read(backend="reference", **options)


def compare(call: ScanCall, wanted_of=by_reference, limit: float = 1e-5, beta_unit=None, **options) -> None:
    """Both reads and all gradients, against those of `wanted_of` in float64.

    beta_unit: of the error of beta's gradient where that is smaller; None: the largest value, as it is a difference of
    averages of them.
    """
    mine, exact = call.leaves(), call.leaves(torch.float64)
    got, wanted = mine.read(**options), wanted_of(exact, **options)
    seen = options.get("key_mask", torch.ones(got.mean.shape[:2])).bool()
    cotangents = [torch.randn_like(part) * seen[:, :, None, None] for part in wanted]
    for name, one, other in zip(got._fields, got, wanted):
        assert one.dtype == call.arguments["v"].dtype
        assert relative(one[seen], other[seen], 0.1) < limit, name
    expected = gradients_of(exact, wanted, cotangents)
    units = {"beta": call.arguments["v"].abs().max() if beta_unit is None else beta_unit}
    for name, gradient in gradients_of(mine, got, cotangents).items():
        assert relative(gradient, expected[name], units.get(name, 0.1)) < limit, name


def state_equation(call: ScanCall) -> functional.Read:
    """y(v) / y(1) and log(y(e^{beta v}) / y(1)) / beta of a state space model, step by step."""
    delta, A, B, C, D, v, beta = call.tensors()
    states, reads = torch.zeros(3, *v[:, 0].shape, A.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        x = torch.stack([torch.ones_like(v[:, t]), v[:, t], (beta * v[:, t]).exp()])
        states = (delta[:, t, ..., None] * A).exp() * states + (x * delta[:, t])[..., None] * B[:, t, None, None]
        one, mean, energy = (states * C[:, t, None, None]).sum(-1) + D * x
        reads.append((mean / one, (energy / one).log() / beta))
    return functional.Read(*(torch.stack(parts, 1) for parts in zip(*reads)))
