"""The free energies that one attention call does not prove, from their definition in float64.

F_tj = c_j + log(sum_i p_ti exp(beta_j (f_ij - c_j))) / beta_j                  where float64 has the digits, and
F_tj = (log sum_i exp(s_ti + beta_j f_ij) - log sum_i exp(s_ti)) / beta_j       entry by entry elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.composed import recorded
from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.operator import operator
from fem.ops.common.precision import LEAST_PROVEN, compute_dtype
from fem.ops.common.transforms import again_differentiable
from fem.ops.softmax.support import PAIRS, Pairs

_NUMBERS = 1 << 23  # in float64 at once: rows x keys x channels, 64 MiB


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
    entries = _listed(doubtful) if some else doubtful.new_empty(0, 4, dtype=torch.long)
    fallbacks.count(doubtful.numel(), len(entries))
    with torch.no_grad():
        return _placed(doubtful, entries, *inputs), some


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
    for head, rows, channels in _parts(_listed(doubtful), k.shape[1], f.shape[3]):
        with recorded():
            of_head = [x.detach().double().requires_grad_() for x in _of_head(head, *inputs)]
            energies = _of_rows(rules, head, rows, channels, *of_head)
            of_energies = grad[head[0], rows, head[1], channels].double()
            gradients = torch.autograd.grad(energies, of_head, of_energies)
        for total, more in zip(_of_head(head, *totals), gradients):
            total += more
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
        gradients = again_differentiable(lambda *x: [_placed(doubtful, _listed(doubtful), *x, *rules)], inputs, [grad])
    else:
        gradients = _recompute_backward(grad, some, doubtful, *inputs, *rules)
    of_bias = None if inputs[4] is None else gradients[4]
    return None, None, *gradients[:4], of_bias, *[None] * 5


_recompute.register_autograd(_differentiate, setup_context=_save)

_Head = tuple[int, int]  # a row of the batch, and a query head of it


def _listed(doubtful: Tensor) -> Tensor:
    """(batch, head, row, channel) of each, ascending."""
    return doubtful.transpose(1, 2).nonzero()


def _placed(doubtful, entries, q, k, f, beta, bias, *rules) -> Tensor:
    """The free energies of the entries, at their places."""
    free_energy = torch.zeros(doubtful.shape, dtype=compute_dtype(q), device=q.device)
    parts = []
    for head, rows, channels in _parts(entries, k.shape[1], f.shape[3]):
        inputs = [x.double() for x in _of_head(head, q, k, f, beta, *([] if bias is None else [bias]))]
        parts.append(_of_rows(rules, head, rows, channels, *inputs))
    if not parts:
        return free_energy
    batch, head, row, channel = entries.unbind(1)
    return free_energy.index_put((batch, row, head, channel), torch.cat(parts).to(free_energy.dtype))


def _parts(entries: Tensor, keys: int, channels: int) -> Iterator[tuple[_Head, Tensor, Tensor]]:
    """Entries of one head, as many as fit into memory at once: the rows and channels of each."""
    heads, counts = entries[:, :2].unique_consecutive(dim=0, return_counts=True)
    step = max(1, _NUMBERS // (keys * channels)) * channels
    for head, of_head in zip(heads.tolist(), entries[:, 2:].split(counts.tolist())):
        for part in of_head.split(step):
            yield tuple(head), *part.unbind(1)


def _of_head(head: _Head, q: Tensor, k: Tensor, f: Tensor, beta: Tensor, *bias: Tensor) -> list[Tensor]:
    """The parts of the tensors that belong to a head."""
    batch, query_head = head
    group = query_head // (q.shape[2] // k.shape[2])
    of_bias = [x[batch % x.shape[0], query_head % x.shape[1]] for x in bias]
    return [q[batch, :, query_head], k[batch, :, group], f[batch, :, group], beta[group], *of_bias]


def _of_rows(rules, head, rows, channels, q, k, f, beta, bias=None) -> Float[Tensor, " n"]:
    """The free energies of entries of one head, in float64 and of torch's own steps, which can be differentiated."""
    keep, first, end, causal, scale = rules
    row, row_of = rows.unique_consecutive(return_inverse=True)
    index = torch.arange(k.shape[0], device=k.device)
    allowed = torch.ones(len(row), len(index), dtype=torch.bool, device=k.device)
    if first is not None:
        first, end = (x[head[0] % x.shape[0], row, None] for x in (first, end))
        allowed = (first <= index) & (index < end)
    elif causal:
        allowed = index <= row[:, None] + k.shape[0] - q.shape[0]
    if keep is not None:
        allowed = allowed & keep[head[0]]
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
