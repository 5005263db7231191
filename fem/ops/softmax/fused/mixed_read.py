"""A softmax layer between its input and its output map in few launches on a GPU: one product, the read, both gates.

    [q | k | v | inner | outer] = W x + b        o = g ((1 - lambda) mean + lambda F)               (Eq. 4, 7, 10, 11)

The product's result is one tensor, of which the kernels read and write columns: q and k are turned in place, and the
gradients of all maps are written side by side, so that one product makes dW and one dx. Beside products, sums over
tokens and torch's attention there are 5 launches forward and 7 backward. Nothing waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.launch import on
from fem.ops.common.operator import operator
from fem.ops.softmax.fused import doubt_kernels as doubt
from fem.ops.softmax.fused import elementwise_kernels as K
from fem.ops.softmax.fused import fused_attention
from fem.ops.softmax.fused.layer_form import SPANS, TILE_NUMBERS, Form, Sizes, rows_of_tile, sizes_of

BACKWARD_WARPS = 8  # of the largest kernel: with 4 it holds 150 registers a thread, and too few tiles are under way
PART = 256  # tokens whose extremes one program finds


def mixed_read(
    form: Form,
    scale: float,
    eps: float,
    x: Float[Tensor, "b t f"],
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
    values: Float[Tensor, "b t hkv d"] | None,
    inner_up: Float[Tensor, "w r"] | None,
    inner_bias: Float[Tensor, " w"] | None,
    outer_up: Float[Tensor, "w r"] | None,
    outer_bias: Float[Tensor, " w"] | None,
    beta: Float[Tensor, "hkv df"] | None,
    cos: Float[Tensor, "t p"] | None,
    sin: Float[Tensor, "t p"] | None,
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence of 16-bit numbers, differentiable once. beta, cos and sin are float32.

    values: v where it is no columns of the product. inner_up to outer_bias: the second maps of slim gates.
    Raises RuntimeError where its gradient is to be differentiated.
    """
    tensors = (x, weight, bias, values, inner_up, inner_bias, outer_up, outer_bias, beta, cos, sin)
    if torch.compiler.is_compiling():
        return _operator(*tensors, list(map(int, form)), scale, eps)[0]
    return _MixedRead.apply(*tensors, form, scale, eps)


def prefill(form: Form, scale: float, eps: float, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`mixed_read` without a gradient, and the turned keys and the values that a cache keeps, (B, T, H_kv, .)."""
    if torch.compiler.is_compiling():
        o, joint, *_ = _operator(*tensors, list(map(int, form)), scale, eps)
    else:
        o, joint, *_ = _mixed_forward(*tensors, form, scale, eps)
    _, k, v, *_ = form.parts(joint)
    return o, k, tensors[3] if v is None else v


_TENSORS = 11


class _MixedRead(torch.autograd.Function):
    """o, in eager calls; a compiled graph has the operators below."""

    @staticmethod
    def forward(ctx, *inputs):
        kept = _mixed_forward(*inputs)
        ctx.save_for_backward(*inputs[:_TENSORS], *kept)
        ctx.options = inputs[_TENSORS:]
        return kept[0]

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused softmax layer is differentiable once, got create_graph=True; a layer whose configuration "
                'has backend="plain" is differentiable any number of times.'
            )
        return *_mixed_backward(grad, ctx.saved_tensors, *ctx.options), *[None] * 5


def _on_its_device(function: Callable) -> Callable:
    """The function, which launches kernels, on the device of its first argument."""

    @functools.wraps(function)
    def run(x: Tensor, *others):
        with on(x.device):
            return function(x, *others)

    return run


@_on_its_device
def _mixed_forward(*inputs) -> list[Tensor]:
    """o, and what the backward needs: the product, where a free energy is read [v | e], then [mean | R] where o is
    another tensor, the scheme and the flags of a free energy, and the logarithms of attention's sums.
    """
    x, weight, bias, values, *ups, beta, cos, sin, form, scale, eps = inputs
    joint = F.linear(x, weight, bias)
    q, k, v, *gates = form.parts(joint)
    v = values if v is None else v
    (batch, time), sizes = q.shape[:2], sizes_of(form, *q.shape[:2])
    if form.rotary:
        _rotate(q, k, q, k, cos, sin, 1)
    both, scheme = _launch_pack(v, beta, form, sizes) if form.free else (v, None)
    out, lse = fused_attention.kernel_attention(q, k, both, scale, form.causal, form.kernel)
    if not form.mixes:
        return [out, joint, lse]
    inner, outer = form.logits(gates, ups)
    inner, outer = (out if gate is None else gate for gate in (inner, outer))  # which no kernel reads
    o = out.new_empty(*q.shape[:3], form.width)
    flags = torch.empty(batch, form.heads, sizes.tiles, dtype=torch.int32, device=o.device)
    K.mix_kernel[sizes.reads](
        out, inner, outer, scheme, beta, o, flags, time, eps, _row_stride(inner), _row_stride(outer), **sizes.mix
    )  # fmt: skip
    if not form.free:
        return [o, joint, out, lse]
    _settle(q, k, v, lse, out, scheme, beta, o, flags, inner, outer, o, scale, eps, form, sizes)
    return [o, joint, both, out, scheme, flags, lse]


def _settle(q, k, v, lse, out, scheme, beta, exact, flags, inner, outer, o, scale, eps, form: Form, sizes: Sizes):
    """Compute the doubtful free energies: write them to `exact`, or where that is o, mixed and gated, to o."""
    doubt.doubtful_rows_kernel[sizes.spans](
        q, k, v, lse, out, scheme, beta, exact, flags, inner, outer, o, q.shape[1], sizes.tiles, scale, eps,
        *map(_row_stride, (q, k, v, inner, outer)), **sizes.doubt, GATED=form.gated, MIXED=exact is o,
        COLUMNS=sizes.mix["COLUMNS"], FLAGS=sizes.flags,
    )  # fmt: skip


class _Doubt(NamedTuple):
    """What the gradient of a free energy needs of its entries that R does not prove, and what tiles give beta."""

    exact: Float[Tensor, "b t h df"]  # float32: bfloat16 would lose what beta's gradient is made of
    d_free: Float[Tensor, "b t h df"]
    tilted: Float[Tensor, "n df"]
    query_parts: Float[Tensor, "nq df"]  # parts of tilted
    value_parts: Float[Tensor, "nv df"]

    @classmethod
    def of(cls, q: Tensor, beta: Tensor, form: Form, tiles: int) -> _Doubt:
        exact = torch.empty(*q.shape[:3], form.free, dtype=torch.float32, device=q.device)
        counts = [q.shape[0] * tiles * heads for heads in (form.heads, form.kv_heads)]
        tilted = beta.new_empty(sum(counts), form.free)
        return cls(exact, torch.empty_like(exact, dtype=q.dtype), tilted, *tilted.split_with_sizes(counts))

    def d_beta(self, form: Form) -> Float[Tensor, "hkv df"]:
        """beta's gradient: the sum over all tiles, of queries and of values."""
        if form.heads == form.kv_heads:
            return self.tilted.view(-1, form.kv_heads, form.free).sum(0)
        query_parts = self.query_parts.view(-1, form.kv_heads, form.heads // form.kv_heads, form.free).sum((0, 2))
        return query_parts + self.value_parts.view(-1, form.kv_heads, form.free).sum(0)


@_on_its_device
def _mixed_backward(
    grad: Tensor, kept: Sequence[Tensor | None], form: Form, scale: float, eps: float
) -> list[Tensor | None]:
    """Gradients of the first nine inputs: x, weight, bias, values, the second maps of slim gates, and beta."""
    x, weight, bias, values, *ups, beta, cos, sin = kept[:_TENSORS]
    o, joint, *rest, lse = kept[_TENSORS:]
    d_joint, d_values = torch.empty_like(joint), None if values is None else torch.empty_like(values)
    q, k, v, *gates = form.parts(joint)
    to_q, to_k, d_v, *d_gates = form.parts(d_joint)
    v, d_v = (v, d_v) if values is None else (values, d_values)
    both, out, scheme, flags = rest if form.free else (v, *(rest or [o]), None, None)
    sizes = sizes_of(form, *q.shape[:2])
    known = (q, k, v, lse, out, scheme, beta)
    doubtful = _Doubt.of(q, beta, form, sizes.tiles) if form.free else None

    d_out, d_ups = grad.contiguous(), [None] * 4
    if form.mixes:
        d_out, d_ups = _through_gates(d_out, known, flags, doubtful, o, gates, ups, d_gates, form, scale, eps, sizes)
    d_q, d_k, d_both = fused_attention.kernel_attention_backward(
        d_out, q, k, both, out, lse, scale, form.causal, form.kernel
    )
    d_beta = None
    if form.free:
        _through_values(d_both, d_q, d_k, d_v, known, flags, doubtful, form, scale, sizes)
        d_beta = doubtful.d_beta(form)
    else:
        d_v.copy_(d_both)
    if form.rotary:
        _rotate(d_q, d_k, to_q, to_k, cos, sin, -1)
    else:
        to_q.copy_(d_q)
        to_k.copy_(d_k)

    del d_q, d_k, d_both, d_out, doubtful  # before dx is allocated
    flat = d_joint.flatten(0, 1)
    d_x = (flat @ weight).view(*d_joint.shape[:2], -1)
    return [d_x, flat.T @ x.flatten(0, 1), None if bias is None else flat.sum(0), d_values, *d_ups, d_beta]


def _through_gates(grad, known, flags, doubtful: _Doubt | None, o, gates, ups, d_gates, form: Form, scale, eps, sizes):
    """The gradient of [mean | R], and those of the second maps of slim gates; writes those of the gates' columns."""
    q, k, v, lse, out, scheme, beta = known
    inner, outer = form.logits(gates, ups)
    slim = [torch.empty_like(gate) if form.rank and gate is not None else None for gate in (inner, outer)]
    to_inner, to_outer = (d if own is None else own for d, own in zip(d_gates, slim))
    inner, outer, to_inner, to_outer = (out if y is None else y for y in (inner, outer, to_inner, to_outer))
    exact = d_free = query_parts = None
    if doubtful is not None:
        exact, d_free, _, query_parts, _ = doubtful
        _settle(q, k, v, lse, out, scheme, beta, exact, flags, inner, outer, o, scale, eps, form, sizes)
    d_out = torch.empty_like(out)
    K.mix_backward_kernel[sizes.reads](
        grad, out, inner, outer, scheme, beta, exact, flags, d_out, to_inner, to_outer, d_free, query_parts, q.shape[1],
        eps, *map(_row_stride, (inner, outer, to_inner, to_outer)), **sizes.mix, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    return d_out, _through_second_maps(gates, ups, slim, d_gates) if form.rank else [None] * 4


def _through_values(d_both, d_q, d_k, d_v, known, flags, doubtful: _Doubt, form: Form, scale: float, sizes: Sizes):
    """Write d_v from the gradient of [v | e]; add to d_q, d_k and d_v what goes through doubtful entries."""
    q, k, v, _, _, scheme, beta = known
    batch, time = q.shape[:2]
    exact, d_free, _, query_parts, value_parts = doubtful
    K.pack_backward_kernel[sizes.values](
        d_both, v, scheme, beta, d_v, value_parts, time, _row_stride(v), _row_stride(d_v), form.width, **sizes.pack
    )
    inputs, rows = (*known, exact, flags, d_free), (_row_stride(q), _row_stride(k), _row_stride(v))
    doubt.doubtful_queries_backward_kernel[sizes.spans](
        *inputs, d_q, query_parts, time, sizes.tiles, scale, *rows, _row_stride(d_q), **sizes.doubt, FLAGS=sizes.flags
    )
    doubt.doubtful_keys_backward_kernel[(form.kv_heads, SPANS, batch)](
        *inputs, d_k, d_v, time, sizes.tiles, scale, *rows, _row_stride(d_k), _row_stride(d_v), **sizes.doubt,
        FLAGS=triton.next_power_of_2(sizes.tiles * form.heads // form.kv_heads),
    )  # fmt: skip


def _through_second_maps(gates, ups, d_logits, d_gates) -> list[Tensor | None]:
    """Write the gradients of what the first maps of slim gates gave; return those of the second maps and biases."""
    found = []
    for z, d_z, d, up, bias in zip(gates, d_gates, d_logits, ups[::2], ups[1::2]):
        if z is None:
            found += [None, None]
            continue
        d = d.flatten(2).flatten(0, 1)
        torch.mm(d, up, out=d_z.flatten(0, 2))
        found += [d.T @ z.flatten(0, 2), None if bias is None else d.sum(0)]
    return found


def _row_stride(x: Tensor) -> int:
    """Numbers from one token of (B, T, H, d) to the next, of rows that lie one after another."""
    return x.stride(1)


def _rotate(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    batch, time, heads, width = q.shape
    half = triton.next_power_of_2(width // 2)
    rows = max(1, TILE_NUMBERS // half)
    K.rotate_kernel[((heads + k.shape[2]) * triton.cdiv(batch * time, rows),)](
        q, k, q_out, k_out, cos, sin, batch * time, time, *map(_row_stride, (q, k, q_out, k_out)), heads, k.shape[2],
        WIDTH=width, SIGN=sign, ROWS=rows, HALF=half,
    )  # fmt: skip


def _launch_pack(v: Tensor, beta: Tensor, form: Form, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """[v | e] and its scheme."""
    (batch, time), free_at = v.shape[:2], 0 if form.shared else form.mean
    parts = triton.cdiv(time, PART)
    extremes = beta.new_empty(batch, parts, 2, form.kv_heads * form.free)
    grid = (form.kv_heads, parts, batch)
    K.extremes_kernel[grid](
        v, extremes, time, PART, _row_stride(v), free_at, form.width, form.free,
        ROWS=sizes.mix["ROWS"], COLUMNS=sizes.doubt["CHANNELS"],
    )  # fmt: skip
    both = v.new_empty(*v.shape[:3], form.mean + form.free)
    scheme = extremes.new_empty(batch, 2, form.kv_heads * form.free)
    K.pack_kernel[sizes.values](
        v, extremes, beta, both, scheme, time, parts, _row_stride(v), form.width, **sizes.pack,
        PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return both, scheme


# --- for torch.compile: the same as two operators, which it does not look into ---------------------------------------

_MIXED_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? values, Tensor? inner_up, Tensor? inner_bias, Tensor? outer_up, "
    "Tensor? outer_bias, Tensor? beta, Tensor? cos, Tensor? sin"
)
_OPTIONS = "int[] form, float scale, float eps"


@operator(f"mixed_read({_MIXED_INPUTS}, {_OPTIONS}) -> Tensor[]", waits=False)
def _operator(*inputs):
    *tensors, form, scale, eps = inputs
    return _mixed_forward(*tensors, Form(*form), scale, eps)


@_operator.register_fake
def _(*inputs):
    """The shapes of what `_mixed_forward` returns."""
    x, weight, *_, form, _, _ = inputs
    form, (batch, time) = Form(*form), x.shape[:2]
    head = lambda width, heads=form.heads: x.new_empty(batch, time, heads, width)  # noqa: E731
    o, joint = head(form.width), x.new_empty(batch, time, weight.shape[0])
    lse = x.new_empty(batch, form.heads, time, dtype=torch.float32)
    if not form.free:
        return [o, joint, *([head(form.width)] if form.gated else []), lse]
    summed = form.mean + form.free
    scheme = lse.new_empty(batch, 2, form.kv_heads * form.free)
    flags = lse.new_empty(batch, form.heads, -(-time // rows_of_tile(form)), dtype=torch.int32)
    return [o, joint, head(summed, form.kv_heads), head(summed), scheme, flags, lse]


@operator(f"mixed_read_backward(Tensor grad, {_MIXED_INPUTS}, Tensor[] kept, {_OPTIONS}) -> Tensor[]", waits=False)
def _operator_backward(grad, *inputs):
    *tensors, kept, form, scale, eps = inputs
    return [d for d in _mixed_backward(grad, (*tensors, *kept), Form(*form), scale, eps) if d is not None]


@_operator_backward.register_fake
def _(grad, *inputs):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[: _TENSORS - 2] if x is not None]


def _save(ctx, inputs, output):
    ctx.options = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *output)


def _differentiate(ctx, grads):
    inputs, kept = ctx.saved_tensors[:_TENSORS], ctx.saved_tensors[_TENSORS:]
    gradients = iter(_operator_backward(grads[0], *inputs, list(kept), *ctx.options))
    return *(None if x is None else next(gradients) for x in inputs[: _TENSORS - 2]), *[None] * 5


_operator.register_autograd(_differentiate, setup_context=_save)
