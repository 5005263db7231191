"""Inputs for the recurrent reads, so that one test states a promise for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fem import functional
from fem.ops.channel_scan.naive import naive_channel_scan_read
from fem.ops.ssm.naive import naive_ssm_read

KINDS = ("aft", "decay", "both", "ssm")
HEADS, WIDTH, RANK = 2, 3, 4
DEFINITIONS = {"channel_scan_read": naive_channel_scan_read, "ssm_read": naive_ssm_read}


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


def state_equation(inputs: Case) -> tuple[Tensor, Tensor]:
    """y(v) / y(1) and log(y(e^{beta v}) / y(1)) / beta of a state space model, step by step."""
    delta, A, B, C, D, v, beta = inputs.arguments()
    states, means, energies = torch.zeros(3, *v[:, 0].shape, A.shape[-1], dtype=v.dtype), [], []
    for t in range(v.shape[1]):
        x = torch.stack([torch.ones_like(v[:, t]), v[:, t], (beta * v[:, t]).exp()])
        states = (delta[:, t, ..., None] * A).exp() * states + (x * delta[:, t])[..., None] * B[:, t, None, None]
        one, mean, energy = (states * C[:, t, None, None]).sum(-1) + D * x
        means.append(mean / one)
        energies.append((energy / one).log() / beta)
    return torch.stack(means, 1), torch.stack(energies, 1)


def check_gradients_through_the_state(inputs: Case, limit: float, gradient_limit: float) -> None:
    """The kernels' read in two pieces, its last state and all gradients are those of the whole in float64."""
    parts = ("peak", "total", "weighted", "free_energy")
    whole = inputs.map(lambda x: x.double()).leaves()
    halves = whole.map(lambda x: x.float()).leaves()
    first, state = halves.at(slice(0, 6)).read(return_state=True, backend="triton")
    second, state = halves.at(slice(6, None)).read(initial_state=state, return_state=True, backend="triton")
    read, exact = whole.read(return_state=True)

    def outputs(read, state):
        peak, total, weighted, free_energy = (state.memory[name] for name in parts)
        return [*read, peak + total.log(), weighted / total, free_energy]

    got = outputs([torch.cat(pair, 1) for pair in zip(first, second, strict=True)], state)
    wanted = outputs(read, exact)
    weights = [torch.randn_like(part) for part in wanted]
    expected = gradients(wanted, whole, weights)
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < limit
    for name, gradient in gradients(got, halves, weights).items():
        assert error(gradient, expected[name]) < gradient_limit, name


def check_that_backends_continue_each_other(inputs: Case) -> None:
    """12 tokens, masked and packed, in pieces by the kernels and by the plain scan, are read as the whole is."""
    ids, mask = torch.tensor([[0] * 5 + [3] * 7, [1] * 10 + [2] * 2]), torch.rand(2, 12) > 0.2
    whole = inputs.read(key_mask=mask, segment_ids=ids)
    state, pieces, first = None, [], 0
    for size, backend in ((5, "triton"), (1, "triton"), (2, "plain"), (4, "triton")):
        piece = slice(first, first + size)
        options = {"key_mask": mask[:, piece], "segment_ids": ids[:, piece], "backend": backend}
        read, state = inputs.at(piece).read(initial_state=state, return_state=True, **options)
        pieces.append(read)
        first += size
    for wanted, *parts in zip(whole, *pieces, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1)[mask], wanted[mask], rtol=1e-5, atol=1e-5)
