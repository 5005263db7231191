"""The softmax read: mean and free energy of the values under a softmax prior, and what computes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import differentiated, exporting, found, softmax_backend, transformed
from fem.ops.common.precision import without_autocast
from fem.ops.common.read import Read, connected_zeros, read_free, rounded
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.composed_read import composed_read
from fem.ops.softmax.exact import definition
from fem.ops.softmax.free_energy import free_energy_read
from fem.ops.softmax.one_query import one_query_read
from fem.ops.softmax.support import Support, support


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
    q, k, v, *f = (x.to(dtype) for x in ((q, k, v) if shared else (q, k, v, f)))
    rules = support(q.shape[1], k.shape[1], q.device, causal, scale, window, bias, tokens)
    if rules.keep is not None:
        if rules.keep.shape[0] == 1:
            rules = rules._replace(keep=rules.keep.expand(q.shape[0], -1))
        k, v, *f = (without_masked(x, rules.keep) for x in (k, v, *f))
    f = v if shared else f[0]
    if backend == "reference" or transformed(q, k, v, f, rates, bias):
        read = definition(q, k, v, f, rates, rules)
    elif exporting() or backend == "sdpa":
        read = _by_attention(q, k, v, f, rates, rules, span)
    else:
        read = free_energy_read(q, k, v, f, rates, rules, False)
    return rounded(read, dtype, beta)


def _by_attention(q, k, v, f, beta, rules: Support, span: float) -> Read:
    if q.shape[1] == 1 and not (exporting() or differentiated(q, k, v, f, beta, rules.bias)):
        keys, values, free_values = (x.transpose(1, 2) for x in (k, v, f))
        with without_autocast(q.device):
            step = _one_query(q)
            return step(q[:, 0], keys, values, free_values, beta, mask_of_one(rules, k), rules.scale, f is v)
    if exporting() or q.is_cuda:
        return composed_read(q, k, v, f, beta, rules, span)
    return free_energy_read(q, k, v, f, beta, rules, True)


def _one_query(q: Tensor) -> Callable[..., Read]:
    """By two kernels on a card; the library does not require Triton."""
    if not (q.is_cuda and found("triton")):
        return one_query_read
    from fem.ops.softmax.one_query_kernels import read_one_query

    return read_one_query


def without_masked(x: Float[Tensor, "b t h d"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b t h d"]:
    """x with a row's first kept token in the place of its masked ones, whatever stood there, NaN too: p is 0 there, so
    that nothing else has to know of them."""
    hidden = ~keep[..., None, None]
    x = x.masked_fill(hidden, 0.0)
    first = keep.int().argmax(1)[:, None, None, None].expand(-1, 1, *x.shape[2:])
    return torch.where(hidden, x.gather(1, first), x)


def mask_of_one(rules: Support, keys: Float[Tensor, "b t h d"]) -> Float[Tensor, "#b #hq t"] | None:
    """What is added to the scores of one query; None: nothing."""
    return rules.mask(1, keys.shape[1], keys.device, -torch.inf)[:, :, 0] if rules.restricted else None
