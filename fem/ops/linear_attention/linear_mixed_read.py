"""A layer of linear attention or GLA between its input and its output map in few launches on a GPU.

    [q | k | v | inner | outer | decay] = W x + b        g = logsigmoid(decay) / 16
    o = outer gate of (1 - lambda) mean + lambda F of the read by phi(q), phi(k), v and g            (Eq. 4, 7, 10, 11)

The kernels read and write columns of the product, so that one product makes dW and one dx. The read is that of
`fla_read`, without a memory before it; what its sums do not prove is read again on the card, where flags say so. A
document begins with a decay to 0. The host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import on
from fem.ops.common.joined import Biases, Weights, joined
from fem.ops.common.own_backward import OwnBackward
from fem.ops.common.part_kernels import summed
from fem.ops.common.read import Terms
from fem.ops.common.token_kernels import launch_gate
from fem.ops.linear_attention import fla_read as scan
from fem.ops.linear_attention.doubtful_tokens import (
    Scan,
    through_doubtful,
    through_doubtful_decays,
)
from fem.ops.linear_attention.feature_kernels import launch_features
from fem.ops.linear_attention.linear_form import LinearForm, LinearOptions, ScanSizes, logits_of

EVEN = 8  # numbers of 16 bits: rows of another width are multiplied slowly
NEVER = 1e4  # logits of a decay by nothing


def linear_mixed_read(
    options: LinearOptions,
    weights: Weights,
    biases: Biases,
    x: Float[Tensor, "b t f"],
    value_scale: Float[Tensor, "v c"] | None,
    inner_up: Float[Tensor, "w r"] | None,
    inner_bias: Float[Tensor, " w"] | None,
    outer_up: Float[Tensor, "w r"] | None,
    outer_bias: Float[Tensor, " w"] | None,
    theta: Float[Tensor, "h df"] | None,
    cos: Float[Tensor, "t p"] | Float[Tensor, "b t p"] | None,
    sin: Float[Tensor, "t p"] | Float[Tensor, "b t p"] | None,
    opens: Bool[Tensor, "b t"] | None,
) -> Float[Tensor, "b t h d"]:
    """o of a whole sequence. cos and sin are float32; opens: where a document begins.

    weights, biases: of the maps of x, in the order of the product's columns; a bias of None is 0. value_scale: W_v of
    v (1 + W_v h), where x is [x, h]. inner_up to outer_bias: the second maps of slim gates. theta: of beta, which is 1
    without one.
    """
    ups = value_scale, inner_up, inner_bias, outer_up, outer_bias
    tensors = (x, *_joined(x, weights, biases, ups), theta, cos, sin, opens)
    return _LINEAR_MIXED_READ(tensors, *options)[0]


def linear_prefill(
    options: LinearOptions, weights: Weights, biases: Biases, x: Float[Tensor, "b t f"], *inputs: Tensor | None
) -> tuple[Float[Tensor, "b t h d"], Terms]:
    """o of `linear_mixed_read`, in eager calls without gradients, and the memory after the last token.

    inputs: those of `linear_mixed_read`, and which tokens are read, (B, T), or None. The others add and decay nothing.
    """
    *ups, theta, cos, sin, opens, keep = inputs
    tensors = (x, *_joined(x, weights, biases, ups), theta, cos, sin, opens)
    with on(x.device):
        (o, *_), memory = _read(tensors, *options, differentiated=False, stated=True, keep=keep)
    return o, memory


def _joined(x: Tensor, weights: Weights, biases: Biases, ups: Sequence[Tensor | None]) -> list[Tensor | None]:
    """W, b and the others in x's dtype, with rows of 0 where the product would be of an odd width."""
    surplus = -sum(map(len, weights)) % EVEN
    if surplus:
        weights = [*weights, weights[0].new_zeros(surplus, weights[0].shape[1])]
        biases = [*biases, None]
    weight, bias, others = joined(x, weights, biases, ups)
    return [weight, bias, *others]


class _LinearMixedRead(OwnBackward):
    """The results: those of `_read`."""

    name, graphed, fixed, kept = "linear_mixed_read", True, ("cos", "sin", "opens"), 1
    tensors = (
        "Tensor x, Tensor weight, Tensor? bias, Tensor? value_scale, Tensor? inner_up, Tensor? inner_bias, "
        "Tensor? outer_up, Tensor? outer_bias, Tensor? theta, Tensor? cos, Tensor? sin, Tensor? opens"
    )
    settings = "int[] form, float eps, float beta_start"

    def forward(self, differentiated, tensors, *options):
        return _read(tensors, *options, differentiated)[0]

    def empty_results(self, tensors, form, *numbers):
        (x, weight), opens, form = tensors[:2], tensors[-1], LinearForm(*form)
        empty, heads = lambda: x.new_empty(0), lambda width: x.new_empty(*x.shape[:2], form.heads, width)
        made = lambda *shape: x.new_empty(shape, dtype=torch.float32)  # noqa: E731
        widths = (form.key, form.key, ScanSizes.of(form.mean, form.free, form.key).width)
        decays = scan.taken(max(form.decays, opens is not None), form.key, x.device)
        items = [heads(width).to(scan.multiplied(x, decays)) for width in widths]
        rest = x.new_empty(*x.shape[:2], len(weight) - form.keys)
        marks = x.new_empty(x.shape[0], form.heads, x.shape[1])
        values = heads(form.width) if form.context else empty()
        decay = made(*x.shape[:2], form.heads, *[decays] * (decays > 1))
        scheme, beta = made(x.shape[0], form.heads, 3 * form.free + 1), made(form.heads, form.free)
        flags = [marks.new_empty(marks.shape[:2], dtype=torch.int32), marks.bool()]
        kept = [rest, values, *items, decay if decays else empty(), scheme, beta, *flags]
        return [heads(form.width), *kept, heads(form.mean), heads(form.free)]

    def backward(self, grads, tensors, kept, form, eps, start):
        (x, weight, bias, scale, *ups, theta, cos, sin, opens), form = tensors, LinearForm(*form)
        (rest, values, *items), (scheme, beta, raised, doubtful, mean, free) = kept[:6], kept[6:]
        raw, *gates, decay = form.parts(rest)
        values = values if form.context else raw
        items = [*items[:3], items[3] if items[3].numel() else None, None]
        d_joint = rest.new_empty(*rest.shape[:2], len(weight))
        d_keys, d_rest = d_joint[..., : form.keys], d_joint[..., form.keys :]
        to_values, *d_gates, d_decay = form.parts(d_rest)
        d_values = torch.empty_like(values) if form.context else to_values
        d_rest[..., sum(form.columns) :].zero_()
        sizes = ScanSizes.of(form.mean, form.free, form.key)
        tilts = beta.new_empty(2, rest.shape[0] * sizes.tiles(rest.shape[1]), *beta.shape)  # what tiles give theta's
        slope = theta is not None
        items, (sums, _) = scan.graph_of(items, None, last=False)
        logits = logits_of(gates, ups) if form.rank else gates
        d_logits = [None if y is None else torch.empty_like(y) for y in logits] if form.rank else d_gates
        d_mean, d_free = (torch.empty_like(y) if y.shape[-1] else None for y in (mean, free))
        found, apart = (d_mean, d_free, *d_logits), (_row(form, rest), _row(form, d_joint))
        launch_gate(mean, free, *logits, _split(form), eps, grads[0].contiguous(), found, apart)
        d_ups = _through_second_maps(gates, ups, d_logits, d_gates) if form.rank else []
        d_read = None, d_mean, d_free
        d_sums = scan.through_unpack(sizes, sums, items[0], scheme, beta, d_read, tilts[0], False, slope)
        leaves = [y for y in items if y is not None]
        d_phi_q, d_phi_k, d_items, *d_g = torch.autograd.grad(sums, leaves, d_sums, retain_graph=True)
        (v, f), (d_v, d_f) = form.pair(values), form.pair(d_values)
        d_f = None if form.shared else d_f
        scan.launch_pack_backward(
            sizes, d_items, d_g[0] if d_g else None, decay, f, beta, scheme, d_decay, d_v, d_f, tilts[1],
            logits=form.decays > 0, slope=slope,
        )  # fmt: skip
        del sums, d_sums, d_items
        doubt = Scan(*items[:2], items[3], opens, v, f, scheme, beta, raised, doubtful)
        through = through_doubtful(sizes, doubt, (d_mean, d_free), d_phi_q, d_phi_k, d_v, d_f, tilts[0])
        if form.decays:
            through_doubtful_decays(sizes, doubt, through, decay, d_decay)
        d_q, d_k = map(form.by_heads, d_keys.chunk(2, -1))
        launch_features(d_phi_q, d_phi_k, *items[:2], d_q, d_k, cos, sin, eps, backward=True)
        d_theta = [summed(tilts.flatten(0, 1), theta.dtype)] if slope else []
        if form.context:
            torch.addcmul(d_values, d_values, form.eta(x, scale), out=to_values)
        del doubt, through, d_phi_q, d_phi_k, d_read, d_mean, d_free, found  # before dx is allocated
        flat, features = d_joint.flatten(0, 1), x.flatten(0, 1)
        d_x, d_scale = flat @ weight, []
        if form.context:
            d_eta, h = (d_values * raw).flatten(2).flatten(0, 1), slice(-form.context, None)
            d_x[:, h].addmm_(d_eta, scale)
            d_scale = [d_eta.T @ features[:, h]]
        d_bias = [] if bias is None else [flat.sum(0)]
        return [d_x.view(x.shape), flat.T @ features, *d_bias, *d_scale, *d_ups, *d_theta]


_LINEAR_MIXED_READ = _LinearMixedRead()


def _read(
    tensors: Sequence[Tensor | None], form, eps: float, start: float, differentiated: bool, stated: bool = False,
    keep: Bool[Tensor, "b t"] | None = None,
) -> tuple[list[Tensor], Terms | None]:  # fmt: skip
    """o, and what the backward needs: the columns behind q and k, with a conditioner the values; q, k, items and decay
    of the scan, scheme and beta, which tokens are in doubt, mean and F; empty is what is missing. And the memory after
    the last token, where `stated`."""
    (x, weight, bias, scale, *ups, theta, cos, sin, opens), form, memory = tensors, LinearForm(*form), None
    phi = _features(form, x, weight, bias, cos, sin, eps)
    rest = F.linear(x, weight[form.keys :], None if bias is None else bias[form.keys :])
    values, *gates, decay = form.parts(rest)
    if form.context:
        values = torch.addcmul(values, values, form.eta(x, scale))
    if keep is not None:
        hidden = ~keep.unsqueeze(2)
        for y in phi:
            y.masked_fill_(hidden.unsqueeze(3), 0)
        if decay is not None:
            decay.masked_fill_(hidden, NEVER)
    v, f = form.pair(values)
    sizes = ScanSizes.of(form.mean, form.free, form.key)
    beta = torch.empty(form.heads, form.free, dtype=torch.float32, device=x.device)
    given = *phi, decay, v, f, beta, scan.NOTHING, theta, start, opens
    items, scheme, heaviest, raised = scan.packed(sizes, False, *given)
    sums, last = scan.with_graph(items, None, differentiated, stated)
    doubt = Scan(*items[:2], items[3], opens, v, f, scheme, beta, raised, None)
    (_, *read), doubtful = scan.settled(sizes, doubt, sums, items[0], x.dtype)
    if stated:
        memory, _ = scan.settled(sizes, doubt, last, heaviest, last.dtype, cells=True)
    logits = logits_of(gates, ups) if form.rank else gates
    o = launch_gate(*read, *logits, _split(form), eps, rows_apart=(_row(form, rest), None))
    kept = [rest, values if form.context else None, *items[:-1], scheme, beta, raised, doubtful, *read]
    return [o, *(x.new_empty(0) if y is None else y for y in kept)], memory


def _features(form: LinearForm, x, weight, bias, cos, sin, eps: float) -> list[Float[Tensor, "b t h d"]]:
    """phi of queries and keys, which themselves nothing needs any more."""
    keys = F.linear(x, weight[: form.keys], None if bias is None else bias[: form.keys])
    q, k = map(form.by_heads, keys.chunk(2, -1))
    phi = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in (q, k)]
    launch_features(q, k, *phi, *phi, cos, sin, eps, backward=False)
    return phi


def _split(form: LinearForm) -> bool:
    """Whether some channels read the mean and others the free energy."""
    return not form.shared and form.mean > 0 and form.free > 0


def _row(form: LinearForm, columns: Tensor) -> int | None:
    """Numbers between the logits of tokens; None: those of slim gates lie side by side."""
    return None if form.rank else columns.shape[-1]


def _through_second_maps(gates, ups, d_logits, d_gates) -> list[Tensor]:
    """Write the gradients of z; return those of each U and b that there is."""
    found = []
    for z, up, bias, d, d_z in zip(gates, ups[::2], ups[1::2], d_logits, d_gates):
        if z is not None:
            torch.mm(d, up, out=d_z.flatten(0, 1))
            found += [d.T @ z.flatten(0, 1), *([] if bias is None else [d.sum(0)])]
    return found
