"""The free energies that one attention call does not prove, from their definition in float64.

F_tj = c_j + log(sum_i p_ti exp(beta_j (f_ij - c_j))) / beta_j                  where float64 has the digits, and
F_tj = (log sum_i exp(s_ti + beta_j f_ij) - log sum_i exp(s_ti)) / beta_j       entry by entry elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.operator import operator
from fem.ops.common.precision import LEAST_PROVEN, compute_dtype
from fem.ops.common.transforms import again_differentiable
from fem.ops.softmax.support import Intervals

_NUMBERS = 1 << 23  # in float64 at once: rows x keys x channels, 64 MiB


def recompute(
    free_energy: Float[Tensor, "b tq h df"],
    doubtful: Bool[Tensor, "b tq h df"],
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    f: Float[Tensor, "b t hkv df"],
    beta: Float[Tensor, "hkv df"],
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    keep: Bool[Tensor, "b t"] | None,
    seen: Intervals | None,
    causal: bool,
    scale: float,
) -> Float[Tensor, "b tq h df"]:
    """The free energies, doubtful ones computed again; seen: what a query sees; None: all, or i <= t if causal."""
    some = doubtful.any()
    real = type(doubtful) is Tensor and not doubtful.is_meta and not torch.compiler.is_compiling()
    if real and not bool(some):
        fallbacks.count(doubtful.numel(), 0)
        return free_energy
    first, end = (None, None) if seen is None else seen
    again, _ = _recompute(some, doubtful, q, k, f, beta, bias, keep, first, end, causal, scale)
    return torch.where(doubtful, again, free_energy)


_INPUTS = (
    "Tensor some, Tensor doubtful, Tensor q, Tensor k, Tensor f, Tensor beta, Tensor? bias, Tensor? keep, "
    "Tensor? first, Tensor? end, bool causal, float scale"
)


@operator(f"softmax_recompute({_INPUTS}) -> (Tensor, Tensor)")
def _recompute(some, doubtful, *inputs):
    """The free energy where it is doubtful, 0 elsewhere; and on the host, for the backward, whether any is.

    some: whether any is, which inductor sums up in the kernel that finds them.
    """
    some = some.to("cpu", copy=True)
    if not some:
        fallbacks.count(doubtful.numel(), 0)
        return _nothing(doubtful, *inputs).zero_(), some
    entries = _listed(doubtful)
    fallbacks.count(doubtful.numel(), len(entries))
    with torch.no_grad():
        return _placed(doubtful, entries, *inputs), some


@_recompute.register_fake
def _(some, doubtful, *inputs):
    return _nothing(doubtful, *inputs), doubtful.new_empty((), device="cpu")


def _nothing(doubtful, q, *_) -> Tensor:
    return torch.empty(doubtful.shape, dtype=compute_dtype(q), device=q.device)


def _gradients(grad, doubtful, q, k, f, beta, bias, *how):
    inputs = [x for x in (q, k, f, beta, bias) if x is not None]
    totals = [torch.zeros(x.shape, dtype=compute_dtype(x), device=x.device) for x in inputs]
    for place, rows, channels in _parts(_listed(doubtful), k.shape[1], f.shape[3]):
        of_rows = lambda *x: _of_rows(place, rows, channels, *_five(x), *how)  # noqa: B023, E731
        of_head = [x.double() for x in _of_head(place, *inputs)]
        gradients = torch.func.vjp(of_rows, *of_head)[1](grad[place[0], rows, place[1], channels].double())
        for total, more in zip(_of_head(place, *totals), gradients, strict=True):
            total += more
    return _five([total.to(x.dtype) for total, x in zip(totals, inputs)], q.new_empty(0))


def _five(tensors, missing: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """q, k, f, beta and the bias; `missing` where there is no bias."""
    return *tensors[:4], tensors[4] if len(tensors) > 4 else missing


@operator(f"softmax_recompute_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _recompute_backward(grad, some, *inputs):
    if some:
        return _gradients(grad, *inputs)
    gradients = _like(grad, some, *inputs)
    for alike in gradients[:3], gradients[3:]:  # of one dtype each: one launch
        torch._foreach_zero_(alike)
    return gradients


@_recompute_backward.register_fake
def _like(grad, some, doubtful, q, k, f, beta, bias, *_) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, f, beta, q.new_empty(0) if bias is None else bias))


def _save(ctx, inputs, output):
    _, *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(output[1], *tensors)


def _differentiate(ctx, grad, _):
    some, doubtful, *tensors = ctx.saved_tensors
    inputs, how = tensors[:5], (*tensors[5:], ctx.causal, ctx.scale)
    if torch.is_grad_enabled():
        gradients = again_differentiable(lambda *x: [_placed(doubtful, _listed(doubtful), *x, *how)], inputs, [grad])
    else:  # a graph and the meta device need an op, but inside an op vjp does not know dispatch modes
        plain = type(grad) is Tensor and not grad.is_meta
        given = (doubtful, *inputs, *how)
        gradients = _gradients(grad, *given) if plain else _recompute_backward(grad, some, *given)
    return None, None, *gradients[:4], gradients[4] if inputs[4] is not None else None, *[None] * 5


_recompute.register_autograd(_differentiate, setup_context=_save)

_Head = tuple[int, int]  # of the batch, and of the queries


def _listed(doubtful: Tensor) -> Tensor:
    """(batch, head, row, channel) of each, ascending."""
    return doubtful.transpose(1, 2).nonzero()


def _placed(doubtful, entries, q, k, f, beta, bias, *how) -> Tensor:
    """The free energies of the entries, at their places."""
    found = torch.zeros(doubtful.shape, dtype=compute_dtype(q), device=q.device)
    parts = []
    for place, rows, channels in _parts(entries, k.shape[1], f.shape[3]):
        inputs = [x.double() for x in _of_head(place, q, k, f, beta, *([] if bias is None else [bias]))]
        parts.append(_of_rows(place, rows, channels, *_five(inputs), *how))
    if not parts:
        return found
    batch, head, row, channel = entries.unbind(1)
    return found.index_put((batch, row, head, channel), torch.cat(parts).to(found.dtype))


def _parts(entries: Tensor, keys: int, channels: int) -> Iterator[tuple[_Head, Tensor, Tensor]]:
    """Entries of one head, as many as fit into memory at once: the rows and channels of each."""
    places, counts = entries[:, :2].unique_consecutive(dim=0, return_counts=True)
    step = max(1, _NUMBERS // (keys * channels)) * channels
    for place, of_head in zip(places.tolist(), entries[:, 2:].split(counts.tolist())):
        for part in of_head.split(step):
            yield tuple(place), *part.unbind(1)


def _of_head(place: _Head, q: Tensor, k: Tensor, f: Tensor, beta: Tensor, *bias: Tensor) -> list[Tensor]:
    """The parts of the tensors that belong to a head."""
    batch, head = place
    group = head // (q.shape[2] // k.shape[2])
    of_bias = [x[batch % x.shape[0], head % x.shape[1]] for x in bias]
    return [q[batch, :, head], k[batch, :, group], f[batch, :, group], beta[group], *of_bias]


def _of_rows(place, rows, channels, q, k, f, beta, bias, keep, first, end, causal, scale) -> Float[Tensor, " n"]:
    """The free energies of entries of one head, in float64 and of torch's own steps, which can be differentiated."""
    row, row_of = rows.unique_consecutive(return_inverse=True)
    index = torch.arange(k.shape[0], device=k.device)
    allowed = torch.ones(len(row), len(index), dtype=torch.bool, device=k.device)
    if first is not None:
        first, end = (x[place[0] % x.shape[0], row, None] for x in (first, end))
        allowed = (first <= index) & (index < end)
    elif causal:
        allowed = index <= row[:, None] + k.shape[0] - q.shape[0]
    if keep is not None:
        allowed = allowed & keep[place[0]]
    s = scale * q[row] @ k.mT
    if bias is not None:
        bias = bias.expand(q.shape[0], k.shape[0])[row]
        allowed = allowed & ~torch.isneginf(bias)
        s = s + bias.where(allowed, 0.0)
    empty = ~allowed.any(1)
    s = s.masked_fill(~allowed, -torch.inf).masked_fill(empty[:, None], 0.0)
    log_p = s.log_softmax(1)
    channel, channel_of = channels.unique(return_inverse=True)
    f, beta = f[:, channel], beta[channel]
    hidden = ~allowed.any(0)[:, None]
    shift = f.detach().masked_fill(hidden, -torch.inf).amax(0).nan_to_num(neginf=0.0)  # no row sees a key
    f = torch.where(hidden, shift, f)
    total = log_p.exp() @ ((f - shift) * beta).exp()
    sure = total.detach() >= LEAST_PROVEN[torch.float64]
    free = (shift + total.where(sure, 1.0).log() / beta)[row_of, channel_of]
    unsure = ~sure[row_of, channel_of]
    if bool(unsure.any()):
        at, of = row_of[unsure], channel_of[unsure]
        energies = (log_p[at] + (beta * f).mT[of]).logsumexp(1) / beta[of]
        free = free.index_put((unsure.nonzero()[:, 0],), energies)
    return free.masked_fill(empty[row_of], 0.0)
