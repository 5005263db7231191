"""The softmax read: mean and free energy of the values under a softmax prior, and what computes them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import differentiated, exporting, found, may_look, softmax_backend, transformed
from fem.ops.common.precision import without_autocast
from fem.ops.common.read import Read, connected_zeros, read_free, rounded
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.composed_read import composed_read
from fem.ops.softmax.exact import definition
from fem.ops.softmax.free_energy import free_energy_read
from fem.ops.softmax.one_query import one_query_read
from fem.ops.softmax.support import Support, existing, support

_FEW = 16  # queries, each of which reads all keys


def softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv df"] | None,
    free_values: Float[Tensor, "b t hkv df"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    tokens: Tokens | None = None,
    backend: str = "auto",
    span: float = math.inf,
) -> Read:
    """`fem.functional.softmax_read` of checked arguments, with `tokens` in the place of masks and documents.

    span: as in `composed_read`, for values that were clipped. Results have the dtype of q, k and v together, under
    autocast too.
    """
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    backend = softmax_backend(backend, q.device, dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    f, rates = read_free(v, free_values, beta)
    if q.shape[0] * q.shape[1] * k.shape[1] == 0:
        zeros = (connected_zeros(x.to(dtype), (*q.shape[:3], x.shape[3]), q, k, v, f, rates, bias) for x in (v, f))
        return rounded(Read(*zeros), dtype, beta)
    shared = f is v
    q, k, v = (x.to(dtype) for x in (q, k, v))
    f = v if shared else f.to(dtype)
    rules = support(q.shape[1], k.shape[1], q.device, causal, scale, window, bias, tokens)
    special = transformed(q, k, v, f, rates, bias)
    few = backend == "sdpa" and (q.shape[1] == 1 or are_few(q))
    few = few and not (special or exporting() or differentiated(q, k, v, f, rates, bias))
    if few and _has_kernels(q):
        return rounded(_queries_on_card(q, k, v, f, rates, rules), dtype, beta)
    one = few and q.shape[1] == 1
    rules = rules._replace(keep=existing(rules, q.shape[0], k.shape[1]))
    if one and may_look(q):
        read = _one_query(q, k, v, f, rates, rules)
        if rules.keep is None or all(bool(x.isfinite().all()) for x in read):  # else a masked token may hold NaN
            return rounded(read, dtype, beta)
    if rules.keep is not None:
        k, v = (without_masked(x, rules.keep) for x in (k, v))
        f = v if shared else without_masked(f, rules.keep)
    if backend == "reference" or special:
        read = definition(q, k, v, f, rates, rules)
    elif one:
        read = _one_query(q, k, v, f, rates, rules)
    elif exporting() or (backend == "sdpa" and q.is_cuda):
        read = composed_read(q, k, v, f, rates, rules, span)
    else:
        read = free_energy_read(q, k, v, f, rates, rules, backend == "sdpa")
    return rounded(read, dtype, beta)


def _one_query(q, k, v, f, beta, rules: Support) -> Read:
    keys, values, free_values = (x.transpose(1, 2) for x in (k, v, f))
    with without_autocast(q.device):
        return one_query_read(q[:, 0], keys, values, free_values, beta, mask_of_one(rules, k), rules.scale, f is v)


def _has_kernels(q: Tensor) -> bool:
    return q.is_cuda and found("triton")


def are_few(q: Tensor) -> bool:
    """Of one row, as when guessed tokens are checked: whose reads may as well be those of as many rows."""
    return not torch.compiler.is_compiling() and q.shape[0] == 1 and q.shape[1] <= _FEW


def _queries_on_card(q, k, v, f, beta, rules: Support) -> Read:
    """One query of each row, or a few of one, by two kernels, which pass over what masked keys and values hold."""
    from fem.ops.softmax.one_query_kernels import read_one_query  # by Triton, which the library does not require

    queries, time, table = q.shape[1], k.shape[1], None
    if rules.causal or rules.first is not None or (rules.keep is not None and rules.bias is not None):
        pairs = queries, time, q.device
        table = rules.visible(*pairs) if rules.bias is None else rules.mask(*pairs, -torch.inf)
    elif rules.bias is not None:
        table = rules.bias
    elif rules.keep is not None:
        table = rules.keep[:, None, None]
    table = None if table is None else table.expand(-1, -1, queries, time)
    keys, values, free_values = (x.transpose(1, 2) for x in (k, v, f))
    if queries == 1:
        mask = None if table is None else table[:, :, 0]
        return read_one_query(q[:, 0], keys, values, free_values, beta, mask, rules.scale, f is v)
    mask = None if table is None else table[0].transpose(0, 1)
    rows = [x.expand(queries, -1, -1, -1) for x in (keys, values, free_values)]
    read = read_one_query(q[0], *rows, beta, mask, rules.scale, f is v)
    return Read(*(x.transpose(0, 1) for x in read))


def without_masked(x: Float[Tensor, "b t h d"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b t h d"]:
    """x with a row's first kept token in the place of its masked ones, whatever stood there, NaN too: p is 0 there, so
    that nothing else has to know of them."""
    first = keep.int().argmax(1)[:, None, None, None].expand(-1, 1, *x.shape[2:])
    first = x.gather(1, first).masked_fill(~keep.any(1)[:, None, None, None], 0.0)
    return torch.where(keep[..., None, None], x, first)


def mask_of_one(rules: Support, keys: Float[Tensor, "b t h d"]) -> Float[Tensor, "#b #hq t"] | None:
    """What is added to the scores of one query; None: nothing."""
    return rules.mask(1, keys.shape[1], keys.device, -torch.inf)[:, :, 0] if rules.restricted else None
