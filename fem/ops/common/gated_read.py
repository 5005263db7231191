"""The two gates of Eq. 11 in one pass over the read, which keeps nothing but its inputs for the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.precision import upcast
from fem.ops.common.steps import portable
from fem.ops.common.transforms import again_differentiable, transformed

Heads = Float[Tensor, "*t h d"]

_BLOCK = 1 << 16  # elements at a time on a CPU, so that the chain of element-wise steps stays in the cache


def outer_gate(logits: Float[Tensor, "... d"], eps: float) -> Float[Tensor, "... d"]:
    """g = softplus(logits) / rms(softplus(logits)), the mean square taken over the head's channels."""
    g = F.softplus(logits)
    return g * torch.rsqrt(g.square().mean(-1, keepdim=True) + eps)


def gated_read(mean: Heads, free_energy: Heads | None, inner: Heads | None, outer: Heads | None, eps: float) -> Heads:
    """o = g ((1 - lambda) mean + lambda F), lambda = sigmoid(inner), g = outer_gate(outer).                 (Eq. 11)

    Without `inner` the read stands alone: F if there is one, else the mean; without `outer` g = 1. Computed in float32
    at least; o has the dtype of the mean.
    """
    if inner is None and free_energy is not None:
        mean = free_energy
    if inner is None and outer is None:
        return mean
    free_energy = free_energy if inner is not None else None
    if not torch.is_grad_enabled():
        if torch.compiler.is_compiling():  # the compiler fuses it
            return _gate(mean, free_energy, inner, outer, eps)
        if mean.numel() <= _BLOCK:
            of_a_stream = mean.dim() == 3 and mean.is_cpu and type(mean) is Tensor  # (B, H, d), without time
            gate = _gate_of_a_token if of_a_stream and inner is not None and outer is not None else _gate
            return gate(mean, free_energy, inner, outer, eps)
    if portable() or transformed(mean, free_energy, inner, outer):
        return _gate(mean, free_energy, inner, outer, eps)
    return _gated_read(mean, free_energy, inner, outer, eps)


def _gate(mean: Heads, free_energy: Heads | None, inner: Heads | None, outer: Heads | None, eps: float) -> Heads:
    u = upcast(mean) if inner is None else torch.lerp(upcast(mean), upcast(free_energy), upcast(inner).sigmoid())
    return (u if outer is None else u * outer_gate(upcast(outer), eps)).to(mean.dtype)


def _gate_of_a_token(mean: Heads, free_energy: Heads, inner: Heads, outer: Heads, eps: float) -> Heads:
    """`_gate` where calls are all it costs, its last bit apart: o = sqrt(d) u g / hypot(|g|, sqrt(d eps))."""
    width = outer.shape[-1]
    u = torch.lerp(upcast(mean), upcast(free_energy), upcast(inner).sigmoid())
    g = F.softplus(upcast(outer))
    nothing, floor = _constants(math.sqrt(width * eps), g.dtype)
    norm = torch.hypot(torch.linalg.vector_norm(g, dim=-1, keepdim=True), floor)
    return torch.addcdiv(nothing, u * g, norm, value=math.sqrt(width)).to(mean.dtype)


@lru_cache
def _constants(floor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """0 and `floor`: as numbers, each call would make tensors of them."""
    return torch.zeros((), dtype=dtype), torch.tensor(floor, dtype=dtype)


@torch.library.custom_op(
    "fem::gated_read",
    mutates_args=(),
    schema="(Tensor mean, Tensor? free_energy, Tensor? inner, Tensor? outer, float eps) -> Tensor",
)
def _gated_read(mean, free_energy, inner, outer, eps):
    out = torch.empty(mean.shape, dtype=mean.dtype, device=mean.device)
    for o, m, f, a, b in _blocks(out, mean, free_energy, inner, outer):
        o.copy_(_gate(m, f, a, b, eps))
    return out


@_gated_read.register_fake
def _(mean, free_energy, inner, outer, eps):
    return torch.empty(mean.shape, dtype=mean.dtype, device=mean.device)


@torch.library.custom_op(
    "fem::gated_read_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor mean, Tensor? free_energy, Tensor? inner, Tensor? outer, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _gated_read_backward(grad, mean, free_energy, inner, outer, eps):
    gradients = _gradients(mean, free_energy, inner, outer)
    of = lambda index, source: None if source is None else gradients[index]  # noqa: E731
    inputs = (grad, mean, free_energy, inner, outer)
    outputs = (gradients[0], of(1, free_energy), of(2, inner), of(3, outer))
    for o, m, f, a, b, dm, df, da, db in _blocks(*inputs, *outputs):
        o, m = upcast(o), upcast(m)
        lam = None if a is None else upcast(a).sigmoid()
        if b is not None:
            u = m if a is None else torch.lerp(m, upcast(f), lam)
            b = upcast(b)
            g = F.softplus(b)
            scale = torch.rsqrt(g.square().mean(-1, keepdim=True) + eps)
            dg = u.mul_(o) if a is not None else u * o
            o = o * g * scale
            projection = (dg * g).mean(-1, keepdim=True) * scale.square()
            db.copy_(dg.addcmul_(g, projection, value=-1).mul_(scale).mul_(b.sigmoid()))
        if a is None:
            dm.copy_(o)
            continue
        through = o * lam
        dm.copy_(o - through)
        df.copy_(through)
        da.copy_(through.mul_(1 - lam).mul_(upcast(f) - m))
    return gradients


@_gated_read_backward.register_fake
def _(grad, mean, free_energy, inner, outer, eps):
    return _gradients(mean, free_energy, inner, outer)


def _gradients(mean, free_energy, inner, outer):
    like = lambda x: mean.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)  # noqa: E731
    return like(mean), like(free_energy), like(inner), like(outer)


def _save(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    tensors = ctx.saved_tensors
    if torch.is_grad_enabled():
        return *again_differentiable(lambda *x: [_gate(*x, ctx.eps)], tensors, [grad]), None
    gradients = _gated_read_backward(grad, *tensors, ctx.eps)
    return *(None if x is None else g for x, g in zip(tensors, gradients)), None


_gated_read.register_autograd(_differentiate, setup_context=_save)


def _blocks(*tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The tensors (B, T, H, d) in parts by rows and tokens: cache-sized on a CPU, all at once on a GPU."""
    first = tensors[0]
    rows, time, width = first.shape[0], first.shape[1], first.shape[2] * first.shape[3]
    room = _BLOCK if first.device.type == "cpu" else max(1, first.numel())
    few_rows, few_tokens = max(1, room // max(1, time * width)), max(1, room // max(1, width))
    for row in range(0, rows, few_rows):
        for start in range(0, time, few_tokens):
            yield tuple(None if x is None else x[row : row + few_rows, start : start + few_tokens] for x in tensors)
