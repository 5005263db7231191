"""Sums in which older terms decay."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import portable, scan_backend, transformed
from fem.ops.common.operator import operator
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import connected_zeros
from fem.ops.common.recurrence import decay_after, running_sums, sums_before
from fem.ops.common.steps import along_time


def decay_scan(
    log_decay: Float[Tensor, "b t *c"],
    u: Float[Tensor, "b t *c"],
    initial_state: Float[Tensor, " b *c"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "b t *c"]:
    """`fem.functional.decay_scan` of checked shapes and any values: positive decays grow, and NaN stays NaN."""
    backend = scan_backend(backend, u.device, compute_dtype(u, log_decay, initial_state))
    dtype = compute_dtype(log_decay, u)
    if u.numel() == 0:
        return connected_zeros(u, u.shape, log_decay, u, initial_state)
    if initial_state is None:
        initial_state = torch.zeros_like(u[:, 0], dtype=dtype)
    flat = [log_decay.flatten(2), u.flatten(2), initial_state.flatten(1)]
    flat = [tensor.to(torch.float64 if backend == "reference" else dtype) for tensor in flat]
    steps = backend == "reference" or portable() or transformed(*flat)
    h = _step_by_step(*flat) if steps else _decay_scan(*flat, False, backend == "triton")
    return h.view(u.shape).to(u.dtype)


def _step_by_step(log_decay: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """By steps that PyTorch can transform and export."""

    def step(before, factor, u):
        h = torch.addcmul(u, factor, before[0])
        return [h], [h]

    return along_time(step, [state.unsqueeze(1)], log_decay.exp(), u)[1][0]


def by_hgrn(log_decay: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """h of (B, T, C) from (B, C), by flash-linear-attention."""
    from fla.ops.hgrn import fused_recurrent_hgrn

    log_decay, u, state = (x.float().contiguous() for x in (log_decay, u, state))
    return fused_recurrent_hgrn(u, log_decay, state)[0]


@operator("decay_scan(Tensor log_decay, Tensor u, Tensor initial, bool backwards, bool kernels) -> Tensor")
def _decay_scan(log_decay, u, initial, backwards, kernels):
    if not kernels:
        return running_sums(log_decay, u, initial, backwards)
    turned = lambda x: x.flip(1) if backwards else x  # noqa: E731
    return turned(by_hgrn(turned(log_decay), turned(u), initial))


@_decay_scan.register_fake
def _(log_decay, u, initial, backwards, kernels):
    return torch.empty_like(u, memory_format=torch.contiguous_format)


def _save_decay_scan(ctx, inputs, output):
    log_decay, _, initial, ctx.backwards, ctx.kernels = inputs
    ctx.save_for_backward(log_decay, initial, output)


def _differentiate_decay_scan(ctx, grad):
    """The same recurrence the other way, which can itself be differentiated."""
    log_decay, initial, h = ctx.saved_tensors
    after, before = decay_after(log_decay, ctx.backwards), sums_before(h, initial, ctx.backwards)
    du = _decay_scan(after, grad, torch.zeros_like(initial), not ctx.backwards, ctx.kernels)
    through = log_decay.exp() * du
    return through * before, du, through[:, -1 if ctx.backwards else 0], None, None


_decay_scan.register_autograd(_differentiate_decay_scan, setup_context=_save_decay_scan)
