"""The softmax read by its definition in float64: what attention does not prove, the reference, torch.func's form and
that of second derivatives.

    p_ti = softmax_i(scale q_t . k_i + bias_ti)
    mean_tj = sum_i p_ti v_ij        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j f_ij)                 (Eq. 4)
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fem.ops.common.operator import operator, recorded
from fem.ops.common.precision import fallbacks
from fem.ops.common.read import Read
from fem.ops.softmax.support import Support, bounds

_NUMBERS = 1 << 22  # in float64 at once, 32 MiB
_LEAST_SUM = 1e-130  # of a sum that has lost no digit; a second derivative divides by its square


def definition(q, k, v, f, beta: Float[Tensor, "hkv df"], support: Support) -> Read:
    """The read as the equations stand, in plain steps that PyTorch can transform in any way, some rows at a time.

    Time and memory grow with T_q T d_f.
    """
    (_, queries, heads, _), keys = q.shape, k.shape[1]
    q, k, v, f, beta = (
        x.double().repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (q, k, v, f, beta[None, None])
    )
    visible = support.visible(queries, keys, q.device).expand(-1, -1, queries, -1)
    bias = None if support.bias is None else support.bias.double().expand(-1, -1, queries, keys)
    hidden = ~visible.any(2)[..., None]  # from all, whose values are multiplied by nothing but 0
    v, f = v.masked_fill(hidden, 0.0), f.masked_fill(hidden, 0.0)
    means, energies = [], []
    for start in range(0, queries, room := max(1, _NUMBERS // (len(q) * heads * keys * max(1, f.shape[3])))):
        rows = slice(start, start + room)
        s = support.scale * q[:, :, rows] @ k.mT
        log_p, empty = _log_prior(s, visible[:, :, rows], None if bias is None else bias[:, :, rows])
        means.append((log_p.exp() @ v).masked_fill(empty, 0.0))
        energies.append(((log_p[..., None] + (beta * f)[:, :, None]).logsumexp(3) / beta).masked_fill(empty, 0.0))
    return Read(*(torch.cat(parts, 2).transpose(1, 2) for parts in (means, energies)))


def exact_where(doubt: Bool[Tensor, "b tq h df"], free_energy: Tensor, q, k, f, beta, support: Support) -> Tensor:
    """The free energies (B, T_q, H, d_f), doubtful ones computed again."""
    first, end = bounds(support, q.shape[1], k.shape[1], q.device)
    inputs = doubt, free_energy, q * support.scale, k, f, beta, support.keep, first, end, support.bias
    if torch.compiler.is_compiling() or doubt.is_meta or type(doubt) is not Tensor:
        return _in_graphs(*inputs)
    if not bool(doubt.any()):
        fallbacks.count(doubt.numel(), 0)
        return free_energy
    fallbacks.count(doubt.numel(), int(doubt.sum()))
    return _again(*inputs)


def _again(doubt, free_energy, q, k, f, beta, keep, first, end, bias) -> Tensor:
    """The free energies, doubtful ones from some rows of one head at a time, of queries that were scaled."""
    groups = q.shape[2] // k.shape[2]
    batch, head = doubt.any(3).any(1).nonzero(as_tuple=True)
    if not len(batch):
        return torch.where(doubt, 0.0, free_energy)  # an operator returns new tensors, and so does its gradient
    heads = [x[batch, :, h].unbind() for x, h in ((q, head), (k, head // groups), (f, head // groups), (doubt, head))]
    tables = None if bias is None else bias.flatten(0, 1).unbind()  # whose gradient is one for all heads
    energies, places = [], []
    for b, h, q_h, k_h, f_h, wanted in zip(batch.tolist(), head.tolist(), *heads):
        rates, (low, high) = beta[h // groups].double(), (x[min(b, len(x) - 1)] for x in (first, end))
        table = None if bias is None else tables[min(b, len(bias) - 1) * bias.shape[1] + min(h, bias.shape[1] - 1)]
        for rows in wanted.any(1).nonzero()[:, 0].split(max(1, _NUMBERS // (2 * k.shape[1]))):
            start = int(low[rows[0]])
            keys = slice(start, max(int(high[rows[-1]]), start + 1))
            seen = low[rows] - start, high[rows] - start, None if keep is None else keep[b, keys]
            inputs = q_h[rows], k_h[keys], f_h[keys], rates, _part(table, rows, keys), *seen, wanted[rows]
            energies.append(_recomputed_for_gradients(_exactly, *inputs).to(free_energy.dtype))
            places.append(torch.stack([torch.full_like(rows, b), rows, torch.full_like(rows, h)]))
    again = torch.zeros_like(free_energy).index_put(tuple(torch.cat(places, 1)), torch.cat(energies))
    return torch.where(doubt, again, free_energy)


def _part(table: Float[Tensor, "#tq #t"] | None, rows: Tensor, keys: slice) -> Float[Tensor, "#r #n"] | None:
    """What of a head's bias belongs to some rows and keys."""
    if table is None:
        return None
    return table[rows if table.shape[0] > 1 else slice(None), keys if table.shape[1] > 1 else slice(None)]


def _recomputed_for_gradients(function, *inputs) -> Tensor:
    """The function, of whose steps a gradient keeps none: scores of all rows in doubt together may be too many."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def _log_prior(s, visible, bias) -> tuple[Tensor, Bool[Tensor, "... 1"]]:
    """log p of scores, and which rows see no key: theirs are finite and mean nothing."""
    s = s if bias is None else s + bias.where(visible, 0.0)
    empty = ~visible.any(-1, keepdim=True)
    return s.masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0).log_softmax(-1), empty


def _exactly(q, k, f, beta, bias, first, end, keep, wanted) -> Float[Tensor, "r c"]:
    """F of some rows of one head."""
    index = torch.arange(len(k), device=k.device)
    visible = (first[:, None] <= index) & (index < end[:, None])
    visible = visible if keep is None else visible & keep
    if bias is not None:
        bias = bias.double()
        visible = visible & ~torch.isneginf(bias.detach())
    log_p, _ = _log_prior(q.double() @ k.double().mT, visible, bias)
    return _energies(log_p, f.double(), beta, wanted)


def _energies(
    log_p: Float[Tensor, "r t"], f: Float[Tensor, "t c"], beta: Float[Tensor, " c"], wanted: Bool[Tensor, "r c"]
) -> Float[Tensor, "r c"]:
    """F by a product where float64 has the digits, entry by entry elsewhere; what is not wanted is finite."""
    shift = f.detach().amax(0)
    total = log_p.exp() @ ((f - shift) * beta).exp()
    sure = total.detach() >= _LEAST_SUM
    free_energy = shift + total.where(sure, 1.0).log() / beta
    row, channel = (wanted & ~sure).nonzero(as_tuple=True)
    if not len(row):
        return free_energy
    parts = zip(*(x.split(max(1, _NUMBERS // len(f))) for x in (row, channel)))
    entries = [_recomputed_for_gradients(_entries, log_p, f, beta, *part) for part in parts]
    return free_energy.index_put((row, channel), torch.cat(entries))


def _entries(log_p, f, beta, row, channel) -> Float[Tensor, " n"]:
    return (log_p[row] + (beta * f).mT[channel]).logsumexp(1) / beta[channel]


# --- for torch.compile, which does not look into an operator ---------------------------------------------------------

_INPUTS = (
    "Tensor doubt, Tensor free_energy, Tensor q, Tensor k, Tensor f, Tensor beta, Tensor? keep, Tensor first, "
    "Tensor end, Tensor? bias"
)


@operator(f"softmax_exact({_INPUTS}) -> Tensor")
def _in_graphs(doubt, free_energy, *inputs):
    recomputed = int(doubt.sum())  # the host waits, once
    fallbacks.count(doubt.numel(), recomputed)
    if not recomputed:
        return free_energy.clone(memory_format=torch.contiguous_format)
    return _again(doubt, free_energy, *inputs)


@operator(f"softmax_exact_backward(Tensor grad, bool[] wanted, {_INPUTS}) -> Tensor[]")
def _in_graphs_backward(grad, wanted, *inputs):
    with recorded():
        leaves = [x if x is None else x.detach().requires_grad_(w) for x, w in zip(inputs, wanted)]
        asked = [x for x, w in zip(leaves, wanted) if w]
        gradients = torch.autograd.grad(_again(*leaves), asked, grad, materialize_grads=True)
    return [d.contiguous() for d in gradients]


def _differentiate_in_graphs(ctx, grad):
    wanted = list(ctx.needs_input_grad)
    gradients = iter(_in_graphs_backward(grad, wanted, *ctx.saved_tensors))
    return tuple(next(gradients) if w else None for w in wanted)


_in_graphs.register_fake(lambda doubt, free_energy, *others: free_energy.new_empty(free_energy.shape))
_in_graphs_backward.register_fake(
    lambda grad, wanted, *inputs: [x.new_empty(x.shape) for x, w in zip(inputs, wanted) if w]
)
_in_graphs.register_autograd(
    _differentiate_in_graphs, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
