"""Doubtful entries of the free energy computed again by our kernels: what `recompute.py` does, unseen by the host.

Without a gradient of the bias. Gradients repeat bit by bit and cannot be differentiated again.
"""

from __future__ import annotations

import torch
import triton

from fem.ops.common.backend import next_width
from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.kernels.launch import on_its_device
from fem.ops.softmax.kernels import entries as kernels

ROWS = 32  # queries of a program
_TILE = 1024  # entries of a tile of keys or values in float64
_FLAGS = 1024  # read at a time


def _arguments(q, k, v, beta, bias, first, end, causal, scale):
    """The inputs as the kernels take them, their strides and sizes, and the kernels' constants."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
    if bias is not None:
        bias = bias.expand(len(q), q.shape[2], q.shape[1], k.shape[1])
    inputs = q, k, v, beta.contiguous(), bias, *(None if x is None else x.int().contiguous() for x in (first, end))
    sizes = *strides, *((0,) * 4 if bias is None else bias.stride()), q.shape[1], k.shape[1], q.shape[2]
    widths = {"BLOCK_K": next_width(q.shape[3]), "BLOCK_V": next_width(v.shape[3])}
    constants = widths | {
        "GROUP": q.shape[2] // k.shape[2],
        "K": q.shape[3],
        "V": v.shape[3],
        "SCALE": scale,
        "CAUSAL": causal,
        "MANY": first is not None and len(first) > 1,
        "ROWS": ROWS,
        "KEYS": max(2, _TILE // max(widths.values())),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return inputs, sizes, constants


_INPUTS = (
    "Tensor doubtful, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? bias, Tensor? first, Tensor? end, "
    "bool causal, float scale"
)


@torch.library.custom_op(
    "fem::softmax_recompute_triton",
    mutates_args=(),
    schema=f"(Tensor free_energy, {_INPUTS}) -> (Tensor out, Tensor normaliser, Tensor found)",
)
@on_its_device
def recompute_on_device(free_energy, doubtful, *others):
    inputs, sizes, constants = _arguments(*others)
    out, normaliser, found = _empty(free_energy)
    counter = fallbacks.counter(free_energy.numel(), out.device)
    grid = found.shape[2], found.shape[1], found.shape[0]
    given = (x.contiguous() for x in (free_energy, doubtful))
    kernels.free_energies[grid](*given, *inputs, out, normaliser, found, counter, *sizes, **constants)
    return out, normaliser, found


def _empty(free_energy):
    batch, queries, heads, _ = free_energy.shape
    blocks = (queries + ROWS - 1) // ROWS
    normaliser = free_energy.new_empty(batch, heads, queries, dtype=torch.float64)
    found = free_energy.new_empty(batch, heads, blocks, dtype=torch.int32)
    return free_energy.new_empty(free_energy.shape), normaliser, found


@recompute_on_device.register_fake
def _(free_energy, doubtful, *others):
    return _empty(free_energy)


@torch.library.custom_op(
    "fem::softmax_recompute_triton_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}, Tensor free_energy, Tensor normaliser, Tensor found) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbeta)",
)
@on_its_device
def _backward(grad, doubtful, *others):
    *others, free_energy, normaliser, found = others
    inputs, sizes, constants = _arguments(*others)
    q, k, v = others[:3]
    gradients = dq, dk, dv, dbeta = _empty_gradients(q, k, v, found)
    batch, heads, blocks = found.shape
    grid = blocks + triton.cdiv(k.shape[1], constants["KEYS"]), heads, batch
    given = (x.contiguous() for x in (grad, doubtful))
    constants["BLOCKS"] = min(_FLAGS, triton.next_power_of_2(blocks))
    kernels.gradients[grid](*given, *inputs, free_energy, normaliser, found, *gradients, *sizes, **constants)
    return dq, dk, dv, dbeta


def _empty_gradients(q, k, v, found):
    dbeta = q.new_empty(*found.shape, v.shape[3], dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dbeta


@_backward.register_fake
def _(grad, doubtful, q, k, v, *others):
    return _empty_gradients(q, k, v, others[-1])


def _save(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale = inputs[1:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, *_):
    *tensors, out, normaliser, found = ctx.saved_tensors
    beta = tensors[4]
    dq, dk, dv, parts = _backward(grad, *tensors, ctx.causal, ctx.scale, out, normaliser, found)
    dbeta = parts.sum((0, 2)).unflatten(0, (len(beta), -1)).sum(1).to(beta.dtype)
    return grad, None, dq, dk, dv, dbeta, *[None] * 5


recompute_on_device.register_autograd(_differentiate, setup_context=_save)
