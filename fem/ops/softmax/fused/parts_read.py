"""The read of a fused softmax layer between its parts: q, k, v and the logits of its gates, (B, T, H, d) each.

    [v | e]      [mean | R] = attention(q, k, [v | e])      o = g ((1 - lambda) mean + lambda F)      (Eq. 4, 10, 11)

Beside attention there are 5 launches forward and 6 backward, rotation among them. Nothing waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.part_kernels import sum_all
from fem.ops.softmax.fused import bounded_attention, fused_attention
from fem.ops.softmax.fused import elementwise_kernels as K
from fem.ops.softmax.fused.doubt import Doubt, Proof, settle, through_doubt
from fem.ops.softmax.fused.layer_form import Form, Options, Sizes, rows_of_tile, sizes_of


class Beside(NamedTuple):
    """What a read takes beside q, k, v and logits."""

    h: Tensor  # the conditioner's features; without them no number of it is read
    value_scale: Float[Tensor, "v c"] | None  # W_v
    ups: Sequence[Tensor | None]  # U and b of lambda's slim gate, and those of g's
    cos: Tensor | None
    sin: Tensor | None
    seen: Sequence[Tensor]  # of `bounded_attention`


def read_parts(
    options: Options,
    parts: Sequence[Tensor | None],
    turned: Sequence[Tensor],
    theta: Tensor | None,
    beside: Beside,
    differentiated: bool,
) -> list[Tensor]:
    """o, and what the backward needs: [v | e] and f where they are other tensors, where a free energy is read beta, the
    scheme and the flags, [mean | R] where o is another tensor, and the logarithms of attention's sums.

    parts: of `Form.parts`. turned: where q and k are written once they are rotated, themselves if need be.
    """
    (form, scale, eps, start), (h, value_scale, ups, cos, sin, seen) = options, beside
    q, k, v, *gates = parts
    (batch, time), sizes, kept = q.shape[:2], sizes_of(form, *q.shape[:2]), []
    if form.rotary:
        _rotate(q, k, *turned, cos, sin, None, 1, sizes)
        q, k = turned
    both, f, beta, scheme = v, None, None, None
    if form.packs:
        both, f, beta, scheme = _launch_pack(v, h, value_scale, theta, start, form)
        kept += [both, f] if form.apart else [both]
    values = both.split_with_sizes(form.pieces, -1) if form.twice else [both]
    if not seen:
        outs, lses = zip(*(fused_attention.kernel_attention(q, k, x, scale, form.causal, form.flash) for x in values))
        out, lse = fused_attention.together(outs), lses[0]
    else:
        out, lse = bounded_attention.bounded_attention(q, k, values, scale, form.causal, seen, differentiated)
    if not form.mixes:
        return [out, *kept, lse]
    gates = [out if gate is None else gate for gate in gates]  # which no kernel reads
    o = out.new_empty(*q.shape[:3], form.width)
    flags = torch.empty(batch, form.heads, sizes.tiles, dtype=torch.int32, device=o.device)
    K.mix_kernel[sizes.reads](
        out, *gates, *ups, scheme, beta, o, flags, time, eps, *(x.stride(1) for x in gates), **sizes.mix
    )
    if not form.free:
        return [o, *kept, out, lse]
    proof = Proof(q, k, f, lse, out, *(seen[:2] or (None, None)), scheme, beta)
    settle(proof, o, flags, gates, ups, o, scale, eps, form, sizes)
    return [o, *kept, beta, scheme, flags, out, lse]


def shapes_of(form: Form, x: Float[Tensor, "b t *d"], keys: int) -> list[Tensor]:
    """Empty tensors like those that `read_parts` returns of queries of a tensor like x, and so many keys."""
    batch, time = x.shape[:2]
    head = lambda width: x.new_empty(batch, time, form.heads, width)  # noqa: E731
    value = lambda width: x.new_empty(batch, keys, form.kv_heads, width)  # noqa: E731
    o, kept = head(form.width), [value(form.mean + form.free)] if form.packs else []
    kept += [value(form.free)] if form.apart else []
    lse = x.new_empty(batch, form.heads, time, dtype=torch.float32)
    if not form.free:
        return [o, *kept, *([head(form.width)] if form.gated else []), lse]
    beta, scheme = lse.new_empty(form.kv_heads, form.free), lse.new_empty(batch, 2, form.kv_heads * form.free)
    flags = lse.new_empty(batch, form.heads, -(-time // rows_of_tile(form)), dtype=torch.int32)
    return [o, *kept, beta, scheme, flags, head(form.mean + form.free), lse]


def _free_values(form: Form, v: Tensor, both: Tensor, apart: Tensor | None) -> Float[Tensor, "b t h df"]:
    """f, columns of v; with a conditioner those of [v | e] whose mean is read, too, or a tensor of their own."""
    if form.context:
        return both[..., : form.free] if form.shared else apart
    return v[..., form.width - form.free :]


class Totals(NamedTuple):
    """Where sums over tokens are written, the gradients of biases and of theta: side by side to several tensors."""

    keys: Sequence[Float[Tensor, " c"]]  # of q and k
    values: Sequence[Float[Tensor, " c"]]
    gates: Sequence[Float[Tensor, " c"]]
    theta: Float[Tensor, "hkv df"] | None


def through_parts(
    options: Options,
    grad: Tensor,
    o: Tensor,
    kept: Sequence[Tensor],
    parts: Sequence[Tensor | None],
    d_parts: Sequence[Tensor | None],
    totals: Totals,
    beside: Beside,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
    """Write the gradients of the parts to d_parts, and the totals. Return those of the rotated q and k, of the second
    maps of slim gates that there are, and of W_v h. Of the parts, q and k are rotated; d_parts may lack them.
    """
    (form, scale, eps, _), (h, value_scale, ups, cos, sin, seen) = options, beside
    q, k, v, *gates = parts
    to_q, to_k, to_v, *d_gates = d_parts
    *rest, lse = kept
    both = rest.pop(0) if form.packs else v
    f = _free_values(form, v, both, rest.pop(0) if form.apart else None)
    beta, scheme, flags, out = rest if form.free else (None, None, None, rest[0] if form.mixes else o)
    sizes = sizes_of(form, *q.shape[:2])
    proof = Proof(q, k, f, lse, out, *(seen[:2] or (None, None)), scheme, beta)
    doubtful = Doubt.of(q, beta, form, sizes) if form.free else None
    sums = []  # what tiles give small gradients, and these

    def parts_of(totals: Sequence[Tensor], count: int) -> Float[Tensor, "n c"] | None:
        """For as many tiles as there are; None where nothing is summed."""
        widths = list(map(len, totals))
        if not sum(widths):
            return None
        parts = lse.new_empty(count, sum(widths))
        sums.extend(zip(parts.split_with_sizes(widths, 1), totals))
        return parts

    d_out, d_ups = grad.contiguous(), []
    if form.mixes:
        gate_parts = parts_of(totals.gates, math.prod(sizes.reads[1:]))
        d_out, d_ups = _through_gates(
            d_out, proof, flags, doubtful, o, gates, ups, d_gates, gate_parts, form, scale, eps, sizes
        )
    d_outs, values = ([x] if not form.twice else x.split_with_sizes(form.pieces, -1) for x in (d_out, both))
    if not seen:
        outs, how = out.split_with_sizes(form.pieces, -1), (lse, scale, form.causal, form.flash)
        found = [
            fused_attention.kernel_attention_backward(grad, q, k, x, y, *how)
            for grad, x, y in zip(d_outs, values, outs)
        ]
        (d_q, d_k, _), d_both = found[0], fused_attention.together([one[2] for one in found])
        for more_q, more_k, _ in found[1:]:
            d_q, d_k = d_q.add_(more_q), d_k.add_(more_k)
    else:
        inputs = d_outs, q, k, values, out, scale, form.causal, seen
        d_q, d_k, d_both = bounded_attention.bounded_attention_backward(*inputs)
    raised = theta_parts = d_eta = None
    if form.free:
        raised = through_doubt(d_q, d_k, to_v, proof, flags, doubtful, form, scale, sizes)
        theta_parts = doubtful.value_parts
    if form.context:
        d_eta = v.new_empty(v.shape)
    K.pack_backward_kernel[sizes.values](
        d_both, v, h, value_scale, f, scheme, beta, raised, to_v, d_eta, theta_parts,
        parts_of(totals.values, math.prod(sizes.values[1:])), q.shape[1], v.stride(1), h.stride(1), *f.stride()[1:3],
        to_v.stride(1), **sizes.pack,
    )  # fmt: skip
    if to_q is not None:
        key_parts = parts_of(totals.keys, sizes.turns[0] // (form.heads + form.kv_heads))
        _rotate(d_q, d_k, to_q, to_k, cos, sin, key_parts, -1, sizes)
    if totals.theta is not None:
        sums.append((doubtful.theta_parts(form), totals.theta))
    if sums:
        sum_all(sums)
    return d_q, d_k, d_ups, d_eta


def _through_gates(
    grad, proof, flags, doubtful: Doubt | None, o, gates, ups, d_gates, parts, form: Form, scale, eps, sizes
):
    """The gradient of [mean | R], and those of the second maps of slim gates; writes those of the gates' columns."""
    q, out, scheme, beta = proof.q, proof.out, proof.scheme, proof.beta
    there = [gate is not None for gate in gates]
    slim = out.new_empty(sum(there), *q.shape[:3], form.width) if form.rank else None
    targets = iter(slim if form.rank else [d for d in d_gates if d is not None])
    inputs = [out if gate is None else gate for gate in gates]
    outputs = [next(targets) if is_there else out for is_there in there]
    exact = d_free = query_parts = None
    if doubtful is not None:
        exact, d_free, _, query_parts, _ = doubtful
        settle(proof, exact, flags, inputs, ups, o, scale, eps, form, sizes)
    d_out = torch.empty_like(out)
    K.mix_backward_kernel[sizes.reads](
        grad, out, *inputs, *ups, scheme, beta, exact, flags, d_out, *outputs, parts, d_free, query_parts,
        q.shape[1], eps, *(x.stride(1) for x in (*inputs, *outputs)), **sizes.mix,
    )  # fmt: skip
    return d_out, _through_second_maps(gates, ups[::2], slim, d_gates) if form.rank else []


def _through_second_maps(gates, ups, d_logits, d_gates) -> list[Float[Tensor, "w r"]]:
    """Write the gradients of what the first maps of slim gates gave; return those of the second maps."""
    found, maps = [], [pair for pair in zip(gates, d_gates) if pair[0] is not None]
    for d, up, (z, d_z) in zip(d_logits, [up for up in ups if up is not None], maps, strict=True):
        d = d.view(-1, len(up))
        torch.mm(d, up, out=d_z.flatten(0, 2))
        found.append(d.T @ z.flatten(0, 2))
    return found


def _rotate(q, k, q_out, k_out, cos: Tensor | None, sin: Tensor | None, parts: Tensor | None, sign: int, sizes: Sizes):
    rows = q.shape[0] * q.shape[1]
    K.rotate_kernel[sizes.turns](
        q, k, q_out, k_out, cos, sin, parts, rows, rows if cos is None or cos.ndim == 3 else q.shape[1],
        *(x.stride(1) for x in (q, k, q_out, k_out)), q.shape[2], k.shape[2], SIGN=sign, **sizes.rotate,
    )  # fmt: skip


def _launch_pack(
    v: Tensor, h: Tensor, scale: Tensor | None, theta: Tensor | None, start: float, form: Form
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """[v | e], f, and of a free energy beta and the scheme."""
    (batch, time), channels, sizes = v.shape[:2], form.kv_heads * form.free, sizes_of(form, *v.shape[:2])
    both = v.new_empty(*v.shape[:3], form.mean + form.free)
    f = _free_values(form, v, both, v.new_empty(*v.shape[:3], form.free) if form.apart else None)
    beta = torch.empty(form.kv_heads, form.free, dtype=torch.float32, device=v.device)
    extremes, scheme = beta.new_empty(batch, sizes.parts[1], 2, channels), beta.new_empty(batch, 2, channels)
    K.extremes_kernel[sizes.parts](
        v, h, scale, f, both, theta, beta, extremes, time, start, v.stride(1), h.stride(1), *f.stride()[1:3],
        **sizes.extremes,
    )  # fmt: skip
    if not form.free:
        return both, f, None, None
    K.pack_kernel[sizes.values](
        v, f, extremes, beta, both, scheme, time, sizes.parts[1], v.stride(1), *f.stride()[1:3], **sizes.pack,
        PARTS=sizes.most_parts,
    )  # fmt: skip
    return both, f, beta, scheme
