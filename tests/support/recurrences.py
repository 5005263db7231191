"""Inputs for the recurrent reads, so that one test states a promise for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fem import functional
from fem.ops.channel_scan.naive import naive_channel_scan_read
from fem.ops.linear_attention.naive import naive_linear_attention_read
from fem.ops.ssm.naive import naive_ssm_read

RECURRENT = ("aft", "decay", "both", "ssm")
KINDS = (*RECURRENT, "linear", "gla", "gla by channel")
HEADS, WIDTH, RANK = 2, 3, 4
DEFINITIONS = {
    "channel_scan_read": naive_channel_scan_read,
    "ssm_read": naive_ssm_read,
    "keyed_scan_read": naive_linear_attention_read,
}


@dataclass(frozen=True)
class Case:
    """Arguments of one read: those with a time dimension, and those that all tokens share."""

    op: str
    order: tuple[str, ...]  # of the arguments
    along: dict[str, Tensor]
    shared: dict[str, Tensor]

    def read(self, **options):
        return getattr(functional, self.op)(*self.arguments(), **options)

    def definition(self, **options):
        return DEFINITIONS[self.op](*self.arguments(), **options)

    def arguments(self) -> list[Tensor | None]:
        return [({**self.along, **self.shared}).get(name) for name in self.order]

    def tensors(self) -> dict[str, Tensor]:
        return {**self.along, **self.shared}

    def at(self, index) -> Case:
        """The tokens `index`: a slice or a list."""
        return replace(self, along={name: tensor[:, index] for name, tensor in self.along.items()})

    def row(self, b: int) -> Case:
        return replace(self, along={name: tensor[b : b + 1] for name, tensor in self.along.items()})

    def map(self, change) -> Case:
        changed = lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}  # noqa: E731
        return replace(self, along=changed(self.along), shared=changed(self.shared))

    def set(self, **tensors: Tensor) -> Case:
        fits = lambda old: {name: tensors.get(name, tensor) for name, tensor in old.items()}  # noqa: E731
        return replace(self, along=fits(self.along), shared=fits(self.shared))

    def leaves(self) -> Case:
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())


def case(kind: str, time: int, batch: int = 2, beta: float = 2.0, spread: float = 1.0, dtype=torch.float32) -> Case:
    """Standard normal values times `spread`; weights and decays of the size that layers produce."""
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    heads = lambda: normal(batch, time, HEADS, WIDTH)  # noqa: E731
    shared = {"beta": beta * (0.5 + torch.rand(HEADS, WIDTH, dtype=torch.float64))}
    along = {"v": spread * heads()}
    if kind == "ssm":
        positive = torch.nn.functional.softplus
        along |= {
            "delta": positive(heads()),
            "B": positive(normal(batch, time, RANK)),
            "C": positive(normal(batch, time, RANK)),
        }
        shared |= {"A": -positive(normal(HEADS, WIDTH, RANK) - 1), "D": positive(normal(HEADS, WIDTH))}
        made = Case("ssm_read", ("delta", "A", "B", "C", "D", "v", "beta"), along, shared)
    elif kind not in RECURRENT:
        along |= {name: 0.1 + torch.rand(batch, time, HEADS, RANK, dtype=torch.float64) for name in "qk"}
        if kind != "linear":
            shape = (batch, time, HEADS, RANK) if kind == "gla by channel" else (batch, time, HEADS)
            along["log_decay"] = -0.2 * torch.rand(shape, dtype=torch.float64)
        made = Case("keyed_scan_read", ("q", "k", "v", "beta", "log_decay"), along, shared)
    else:
        if kind != "decay":
            along["log_weight"] = 2 * heads()
        if kind != "aft":
            along["log_decay"] = torch.nn.functional.logsigmoid(heads()) / 4
        made = Case("channel_scan_read", ("log_weight", "v", "beta", "log_decay"), along, shared)
    return made.map(lambda tensor: tensor.to(dtype))


def gradients(read, leaves: Case, weights) -> dict[str, Tensor]:
    """Gradients of all inputs of the sum of the outputs under fixed weights."""
    loss = sum((part.double() * weight).sum() for part, weight in zip(read, weights))
    return dict(
        zip(leaves.tensors(), torch.autograd.grad(loss, list(leaves.tensors().values()), materialize_grads=True))
    )


def error(got: Tensor, wanted: Tensor, scale: float = 0.1) -> float:
    """The largest error in units of the largest entry, or of `scale` where all entries are smaller."""
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(scale)).item()


def state_equation(delta, A, B, C, D, v, beta) -> tuple[Tensor, Tensor]:
    """y(v) / y(1) and log(y(e^{beta v}) / y(1)) / beta of a state space model, step by step."""
    states, means, energies = torch.zeros(3, *v[:, 0].shape, A.shape[-1], dtype=v.dtype), [], []
    for t in range(v.shape[1]):
        x = torch.stack([torch.ones_like(v[:, t]), v[:, t], (beta * v[:, t]).exp()])
        states = (delta[:, t, ..., None] * A).exp() * states + (x * delta[:, t])[..., None] * B[:, t, None, None]
        one, mean, energy = (states * C[:, t, None, None]).sum(-1) + D * x
        means.append(mean / one)
        energies.append((energy / one).log() / beta)
    return torch.stack(means, 1), torch.stack(energies, 1)
