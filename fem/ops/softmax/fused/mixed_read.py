"""A softmax layer between its input and its output map in few launches on a GPU: one product, the read, both gates.

    [q | k | v | inner | outer] = W x + b        o = g ((1 - lambda) mean + lambda F)               (Eq. 4, 7, 10, 11)

The product's result is one tensor, of which the kernels read and write columns: q and k are turned in place, and the
gradients of all maps are written side by side, so that one product makes dW and one dx. Where x is [x, h], with the
conditioner's features, v has weights of 0 for h, and is multiplied by 1 + W_v h. Beside products, sums over tokens and
torch's attention there are 6 launches forward and 7 backward. Nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.joined import joined
from fem.ops.common.own_backward import OwnBackward
from fem.ops.softmax.fused.bounded_attention import ALL_KEYS, SEEN, SEEN_SCHEMA
from fem.ops.softmax.fused.layer_form import SETTINGS, Form, Options
from fem.ops.softmax.fused.parts_read import Beside, Totals, read_parts, shapes_of, through_parts


def mixed_read(
    options: Options,
    weights: Sequence[Float[Tensor, "_ _"]],
    biases: Sequence[Float[Tensor, " _"] | None],
    x: Float[Tensor, "b t f"],
    value_scale: Float[Tensor, "v c"] | None,
    inner_up: Float[Tensor, "w r"] | None,
    inner_bias: Float[Tensor, " w"] | None,
    outer_up: Float[Tensor, "w r"] | None,
    outer_bias: Float[Tensor, " w"] | None,
    theta: Float[Tensor, "hkv df"] | None,
    cos: Float[Tensor, "t p"] | Float[Tensor, "b t p"] | None,
    sin: Float[Tensor, "t p"] | Float[Tensor, "b t p"] | None,
    seen: Sequence[Tensor] = (),
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence of 16-bit numbers, differentiable once.

    cos and sin are float32. seen: of `bounded_attention`; empty: a token sees all keys, or if causal those up to it.
    weights, biases: of the maps of x, in the order of the product's columns; a bias of None is 0, as those of slim
    gates' first maps are. value_scale: W_v. inner_up to outer_bias: the second maps. theta: of beta, 1 without one.
    Raises RuntimeError where its gradient is to be differentiated.
    """
    weight, bias, others = joined(x, weights, biases, (value_scale, inner_up, inner_bias, outer_up, outer_bias))
    return _MIXED_READ([x, weight, bias, *others, theta, cos, sin, *(seen or ALL_KEYS)], *options)[0]


def prefill(
    options: Options, weights, biases, x: Tensor, *tensors: Tensor | None, seen: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """`mixed_read` without a gradient, and the turned keys and the values that a cache keeps, (B, T, H_kv, .)."""
    *others, theta, cos, sin = tensors
    weight, bias, others = joined(x, weights, biases, others)
    o, joint, *rest = _MIXED_READ.results([x, weight, bias, *others, theta, cos, sin, *(seen or ALL_KEYS)], *options)
    form = options.form
    _, k, v, *_ = form.parts(joint)
    if form.context:
        v = rest[0][..., : form.mean] if form.shared else torch.cat([rest[0][..., : form.mean], rest[1]], -1)
    return o, k, v


class _MixedRead(OwnBackward):
    """The results: o, and what the backward needs, the product, and what `read_parts` keeps."""

    name, fixed, settings = "mixed_read", ("cos", "sin", *SEEN), SETTINGS
    tensors = (
        "Tensor x, Tensor weight, Tensor? bias, Tensor? value_scale, Tensor? inner_up, Tensor? inner_bias, "
        "Tensor? outer_up, Tensor? outer_bias, Tensor? theta, Tensor? cos, Tensor? sin"
    ) + SEEN_SCHEMA

    def forward(self, differentiated, tensors, *settings):
        x, weight, bias, *_, theta = tensors[:9]
        joint, options = F.linear(x, weight, bias), Options.of(*settings)
        parts = options.form.parts(joint)
        o, *kept = read_parts(options, parts, parts[:2], theta, _beside(options.form, tensors), differentiated)
        return [o, joint, *kept]

    def empty_results(self, tensors, *settings):
        x, weight = tensors[:2]
        o, *kept = shapes_of(Options.of(*settings).form, x, x.shape[1])
        return [o, x.new_empty(*x.shape[:2], len(weight)), *kept]

    def backward(self, grads, tensors, kept, *settings):
        x, weight, bias, value_scale, *ups, theta = tensors[:9]
        (o, joint, *kept), options = kept, Options.of(*settings)
        form, d_joint = options.form, torch.empty_like(joint)
        d_bias, *d_up_biases, d_theta = (None if y is None else torch.empty_like(y) for y in (bias, *ups[1::2], theta))
        totals = Totals(*_shared_out(form, d_bias), d_theta)
        if form.rank:  # whose biases are those of the second maps
            there = [(up, d) for up, d in zip(ups[::2], d_up_biases) if up is not None]
            to_gates = [up.new_empty(len(up)) if d is None else d for up, d in there]
            totals = totals._replace(gates=to_gates if any(d is not None for _, d in there) else ())
        parts, d_parts, beside = form.parts(joint), form.parts(d_joint), _beside(form, tensors)
        d_ups, d_eta = through_parts(options, grads[0], o, kept, parts, d_parts, totals, beside)[2:]

        flat, features = d_joint.flatten(0, 1), x.flatten(0, 1)
        d_x, d_scale, d_ups = flat @ weight, None, iter(d_ups)
        if form.context:
            d_eta = d_eta.flatten(2).flatten(0, 1)
            d_x[:, -form.context :].addmm_(d_eta, value_scale)
            d_scale = d_eta.T @ features[:, -form.context :]
        found = [d_x.view(x.shape), flat.T @ features, d_bias, d_scale]
        for up, d_up_bias in zip(ups[::2], d_up_biases):
            found += [None if up is None else next(d_ups), d_up_bias]
        return [d for d in (*found, d_theta) if d is not None]


def _beside(form: Form, tensors: Sequence[Tensor | None]) -> Beside:
    x, _, _, value_scale, *ups = tensors[:8]
    h, (cos, sin), seen = x[..., x.shape[2] - form.context :], tensors[9:11], tensors[11:]
    return Beside(h, value_scale, ups, cos, sin, () if seen[0] is None else seen)


def _shared_out(form: Form, d_bias: Float[Tensor, " c"] | None) -> list[Sequence[Tensor]]:
    """The parts of a bias that belong to q and k, to v, and to the gates."""
    if d_bias is None:
        return [(), (), ()]
    keys, values = (form.heads + form.kv_heads) * form.key_width, form.kv_heads * form.width
    return [[part] for part in d_bias.split_with_sizes([keys, values, len(d_bias) - keys - values])]


_MIXED_READ = _MixedRead()
