"""The free energies that one attention call does not prove, from the definition in float64: rows in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.precision import upcast
from fem.ops.softmax import entries as softmax_entries
from fem.ops.softmax.support import Intervals


def recompute(
    free_energy: Float[Tensor, "b tq h dv"],
    doubtful: Bool[Tensor, "b tq h dv"],
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv dv"],
    bias: Float[Tensor, "#b #h #tq #t"] | None,
    seen: Intervals | None,
    causal: bool,
    scale: float,
) -> Float[Tensor, "b tq h dv"]:
    """The free energies, doubtful ones computed again; seen: what a query sees; None: all, or i <= t if causal."""
    first, end = (None, None) if seen is None else seen
    if not torch.compiler.is_compiling() and not bool(doubtful.any()):
        fallbacks.count(doubtful.numel(), 0)
        return free_energy
    return torch.where(doubtful, _recompute(doubtful, q, k, v, beta, bias, first, end, causal, scale), free_energy)


@dataclass(frozen=True)
class _Rows:
    """s_ti = scale q_t . k_i + bias_ti of the rows asked for, in float64, -inf where t does not see i."""

    q: Float[Tensor, "b tq h d"]
    k: Float[Tensor, "b t h d"]
    bias: Float[Tensor, "b h tq t"] | None
    first: Tensor
    end: Tensor
    scale: float

    def of_rows(self, batch: int, head: int, rows: Tensor) -> Float[Tensor, "r keys"]:
        first, end = (x[batch % len(x), rows, None] for x in (self.first, self.end))
        keys = int(end.amax())
        s = self.scale * self.q[batch, rows, head].double() @ self.k[batch, :keys, head].double().T
        if self.bias is not None:
            s += self.bias[batch, head, rows, :keys]
        index = torch.arange(keys, device=s.device)
        return s.masked_fill_((index < first) | (index >= end), -torch.inf)


def _definition(q, k, v, beta, bias, first, end, causal, scale):
    """Scores, values and beta per query head, of finite numbers."""
    per_head = lambda x, dim: x.repeat_interleave(q.shape[2] // x.shape[dim], dim)  # noqa: E731
    if first is None:
        row = torch.arange(q.shape[1], device=q.device)[None]
        first, end = torch.zeros_like(row), row + k.shape[1] - q.shape[1] + 1 if causal else row * 0 + k.shape[1]
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    v = upcast(v).nan_to_num(0.0, 0.0, 0.0)
    return _Rows(q, per_head(k, 2), bias, first, end, scale), per_head(v, 2), per_head(upcast(beta), 0)[None, None]


@torch.library.custom_op(
    "fem::softmax_recompute",
    mutates_args=(),
    schema="(Tensor doubtful, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? bias, Tensor? first, Tensor? end, "
    "bool causal, float scale) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # how many there are is read on the host
)
def _recompute(doubtful, q, k, v, beta, bias, first, end, causal, scale):
    """The free energy where it is doubtful, anything finite elsewhere."""
    found = torch.zeros(doubtful.shape, dtype=upcast(q).dtype, device=q.device)
    entries = _listed(doubtful)
    fallbacks.count(doubtful.numel(), len(entries))
    if len(entries):
        exact = softmax_entries.free_energies(*_definition(q, k, v, beta, bias, first, end, causal, scale), entries)
        b, head, row, channel = entries.unbind(1)
        found[b, row, head, channel] = exact.to(found.dtype)
    return found


@_recompute.register_fake
def _(doubtful, q, k, v, beta, bias, first, end, causal, scale):
    return torch.empty(doubtful.shape, dtype=upcast(q).dtype, device=q.device)


def _listed(doubtful: Tensor) -> softmax_entries.Entries:
    """(batch, head, row, channel) of each, ascending."""
    return doubtful.transpose(1, 2).nonzero()


@torch.library.custom_op(
    "fem::softmax_recompute_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor doubtful, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? bias, Tensor? first, "
    "Tensor? end, bool causal, float scale, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _recompute_backward(grad, doubtful, q, k, v, beta, bias, first, end, causal, scale, of_bias):
    zeros = lambda x: torch.zeros(x.shape, dtype=upcast(x).dtype, device=x.device)  # noqa: E731
    dbias = zeros(bias) if of_bias else grad.new_empty(0)
    entries = _listed(doubtful)
    if not len(entries):
        return *(torch.zeros_like(x) for x in (q, k, v, beta)), dbias.to(bias.dtype) if of_bias else dbias
    b, head, row, channel = entries.unbind(1)
    scores, *definition = _definition(q, k, v, beta, bias, first, end, causal, scale)
    more = [zeros(x) for x in (scores.q, scores.k, *definition)]

    def add_scores(batch: int, head: int, rows: Tensor, ds: Tensor) -> None:
        place = dbias[batch % len(dbias), head % dbias.shape[1]]
        if dbias.shape[3] == 1:
            ds = ds.sum(1, keepdim=True)
        if dbias.shape[2] == 1:
            rows, ds = torch.zeros_like(rows[:1]), ds.sum(0, keepdim=True)
        place[rows, : ds.shape[1]] += ds.to(place.dtype)

    softmax_entries.add_gradients(
        scores, *definition, entries, grad[b, row, head, channel], *more, add_scores if of_bias else None
    )
    dq, dk, dv, dbeta = more
    of_group = lambda x, dim: x.unflatten(dim, (k.shape[2], -1)).sum(dim + 1)  # noqa: E731
    dk, dv, dbeta = of_group(dk, 2).to(k.dtype), of_group(dv, 2).to(v.dtype), of_group(dbeta[0, 0], 0).to(beta.dtype)
    return dq.to(q.dtype), dk, dv, dbeta, dbias.to(bias.dtype) if of_bias else dbias


@_recompute_backward.register_fake
def _(grad, doubtful, q, k, v, beta, bias, first, end, causal, scale, of_bias):
    whole = lambda x: x.new_empty(x.shape)  # noqa: E731
    return whole(q), whole(k), whole(v), whole(beta), whole(bias) if of_bias else grad.new_empty(0)


def _save(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    of_bias = ctx.needs_input_grad[5]
    *gradients, dbias = _recompute_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, of_bias)
    return None, *gradients, dbias if of_bias else None, *[None] * 4


_recompute.register_autograd(_differentiate, setup_context=_save)
