"""A layer of linear attention or GLA between its input and its output map in few launches on a GPU.

    [q | k | v | inner | outer | decay] = W x + b        g = logsigmoid(decay) / 16
    o = outer gate of (1 - lambda) mean + lambda F of the read by phi(q), phi(k), v and g            (Eq. 4, 7, 10, 11)

The kernels read and write columns of the product, so that one product makes dW and one dx. The read is that of
`kernel_read`, without a memory; the host waits once, to see whether anything of it is in doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.joined import Biases, Maps, Weights, joined
from fem.ops.common.modulation import modulate
from fem.ops.common.part_kernels import summed
from fem.ops.common.precision import fallbacks
from fem.ops.common.token_kernels import launch_gate
from fem.ops.linear_attention import kernel_read as scan
from fem.ops.linear_attention.feature_kernels import launch_features

EVEN = 8  # numbers of 16 bits: rows of another width are multiplied slowly


class Form(NamedTuple):
    """Widths of a layer and the parts that it has.

    mean, free: channels of a head that read either; shared: they are the same ones, which lambda mixes. rank: of slim
    gates, whose first maps are columns of the product and whose second maps are tensors; 0: full gates.
    """

    heads: int
    key: int
    mean: int
    free: int
    shared: bool
    gated: bool
    rank: int
    decays: bool
    context: int  # columns of the conditioner's features, behind the layer's input

    @property
    def width(self) -> int:
        """Columns of a head of o, and of v."""
        return self.free if self.shared else self.mean + self.free

    @property
    def keys(self) -> int:
        """Columns of q and k."""
        return 2 * self.heads * self.key

    @property
    def columns(self) -> list[int]:
        """Those of v, of lambda's and g's logits, or of what their first maps give, and of the decay."""
        values = self.heads * self.width
        gate = self.rank or values
        return [values, gate * self.shared, gate * self.gated, self.heads * self.decays]

    def by_heads(self, columns: Float[Tensor, "b t c"]) -> Float[Tensor, "b t h d"]:
        return columns.unflatten(-1, (self.heads, -1))

    def parts(self, rest: Float[Tensor, "b t c"]) -> list[Tensor | None]:
        """The values, (B, T, H, d), and the other columns, None for no part."""
        sizes = self.columns
        values, *others = rest[..., : sum(sizes)].split_with_sizes(sizes, -1)
        return [self.by_heads(values), *(y if y.shape[-1] else None for y in others)]

    def pair(self, values: Float[Tensor, "b t h d"]) -> tuple[Tensor, Tensor]:
        """Those whose mean is read, and those whose free energy is."""
        return values[..., : self.mean], values[..., self.width - self.free :]


class Options(NamedTuple):
    """What a read is called with beside tensors."""

    form: Form
    eps: float
    beta_start: float  # beta = softplus(theta + beta_start)


def mixed_read(
    options: Options,
    weights: Weights,
    biases: Biases | None,
    x: Float[Tensor, "b t f"],
    value_scale: Float[Tensor, "v c"] | None,
    inner_up: Float[Tensor, "w r"] | None,
    inner_bias: Float[Tensor, " w"] | None,
    outer_up: Float[Tensor, "w r"] | None,
    outer_bias: Float[Tensor, " w"] | None,
    theta: Float[Tensor, "h df"] | None,
    cos: Float[Tensor, "t p"] | None,
    sin: Float[Tensor, "t p"] | None,
) -> Float[Tensor, "b t h d"] | None:
    """o of a whole sequence, differentiable once; None where the read is in doubt. cos and sin are float32.

    weights, biases: of the maps of x, in the order of the product's columns; a bias of None is 0. value_scale: W_v of
    v (1 + W_v h), where x is [x, h]. inner_up to outer_bias: the second maps of slim gates. theta: of beta, which is 1
    without one.
    Raises RuntimeError where its gradient is to be differentiated.
    """
    surplus = -sum(map(len, weights)) % EVEN
    if surplus:
        weights = [*weights, weights[0].new_zeros(surplus, weights[0].shape[1])]
        biases = None if biases is None else [*biases, None]
    tensors = x, theta, cos, sin, value_scale, inner_up, inner_bias, outer_up, outer_bias
    o, flag = _MixedRead.apply(options, len(weights), *tensors, *weights, *(biases or ()))
    if bool(flag):
        return None
    fallbacks.count(o[..., 0].numel() * options.form.free, 0)
    return o


class _MixedRead(torch.autograd.Function):
    """o and the flag of doubt."""

    @staticmethod
    def forward(ctx, options, maps, x, theta, cos, sin, scale, *inputs):
        ups, weights, biases = inputs[:4], inputs[4 : 4 + maps], inputs[4 + maps :]
        form, recorded = options.form, any(ctx.needs_input_grad)
        weight, bias = joined(x, weights, biases or None)
        with on(x.device):
            phi = _features(form, x, weight, bias, cos, sin, options.eps)
            rest = F.linear(x, weight[form.keys :], None if bias is None else bias[form.keys :])
            values, *gates, decay = form.parts(rest)
            if form.context:
                raw, values = values, values.new_empty(values.shape)
                modulate(raw, x[..., -form.context :], scale, values)
            v, f = form.pair(values)
            sizes = scan.Sizes.of(form.mean, form.free, form.key)
            beta = torch.empty(form.heads, form.free, dtype=torch.float32, device=x.device)
            items, scheme, _, flag = scan.packed(
                sizes, False, *phi, decay, v, f, beta, [None] * 3, theta, options.beta_start
            )
            items, (sums, _) = scan.with_graph(items, None, recorded, last=False)
            _, *read = scan.unpacked(sizes, sums.detach(), items[0], scheme, beta, flag, x.dtype, cells=False)
            logits = _logits(gates, ups) if form.rank else gates
            o = launch_gate(*read, *logits, _split(form), options.eps, rows_apart=(_row(form, rest), None))
        ctx.options, ctx.maps = options, Maps(weights, biases)
        kept = values if form.context else None
        ctx.save_for_backward(x, weight, theta, cos, sin, scale, *ups, rest, kept, *items, sums, scheme, beta, *read)
        ctx.mark_non_differentiable(flag)
        ctx.set_materialize_grads(False)
        return o, flag

    @staticmethod
    def backward(ctx, grad, _):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused layer of linear attention is differentiable once, got create_graph=True; a layer whose "
                'configuration has backend="plain" is differentiable any number of times.'
            )
        saved = ctx.saved_tensors  # read once: checkpointing hands it out but once
        (x, weight, theta, cos, sin, scale, *ups), (rest, values, *items) = saved[:10], saved[10:17]
        sums, scheme, beta, mean, free = saved[17:]
        form, eps = ctx.options.form, ctx.options.eps
        raw, *gates, decay = form.parts(rest)
        values = values if form.context else raw
        d_joint = rest.new_empty(*rest.shape[:2], len(weight))
        d_keys, d_rest = d_joint[..., : form.keys], d_joint[..., form.keys :]
        to_values, *d_gates, d_decay = form.parts(d_rest)
        d_values = torch.empty_like(values) if form.context else to_values
        d_rest[..., sum(form.columns) :].zero_()
        sizes = scan.Sizes.of(form.mean, form.free, form.key)
        tilts = beta.new_empty(2, rest.shape[0] * sizes.tiles(rest.shape[1]), *beta.shape)  # what tiles give theta's
        slope = theta is not None
        with on(x.device):
            items, (sums, _) = scan.graph_of(items, (sums, None), None, last=False)
            logits = _logits(gates, ups) if form.rank else gates
            d_logits = [None if y is None else torch.empty_like(y) for y in logits] if form.rank else d_gates
            d_mean, d_free = (torch.empty_like(y) if y.shape[-1] else None for y in (mean, free))
            found, apart = (d_mean, d_free, *d_logits), (_row(form, rest), _row(form, d_joint))
            launch_gate(mean, free, *logits, _split(form), eps, grad.contiguous(), found, apart)
            d_ups = _through_second_maps(gates, ups, d_logits, d_gates) if form.rank else [None] * 4
            d_read = None, d_mean, d_free
            d_sums = scan.through_unpack(sizes, sums, items[0], scheme, beta, d_read, tilts[0], False, slope)
            leaves = [y for y in items if y is not None]
            d_phi_q, d_phi_k, d_items, *d_g = torch.autograd.grad(sums, leaves, d_sums, retain_graph=True)
            d_v, d_f = form.pair(d_values)
            scan.launch_pack_backward(
                sizes, d_items, d_g[0] if d_g else None, decay, form.pair(values)[1], beta, scheme, d_decay, d_v,
                None if form.shared else d_f, tilts[1], logits=form.decays, slope=slope,
            )  # fmt: skip
            d_q, d_k = map(form.by_heads, d_keys.chunk(2, -1))
            launch_features(d_phi_q, d_phi_k, *items[:2], d_q, d_k, cos, sin, eps, backward=True)
            d_theta = summed(tilts.flatten(0, 1), theta.dtype) if slope else None
            if form.context:
                d_eta = torch.empty_like(values)
                modulate(d_values, x[..., -form.context :], scale, to_values, raw, d_eta)
        del d_sums, d_items, d_phi_q, d_phi_k, d_read, d_mean, d_free, found  # before dx is allocated
        flat, features = d_joint.flatten(0, 1), x.flatten(0, 1)
        d_x, d_scale = flat @ weight, None
        if form.context:
            d_eta, h = d_eta.flatten(2).flatten(0, 1), slice(-form.context, None)
            d_x[:, h].addmm_(d_eta, scale)
            d_scale = d_eta.T @ features[:, h]
        d_maps = ctx.maps.gradients(flat.T @ features, flat.sum(0) if ctx.maps.biased else None)
        return None, None, d_x.view(x.shape), d_theta, None, None, d_scale, *d_ups, *d_maps


def _features(form: Form, x, weight, bias, cos, sin, eps: float) -> list[Float[Tensor, "b t h d"]]:
    """phi of queries and keys, which themselves nothing needs any more."""
    keys = F.linear(x, weight[: form.keys], None if bias is None else bias[: form.keys])
    q, k = map(form.by_heads, keys.chunk(2, -1))
    phi = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in (q, k)]
    launch_features(q, k, *phi, *phi, cos, sin, eps, backward=False)
    return phi


def _split(form: Form) -> bool:
    """Whether some channels read the mean and others the free energy."""
    return not form.shared and form.mean > 0 and form.free > 0


def _row(form: Form, columns: Tensor) -> int | None:
    """Numbers between the logits of tokens; None: those of slim gates lie side by side."""
    return None if form.rank else columns.shape[-1]


def _logits(gates: Sequence[Tensor | None], ups: Sequence[Tensor | None]) -> list[Float[Tensor, "n w"] | None]:
    """U z + b of slim gates."""
    pairs = zip(gates, ups[::2], ups[1::2])
    return [None if z is None else F.linear(z.flatten(0, 1), up, bias) for z, up, bias in pairs]


def _through_second_maps(gates, ups, d_logits, d_gates) -> list[Tensor | None]:
    """Write the gradients of z; return those of each U and b."""
    found = []
    for z, up, bias, d, d_z in zip(gates, ups[::2], ups[1::2], d_logits, d_gates):
        if z is None:
            found += [None, None]
            continue
        torch.mm(d, up, out=d_z.flatten(0, 1))
        found += [d.T @ z.flatten(0, 1), None if bias is None else d.sum(0)]
    return found
