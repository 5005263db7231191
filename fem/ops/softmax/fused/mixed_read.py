"""A softmax layer between its input and its output map in few launches on a GPU: one product, the read, both gates.

    [q | k | v | inner | outer] = W x + b        o = g ((1 - lambda) mean + lambda F)               (Eq. 4, 7, 10, 11)

The product's result is one tensor, of which the kernels read and write columns: q and k are turned in place, and the
gradients of all maps are written side by side, so that one product makes dW and one dx. Where x is [x, h], with the
conditioner's features, v has weights of 0 for h, and is multiplied by 1 + W_v h. Beside products, sums over tokens and
torch's attention there are 6 launches forward and 7 backward. Nothing waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import keeps_graphs, on
from fem.ops.common.joined import joined
from fem.ops.common.operator import operator, refuse_second_derivatives
from fem.ops.softmax.fused.layer_form import Form, Options
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
    tensors = (x, weight, bias, *others, theta, cos, sin)
    if torch.compiler.is_compiling():
        return _operator(*tensors, list(seen), list(map(int, options.form)), *options[1:])[0]
    return _MixedRead.apply(options, seen, *tensors)


def prefill(options: Options, weights, biases, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`mixed_read` without a gradient, and the turned keys and the values that a cache keeps, (B, T, H_kv, .)."""
    *others, theta, cos, sin = tensors
    weight, bias, others = joined(x, weights, biases, others)
    inputs, form = (x, weight, bias, *others, theta, cos, sin), options.form
    if torch.compiler.is_compiling():
        o, joint, *rest = _operator(*inputs, [], list(map(int, form)), *options[1:])
    else:
        o, joint, *rest = _mixed_forward(*inputs, *options)
    _, k, v, *_ = form.parts(joint)
    if form.context:
        v = rest[0][..., : form.mean] if form.shared else torch.cat([rest[0][..., : form.mean], rest[1]], -1)
    return o, k, v


_TENSORS = 11


class _MixedRead(torch.autograd.Function):
    """o, in eager calls; a compiled graph has the operators below."""

    @staticmethod
    def forward(ctx, options, seen, *tensors):
        kept = _mixed_forward(*tensors, *options, seen=seen, differentiated=any(ctx.needs_input_grad))
        ctx.save_for_backward(*tensors, *kept)
        ctx.options, ctx.seen = options, seen
        return kept[0]

    @staticmethod
    def backward(ctx, grad):
        refuse_second_derivatives()
        saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
        gradients = _mixed_backward(grad, saved, *ctx.options, seen=ctx.seen)
        return None, None, *_of_inputs(gradients, saved), None, None


def _of_inputs(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the first nine inputs, from what `_mixed_backward` returns."""
    *first, d_ups, d_up_biases, d_theta = gradients
    ups, rows = inputs[4:8], 0
    for up, bias in zip(ups[::2], ups[1::2]):
        first += [None if up is None else d_ups[rows], None if bias is None else d_up_biases[rows]]
        rows += up is not None
    return [*first, d_theta]


def _on_its_device(function: Callable) -> Callable:
    """The function, which launches kernels, on the device of its first argument."""

    @functools.wraps(function)
    def run(x: Tensor, *others, **named):
        with on(x.device):
            return function(x, *others, **named)

    return run


@_on_its_device
def _mixed_forward(*inputs, seen: Sequence[Tensor] = (), differentiated: bool = False) -> list[Tensor]:
    """o, and what the backward needs: the product, and what `read_parts` keeps."""
    x, weight, bias, value_scale, *ups, theta, cos, sin, form, scale, eps, start = inputs
    joint, options = F.linear(x, weight, bias), Options(form, scale, eps, start)
    parts, beside = form.parts(joint), Beside(x[..., x.shape[2] - form.context :], value_scale, ups, cos, sin, seen)
    o, *kept = read_parts(options, parts, parts[:2], theta, beside, differentiated)
    return [o, joint, *kept]


@_on_its_device
def _mixed_backward(
    grad: Tensor,
    kept: Sequence[Tensor | None],
    form: Form,
    scale: float,
    eps: float,
    start: float,
    seen: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Gradients of x, weight, bias and W_v; of the second maps of slim gates, one behind the other, and of their
    biases; and of theta."""
    x, weight, bias, value_scale, *ups, theta, cos, sin = kept[:_TENSORS]
    o, joint, *kept = kept[_TENSORS:]
    d_joint = torch.empty_like(joint)
    beside = Beside(x[..., x.shape[2] - form.context :], value_scale, ups, cos, sin, seen)
    parts, d_parts = form.parts(joint), form.parts(d_joint)
    d_bias, d_theta = (None if y is None else torch.empty_like(y) for y in (bias, theta))
    keys, values = (form.heads + form.kv_heads) * form.key_width, form.kv_heads * form.width
    to_keys, to_values, to_gates = (
        [None] * 3 if bias is None else d_bias.split_with_sizes([keys, values, len(bias) - keys - values])
    )
    if form.rank:  # whose biases are those of the second maps
        there, biased = sum(gate is not None for gate in parts[3:]), ups[1] is not None or ups[3] is not None
        to_gates = joint.new_empty(there, form.heads * form.width) if biased else None
    totals = Totals(to_keys, to_values, to_gates, d_theta)
    options = Options(form, scale, eps, start)
    d_ups, d_eta = through_parts(options, grad, o, kept, parts, d_parts, totals, beside)[2:]

    flat, features = d_joint.flatten(0, 1), x.flatten(0, 1)
    d_x, d_scale = flat @ weight, None
    if form.context:
        d_eta = d_eta.flatten(2).flatten(0, 1)
        d_x[:, -form.context :].addmm_(d_eta, value_scale)
        d_scale = d_eta.T @ features[:, -form.context :]
    return [d_x.view(x.shape), flat.T @ features, d_bias, d_scale, d_ups, to_gates if form.rank else None, d_theta]


# --- for torch.compile: the same as two operators, which it does not look into ---------------------------------------

_MIXED_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? value_scale, Tensor? inner_up, Tensor? inner_bias, "
    "Tensor? outer_up, Tensor? outer_bias, Tensor? theta, Tensor? cos, Tensor? sin"
)
_OPTIONS = "int[] form, float scale, float eps, float beta_start"


@operator(f"mixed_read({_MIXED_INPUTS}, Tensor[] seen, {_OPTIONS}) -> Tensor[]", graphed=True)
def _operator(*inputs):
    *tensors, seen, form, scale, eps, start = inputs
    options = Form(*form), scale, eps, start
    return _mixed_forward(*tensors, *options, seen=seen, differentiated=keeps_graphs(tensors[0].device))


@_operator.register_fake
def _(*inputs):
    """The shapes of what `_mixed_forward` returns."""
    x, weight, *_, form, _, _, _ = inputs
    o, *kept = shapes_of(Form(*form), x)
    return [o, x.new_empty(*x.shape[:2], weight.shape[0]), *kept]


@operator(
    f"mixed_read_backward(Tensor grad, {_MIXED_INPUTS}, Tensor[] kept, Tensor[] seen, {_OPTIONS}) -> Tensor[]",
    graphed=True,
)
def _operator_backward(grad, *inputs):
    *tensors, kept, seen, form, scale, eps, start = inputs
    gradients = _mixed_backward(grad, [*tensors, *kept], Form(*form), scale, eps, start, seen)
    return [d for d in gradients if d is not None]


@_operator_backward.register_fake
def _(grad, *inputs):
    x, weight, bias, scale, inner_up, inner_bias, outer_up, outer_bias, theta = inputs[:9]
    ups = [[up for up in one if up is not None] for one in ((inner_up, outer_up), (inner_bias, outer_bias))]
    shapes = [*(y.shape for y in (x, weight, bias, scale) if y is not None), *((len(y), *y[0].shape) for y in ups if y)]
    return [x.new_empty(shape) for shape in shapes] + ([] if theta is None else [theta.new_empty(theta.shape)])


def _save(ctx, inputs, output):
    *tensors, seen, form, scale, eps, start = inputs
    ctx.count, ctx.options = len(seen), (form, scale, eps, start)
    ctx.save_for_backward(*tensors, *seen, *output)


def _differentiate(ctx, grads):
    saved, begin = ctx.saved_tensors, _TENSORS + ctx.count  # read once, as above
    inputs, seen, kept = saved[:_TENSORS], saved[_TENSORS:begin], saved[begin:]
    found = iter(_operator_backward(grads[0], *inputs, list(kept), list(seen), *ctx.options))
    _, _, bias, scale, inner_up, inner_bias, outer_up, outer_bias, theta, *_ = inputs
    slim, biased = (inner_up, outer_up) != (None, None), (inner_bias, outer_bias) != (None, None)
    there = (True, True, bias is not None, scale is not None, slim, biased, theta is not None)
    gradients = [next(found) if is_there else None for is_there in there]
    return *_of_inputs(gradients, inputs), None, None, [None] * ctx.count, *[None] * 4


_operator.register_autograd(_differentiate, setup_context=_save)
