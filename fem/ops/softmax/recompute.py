"""The free energies that one attention call does not prove, from their definition in float64.

F_tj = c_j + log(sum_i p_ti exp(beta_j (f_ij - c_j))) / beta_j                  where float64 has the digits, and
F_tj = (log sum_i exp(s_ti + beta_j f_ij) - log sum_i exp(s_ti)) / beta_j       entry by entry elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.operator import operator
from fem.ops.common.precision import compute_dtype
from fem.ops.common.slabs import recorded
from fem.ops.common.transforms import again_differentiable
from fem.ops.softmax.support import PAIRS, Intervals, Pairs

_NUMBERS = 1 << 23  # in float64 at once: rows x keys x channels, of keys or of values, 64 MiB
_LEAST = 1e-130  # of which a second derivative divides by the square


def recompute(free_energy, doubtful, q, k, f, beta, pairs: Pairs) -> Float[Tensor, "b tq h df"]:
    """The free energies (B, T_q, H, d_f), doubtful ones computed again; shapes as in `read.softmax_read`."""
    some = doubtful.any()
    if type(doubtful) is Tensor and not doubtful.is_meta and not torch.compiler.is_compiling():
        if not bool(some):
            fallbacks.count(doubtful.numel(), 0)
            return free_energy
        some = torch.tensor(True)  # on the host: the operator waits no second time
    again, _ = _recompute(some, doubtful, q, k, f, beta, *pairs)
    return torch.where(doubtful, again, free_energy)


_INPUTS = f"Tensor some, Tensor doubtful, Tensor q, Tensor k, Tensor f, Tensor beta, {PAIRS}"


@operator(f"softmax_recompute({_INPUTS}) -> (Tensor, Tensor)")
def _recompute(some, doubtful, *inputs):
    """The free energy where it is doubtful, 0 elsewhere; and on the host, for the backward, whether any is.

    some: whether any is, which inductor sums up in the kernel that finds them.
    """
    some = some.to("cpu", copy=True)
    fallbacks.count(doubtful.numel(), int(doubtful.sum()) if some else 0)
    if not some:
        return doubtful.new_zeros(doubtful.shape, dtype=compute_dtype(inputs[0])), some
    with torch.no_grad():
        return _placed(doubtful, *inputs), some


@_recompute.register_fake
def _(some, doubtful, q, *inputs):
    return doubtful.new_empty(doubtful.shape, dtype=compute_dtype(q)), doubtful.new_empty((), device="cpu")


@operator(f"softmax_recompute_backward(Tensor grad, {_INPUTS}) -> Tensor[]")
def _recompute_backward(grad, some, doubtful, q, k, f, beta, bias, *rules):
    """Gradients of q, k, f, beta and, where there is one, of the bias."""
    inputs = [x for x in (q, k, f, beta, bias) if x is not None]
    if not some:
        gradients = [x.new_empty(x.shape) for x in inputs]
        for alike in gradients[:3], gradients[3:]:  # of one dtype each: one launch
            torch._foreach_zero_(alike)
        return gradients
    totals = [torch.zeros(x.shape, dtype=compute_dtype(x), device=x.device) for x in inputs]
    for rows in _parts(doubtful, k):
        places = rows.places(*inputs)
        with recorded():
            needed = [x[at].detach().double().requires_grad_() for x, at in zip(inputs, places)]
            of_energies = grad[rows.where].double().where(rows.wanted, 0.0)
            gradients = torch.autograd.grad(_energies(rows, rules, *needed), needed, of_energies)
        for total, at, more in zip(totals, places, gradients):
            total.index_put_(at, more.to(total.dtype), accumulate=True)
    return [total.to(x.dtype) for total, x in zip(totals, inputs)]


@_recompute_backward.register_fake
def _(grad, some, doubtful, *inputs):
    return [x.new_empty(x.shape) for x in inputs[:5] if x is not None]


def _save(ctx, inputs, output):
    _, *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(output[1], *tensors)


def _differentiate(ctx, grad, _):
    some, doubtful, *tensors = ctx.saved_tensors
    inputs, rules = tensors[:5], (*tensors[5:], ctx.causal, ctx.scale)
    if torch.is_grad_enabled():
        gradients = again_differentiable(lambda *x: [_placed(doubtful, *x, *rules)], inputs, [grad])
    else:
        gradients = _recompute_backward(grad, some, doubtful, *inputs, *rules)
    of_bias = None if inputs[4] is None else gradients[4]
    return None, None, *gradients[:4], of_bias, *[None] * 5


_recompute.register_autograd(_differentiate, setup_context=_save)


class _Rows(NamedTuple):
    """R rows and C channels of each of n heads: where they are, and which of their free energies are wanted.

    A head with fewer repeats its first, of which nothing more is wanted.
    """

    batch: Int[Tensor, " n"]
    head: Int[Tensor, " n"]
    row: Int[Tensor, "n r"]
    channel: Int[Tensor, "n c"]
    wanted: Bool[Tensor, "n r c"]
    past: int  # keys before the first query

    @property
    def where(self) -> tuple[Tensor, ...]:
        """Their place in a tensor (B, T_q, H, d_f)."""
        return self.batch[:, None, None], self.row[..., None], self.head[:, None, None], self.channel[:, None]

    def places(self, q, k, f, beta, bias=None) -> list[tuple[Tensor | int, ...]]:
        """The place of what they need of each input, itself (n, R, d_k), (n, T, d_k), (n, T, C), (n, C), (n, R, T)."""
        batch, row, head, channel = self.where
        key = torch.arange(k.shape[1], device=k.device)
        group = head // (q.shape[2] // k.shape[2])
        places = [
            (batch[..., 0], self.row, head[..., 0]),
            (batch[..., 0], key, group[..., 0]),
            (batch, key[:, None], group, channel),
            (group[..., 0], self.channel),
        ]
        if bias is not None:
            of_bias = zip((batch, head, row, key), bias.shape)
            places.append(tuple(index if size > 1 else 0 * index for index, size in of_bias))
        return places


def _parts(doubtful: Bool[Tensor, "b tq h df"], k: Float[Tensor, "b t hkv dk"]) -> Iterator[_Rows]:
    """The doubtful entries, of as many heads at once as fit into memory; heads with many rows come first."""
    of_batch, queries, heads, channels = doubtful.shape
    keys, width = k.shape[1], max(k.shape[3], channels)
    batch, row, head, channel = doubtful.nonzero(as_tuple=True)
    head = batch * heads + head
    has_row, has_channel = (doubtful.new_zeros(of_batch * heads, size) for size in (queries, channels))
    has_row[head, row] = has_channel[head, channel] = True
    counts, order = has_row.sum(1).sort(descending=True, stable=True)
    counts, most = counts.tolist(), max(1, _NUMBERS // (keys * width))
    start = 0
    while start < len(counts) and counts[start]:
        part = order[start : start + max(1, most // counts[start])]
        start += len(part)
        batch, head = part // heads, part % heads
        all_rows, is_row = _listed(has_row[part])
        channel, is_channel = _listed(has_channel[part])
        for row, real in zip(all_rows.split(most, 1), is_row.split(most, 1)):
            rows = _Rows(batch, head, row, channel, real[..., None] & is_channel[:, None], keys - queries)
            yield rows._replace(wanted=rows.wanted & doubtful[rows.where])


def _listed(chosen: Bool[Tensor, "n m"]) -> tuple[Int[Tensor, "n most"], Bool[Tensor, "n most"]]:
    """Where each line is true, and whether that is so: shorter lines repeat their first."""
    is_one, index = chosen.int().sort(dim=1, descending=True, stable=True)
    is_one = is_one[:, : int(is_one.sum(1).max())].bool()
    return torch.where(is_one, index[:, : is_one.shape[1]], index[:, :1]), is_one


def _placed(doubtful, q, k, f, beta, bias, *rules) -> Tensor:
    """The free energies of the doubtful entries, at their places, 0 elsewhere."""
    free_energy = torch.zeros(doubtful.shape, dtype=compute_dtype(q), device=q.device)
    inputs = [x for x in (q, k, f, beta, bias) if x is not None]
    for rows in _parts(doubtful, k):
        needed = [x[at].double() for x, at in zip(inputs, rows.places(*inputs))]
        energies = _energies(rows, rules, *needed)[rows.wanted]
        at = tuple(x.expand_as(rows.wanted)[rows.wanted] for x in rows.where)
        free_energy = free_energy.index_put(at, energies.to(free_energy.dtype))
    return free_energy


def _energies(rows: _Rows, rules, q, k, f, beta, bias=None) -> Float[Tensor, "n r c"]:
    """The free energies of the rows and channels, in float64 and of torch's own steps, which can be differentiated.

    What is not wanted is finite and means nothing.
    """
    keep, first, end, causal, scale = rules
    keys = k.shape[1]
    if first is not None:
        seen = Intervals(*(x[rows.batch % x.shape[0]].gather(1, rows.row) for x in (first, end)))
        allowed = seen.allowed(keys)
    else:
        last = rows.row + rows.past if causal else torch.full_like(rows.row, keys)
        allowed = torch.arange(keys, device=k.device) <= last[..., None]
    if keep is not None:
        allowed = allowed & keep[rows.batch][:, None]
    s = scale * q @ k.mT
    if bias is not None:
        allowed = allowed & ~torch.isneginf(bias)
        s = s + bias.where(allowed, 0.0)
    empty = ~allowed.any(2, keepdim=True)
    s = s.masked_fill(~allowed, -torch.inf).masked_fill(empty, 0.0)
    log_p = s.log_softmax(2)
    hidden = ~allowed.any(1)[..., None]
    shift = f.detach().masked_fill(hidden, -torch.inf).amax(1, keepdim=True).nan_to_num(neginf=0.0)  # no row sees a key
    f = torch.where(hidden, shift, f)
    total = log_p.exp() @ ((f - shift) * beta[:, None]).exp()
    sure = total.detach() >= _LEAST
    free = shift + total.where(sure, 1.0).log() / beta[:, None]
    n, r, channel = (rows.wanted & ~sure).nonzero(as_tuple=True)
    if len(n):
        temperature = beta[n, channel]
        energies = (log_p[n, r] + temperature[:, None] * f[n, :, channel]).logsumexp(1) / temperature
        free = free.index_put((n, r, channel), energies)
    return free.masked_fill(empty, 0.0)
