"""A softmax layer between its input and its output map in few launches on a GPU: one product, the read, both gates.

    [q | k | v | inner | outer] = W x + b        o = g ((1 - lambda) mean + lambda F)               (Eq. 4, 7, 10, 11)

The product's result is one tensor, of which the kernels read and write columns: q and k are turned in place, and the
gradients of all maps are written side by side, so that one product makes dW and one dx. Launches beside the products and
torch's attention: 5 forward (rotation, extremes, pack, mix, doubt) and 7 backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.operator import operator
from fem.ops.softmax.fused import attention, doubt
from fem.ops.softmax.fused import kernels as K

NUMBERS = 1024  # of a tile, 8 for each of its 128 threads
PART = 256  # tokens whose extremes one program finds
SPANS = 8  # programs that share the flags of a head
KEYS = 64  # a block of keys of the kernels of doubt


class Form(NamedTuple):
    """What the kernels of a layer are built for; all numbers, as an operator takes them.

    mean, free: columns of a head of [mean | R]; shared: whether they are of the same channels.
    has_values, has_inner, has_outer: whether v and the gates' logits are columns of the product, or tensors of their own.
    """

    heads: int
    kv_heads: int
    key_width: int
    mean: int
    free: int
    shared: bool
    causal: bool
    rotary: bool
    gated: bool
    has_values: bool
    has_inner: bool
    has_outer: bool
    flash: bool

    @property
    def width(self) -> int:
        """Columns of a head of o, and of v."""
        return self.free if self.shared else self.mean + self.free

    @property
    def kernel(self) -> str:
        return "flash" if self.flash else "cudnn"

    def parts(self, joint: Float[Tensor, "b t c"]) -> list[Tensor | None]:
        """q, k, v and the logits of lambda and g, (B, T, H, d) each, from the product's columns; None: not there."""
        there = (True, True, self.has_values, self.has_inner, self.has_outer)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads, self.heads)
        widths = (self.key_width, self.key_width, self.width, self.width, self.width)
        columns = iter(joint.split_with_sizes([h * w for h, w, is_there in zip(heads, widths, there) if is_there], -1))
        shape = joint.shape[:2]
        return [next(columns).view(*shape, h, w) if is_there else None for h, w, is_there in zip(heads, widths, there)]


def mixed_read(
    form: Form,
    scale: float,
    eps: float,
    x: Float[Tensor, "b t f"],
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
    values: Float[Tensor, "b t hkv d"] | None,
    inner: Float[Tensor, "b t h d"] | None,
    outer: Float[Tensor, "b t h d"] | None,
    beta: Float[Tensor, "hkv df"] | None,
    cos: Float[Tensor, "t p"] | None,
    sin: Float[Tensor, "t p"] | None,
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence of 16-bit numbers, differentiable once. beta, cos and sin are float32.

    values, inner, outer: v and the gates' logits where they are no columns of the product; None: they are, or are not
    read. Raises RuntimeError where its gradient is to be differentiated.
    """
    tensors = (x, weight, bias, values, inner, outer, beta, cos, sin)
    if torch.compiler.is_compiling():
        return _operator(*tensors, list(map(int, form)), scale, eps)[0]
    return _MixedRead.apply(*tensors, form, scale, eps)


class _MixedRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *tensors, form, scale, eps = inputs
        kept = _forward(*inputs)
        ctx.save_for_backward(*tensors, *kept)
        ctx.options = form, scale, eps
        return kept[0]

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused softmax layer is differentiable once, got create_graph=True; a layer whose configuration has "
                'backend="plain" is differentiable any number of times.'
            )
        return *_backward(grad, ctx.saved_tensors, *ctx.options), *[None] * 5


def _forward(
    x, weight, bias, values, inner, outer, beta, cos, sin, form: Form, scale: float, eps: float
) -> list[Tensor]:
    """o, and what the backward needs: the product, and where a free energy is read [v | e], [mean | R], their scheme,
    the free energies that were doubtful and the flags; the logarithms of attention's sums last.
    """
    joint = F.linear(x, weight, bias)
    q, k, v, inner, outer = map(_first, form.parts(joint), (None, None, values, inner, outer))
    batch, time = q.shape[:2]
    sizes = _sizes(form, batch, time)
    if form.rotary:
        _rotate(q, k, q, k, cos, sin, 1)
    if not form.free:
        out, lse = attention.attend(q, k, v, scale, form.causal, form.kernel)
        o = out
        if form.gated:
            o = torch.empty_like(out)
            K.mix_kernel[sizes.reads](out, out, outer, out, out, o, out, time, eps, 0, _row(outer), **sizes.mix)
        return [o, joint, lse] if o is out else [o, joint, out, lse]

    both, scheme = _pack(v, beta, form, sizes)
    out, lse = attention.attend(q, k, both, scale, form.causal, form.kernel)
    o = out.new_empty(*q.shape[:3], form.width)
    exact = out.new_empty(*q.shape[:3], form.free)
    flags = torch.empty(batch, form.heads, sizes.tiles, dtype=torch.int32, device=o.device)
    inner, outer = (out if gate is None else gate for gate in (inner, outer))  # which no kernel reads
    gates = {"inner_row": _row(inner), "outer_row": _row(outer)}
    K.mix_kernel[sizes.reads](out, inner, outer, scheme, beta, o, flags, time, eps, **gates, **sizes.mix)
    doubt.doubtful_rows_kernel[sizes.spans](
        q, k, v, lse, out, scheme, beta, exact, flags, inner, outer, o, time, sizes.tiles, scale, eps,
        _row(q), _row(k), _row(v), **gates, **sizes.doubt, GATED=form.gated, COLUMNS=sizes.mix["COLUMNS"],
        FLAGS=sizes.flags,
    )  # fmt: skip
    return [o, joint, both, out, scheme, exact, flags, lse]


def _backward(grad: Tensor, kept: Sequence[Tensor | None], form: Form, scale: float, eps: float):
    """Gradients of x, weight, bias, values, inner, outer and beta."""
    x, weight, bias, values, inner, outer, beta, cos, sin, o, joint, *rest = kept
    lse, grad, d_joint = rest.pop(), grad.contiguous(), torch.empty_like(joint)
    own = [None if y is None else torch.empty_like(y) for y in (values, inner, outer)]  # gradients
    q, k, v, inner, outer = map(_first, form.parts(joint), (None, None, values, inner, outer))
    to_q, to_k, d_v, d_inner, d_outer = map(_first, form.parts(d_joint), (None, None, *own))
    batch, time = q.shape[:2]
    sizes, d_beta = _sizes(form, batch, time), None
    if form.free:
        both, out, scheme, exact, flags = rest
        inner, outer, d_inner, d_outer = (out if gate is None else gate for gate in (inner, outer, d_inner, d_outer))
        rows = {"inner_row": _row(inner), "outer_row": _row(outer)}
        rows |= {"d_inner_row": _row(d_inner), "d_outer_row": _row(d_outer)}
        d_out, d_free = torch.empty_like(out), torch.empty_like(exact)
        tilted = beta.new_empty(batch * sizes.tiles * (form.heads + form.kv_heads), form.free)  # of each tile, for beta
        of_reads, of_values = tilted.split_with_sizes([batch * sizes.tiles * h for h in (form.heads, form.kv_heads)])
        K.mix_backward_kernel[sizes.reads](
            grad, out, inner, outer, scheme, beta, exact, flags, d_out, d_inner, d_outer, d_free, of_reads,
            time, eps, **rows, **sizes.mix,
        )  # fmt: skip
        d_q, d_k, d_both = attention.attend_backward(d_out, q, k, both, out, lse, scale, form.causal, form.kernel)
        K.pack_backward_kernel[sizes.values](
            d_both, v, scheme, beta, d_v, of_values, time, _row(v), _row(d_v), form.width, **sizes.pack
        )
        known = (q, k, v, lse, out, scheme, beta, exact, flags, d_free)
        doubt.doubtful_queries_backward_kernel[sizes.spans](
            *known, d_q, of_reads, time, sizes.tiles, scale, _row(q), _row(k), _row(v), _row(d_q), **sizes.doubt,
            FLAGS=sizes.flags,
        )  # fmt: skip
        doubt.doubtful_keys_backward_kernel[(form.kv_heads, SPANS, batch)](
            *known, d_k, d_v, time, sizes.tiles, scale, _row(q), _row(k), _row(v), _row(d_k), _row(d_v),
            **sizes.doubt, FLAGS=triton.next_power_of_2(sizes.tiles * form.heads // form.kv_heads),
        )  # fmt: skip
        if form.heads == form.kv_heads:
            d_beta = tilted.view(-1, form.kv_heads, form.free).sum(0)
        else:
            of_reads = of_reads.view(-1, form.kv_heads, form.heads // form.kv_heads, form.free).sum((0, 2))
            d_beta = of_reads + of_values.view(-1, form.kv_heads, form.free).sum(0)
    else:
        out = rest[0] if form.gated else o
        d_out = grad
        if form.gated:
            d_out = torch.empty_like(out)
            K.mix_backward_kernel[sizes.reads](
                grad, out, out, outer, out, out, out, out, d_out, out, d_outer, out, out, time, eps,
                0, _row(outer), 0, _row(d_outer), **sizes.mix,
            )  # fmt: skip
        d_q, d_k, of_v = attention.attend_backward(d_out, q, k, v, out, lse, scale, form.causal, form.kernel)
        d_v.copy_(of_v)
    if form.rotary:
        _rotate(d_q, d_k, to_q, to_k, cos, sin, -1)
    else:
        to_q.copy_(d_q)
        to_k.copy_(d_k)
    flat, x = d_joint.flatten(0, 1), x.flatten(0, 1)
    d_x = (flat @ weight).view(*d_joint.shape[:2], -1)
    return d_x, flat.T @ x, None if bias is None else flat.sum(0), *own, d_beta


def _first(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a


class _Sizes(NamedTuple):
    """Grids and sizes of the kernels of one call."""

    tiles: int
    flags: int  # of a program that shares the flags of a head
    reads: tuple[int, int, int]  # grids: of the tiles of queries, of values,
    values: tuple[int, int, int]
    spans: tuple[int, int, int]  # of the programs that share flags
    mix: dict[str, int]
    pack: dict[str, int]
    doubt: dict[str, int]


@functools.lru_cache(1024)
def _sizes(form: Form, batch: int, time: int) -> _Sizes:
    power = triton.next_power_of_2
    columns = power(form.width)
    rows = _rows(form)
    tiles = triton.cdiv(time, rows)
    flags = power(triton.cdiv(tiles, SPANS))
    halves = {"MEAN": form.mean, "FREE": form.free, "SHARED": form.shared}
    tile = {"ROWS": rows, "COLUMNS": columns}
    group = {"GROUP": form.heads // form.kv_heads}
    doubtful = {"heads": form.heads, **group, "KEY": form.key_width, **halves, "CAUSAL": form.causal, "TILE": rows}
    doubtful |= {"KEYS": KEYS, "CHANNELS": power(max(form.free, 1)), "WIDE": power(form.key_width)}
    return _Sizes(
        tiles,
        flags,
        reads=(form.heads, tiles, batch),
        values=(form.kv_heads, tiles, batch),
        spans=(form.heads, triton.cdiv(tiles, flags), batch),
        mix={**group, **halves, "GATED": form.gated, **tile},
        pack={**halves, **tile},
        doubt=doubtful,
    )


def _rows(form: Form) -> int:
    """Tokens of a tile."""
    return max(1, NUMBERS // triton.next_power_of_2(form.width))


def _row(x: Tensor) -> int:
    """Numbers from one token of (B, T, H, d) to the next, of rows that lie one after another."""
    return x.stride(1)


def _rotate(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    batch, time, heads, width = q.shape
    half = triton.next_power_of_2(width // 2)
    rows = max(1, NUMBERS // half)
    K.rotate_kernel[(heads + k.shape[2], triton.cdiv(batch * time, rows))](
        q, k, q_out, k_out, cos, sin, batch * time, time, *map(_row, (q, k, q_out, k_out)), heads,
        WIDTH=width, SIGN=sign, ROWS=rows, HALF=half,
    )  # fmt: skip


def _pack(v: Tensor, beta: Tensor, form: Form, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    """[v | e] and its scheme."""
    (batch, time), free_at = v.shape[:2], 0 if form.shared else form.mean
    parts = triton.cdiv(time, PART)
    extremes = beta.new_empty(batch, parts, 2, form.kv_heads * form.free)
    grid = (form.kv_heads, parts, batch)
    K.extremes_kernel[grid](
        v, extremes, time, PART, _row(v), free_at, form.width, form.free,
        ROWS=sizes.mix["ROWS"], COLUMNS=sizes.doubt["CHANNELS"],
    )  # fmt: skip
    both = v.new_empty(*v.shape[:3], form.mean + form.free)
    scheme = extremes.new_empty(batch, 2, form.kv_heads * form.free)
    K.pack_kernel[sizes.values](
        v, extremes, beta, both, scheme, time, parts, _row(v), form.width, **sizes.pack,
        PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return both, scheme


# --- for torch.compile: the same as two operators, which it does not look into ---------------------------------------

_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? values, Tensor? inner, Tensor? outer, Tensor? beta, Tensor? cos, "
    "Tensor? sin"
)


@operator(f"mixed_read({_INPUTS}, int[] form, float scale, float eps) -> Tensor[]", waits=False)
def _operator(x, weight, bias, values, inner, outer, beta, cos, sin, form, scale, eps):
    return _forward(x, weight, bias, values, inner, outer, beta, cos, sin, Form(*form), scale, eps)


@_operator.register_fake
def _(x, weight, bias, values, inner, outer, beta, cos, sin, form, scale, eps):
    """The shapes of what `_forward` returns."""
    form, (batch, time) = Form(*form), x.shape[:2]
    head = lambda width, heads=form.heads: x.new_empty(batch, time, heads, width)  # noqa: E731
    o, joint = head(form.width), x.new_empty(batch, time, weight.shape[0])
    lse = x.new_empty(batch, form.heads, time, dtype=torch.float32)
    if not form.free:
        return [o, joint, *([head(form.width)] if form.gated else []), lse]
    summed = form.mean + form.free
    scheme = lse.new_empty(batch, 2, form.kv_heads * form.free)
    flags = lse.new_empty(batch, form.heads, -(-time // _rows(form)), dtype=torch.int32)
    return [o, joint, head(summed, form.kv_heads), head(summed), scheme, head(form.free), flags, lse]


@operator(
    f"mixed_read_backward(Tensor grad, {_INPUTS}, Tensor[] kept, int[] form, float scale, float eps) -> Tensor[]",
    waits=False,
)
def _operator_backward(grad, x, weight, bias, values, inner, outer, beta, cos, sin, kept, form, scale, eps):
    tensors = (x, weight, bias, values, inner, outer, beta, cos, sin, *kept)
    return [d for d in _backward(grad, tensors, Form(*form), scale, eps) if d is not None]


@_operator_backward.register_fake
def _(grad, x, weight, bias, values, inner, outer, beta, cos, sin, kept, form, scale, eps):
    asked = (x, weight, bias, values, inner, outer, beta)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in asked if x is not None]


def _save(ctx, inputs, output):
    *tensors, form, scale, eps = inputs
    ctx.options, ctx.count = (form, scale, eps), len(output)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grads):
    tensors = ctx.saved_tensors
    inputs, kept = tensors[: -ctx.count], tensors[-ctx.count :]
    gradients = iter(_operator_backward(grads[0], *inputs, list(kept), *ctx.options))
    return *(None if x is None or index > 6 else next(gradients) for index, x in enumerate(inputs)), None, None, None


_operator.register_autograd(_differentiate, setup_context=_save)
