"""The softmax read: mean and free energy of the values under a softmax prior, and what computes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import softmax_backend
from fem.ops.common.packing import Packing
from fem.ops.common.precision import compute_dtype, without_autocast
from fem.ops.common.read import Read, connected_zeros
from fem.ops.common.steps import exporting
from fem.ops.common.tokens import Tokens
from fem.ops.common.transforms import differentiated, transformed
from fem.ops.softmax.cached import unpacked
from fem.ops.softmax.composed import composed_read, fused
from fem.ops.softmax.decode import packed_step, softmax_step, traced_step
from fem.ops.softmax.naive import naive_softmax_read
from fem.ops.softmax.op import pair_read
from fem.ops.softmax.support import Pairs, intervals


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
    keep, document = (None, None) if tokens is None else (tokens.keep, tokens.document)
    queries, time = q.shape[1], k.shape[1]
    f, temperatures = _second(v, free_values, beta, v.shape[2])
    if q.shape[0] * queries * time == 0:
        zeros = [connected_zeros(x.to(dtype), (*q.shape[:3], x.shape[3]), q, k, v, f, beta, bias) for x in (v, f)]
        return Read(zeros[0], None if beta is None else zeros[1])
    if backend == "reference":
        read = naive_softmax_read(q, k, v, beta, causal, scale, window, bias, keep, document, free_values)
        return _as(dtype, beta, read)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    q, k, *values = (x.to(dtype) for x in ((q, k, v) if f is v else (q, k, v, f)))
    if keep is not None:  # whatever stands in a masked token, NaN too, is multiplied by 0 later on
        k, *values = (x.masked_fill(~keep[..., None, None], 0.0) for x in (k, *values))
    v, f = values[0], values[-1]
    composed = exporting() or (backend == "sdpa" and q.is_cuda)
    by_pairs = window is not None or document is not None or (causal and 1 < queries < time)
    on_gpu = composed and not exporting()
    by_pairs = by_pairs or (on_gpu and (keep is not None or bias is not None))
    causal = causal and queries > 1
    seen = intervals(queries, time, causal, window, tokens, q.device) if by_pairs else None
    pairs = Pairs.of(bias, keep, seen, causal, scale)
    read = None
    if queries == 1 and backend == "sdpa" and (step := _one_query(q, k, v, f, beta, bias)) is not None:
        heads_first = [x.transpose(1, 2) for x in (k, v, f)]
        with without_autocast(q.device):
            read = step(q[:, 0], *heads_first, temperatures, _mask(pairs, heads_first[0]), scale, f is v)
    if read is None and composed:
        read = composed_read(q, k, v, f, temperatures, pairs, span)
    elif read is None:
        read = pair_read(q, k, v, f, temperatures, pairs, backend == "sdpa")
    return _as(dtype, beta, read)


def cached_read(
    q: Float[Tensor, "b tq h dk"],
    keys: Float[Tensor, "b hkv t dk"],
    values: Float[Tensor, "b hkv t w"],
    beta: Float[Tensor, "hkv df"] | None,
    packing: Packing | None = None,
    *,
    split: bool = False,
    window: int | None = None,
    tokens: Tokens | None = None,
    backend: str = "auto",
) -> Read:
    """`softmax_read` of the last tokens over a cache, which has the heads first.

    packing: with which temperatures and shifts the values were packed as [v | e]: one token is then read by one
    attention over them, where that is proven to be exact. None: they are v, or with `split`, which says that the free
    energy is of other values f than v, [v | f].
    """
    time = keys.shape[2]
    dtype = torch.promote_types(q.dtype, torch.promote_types(keys.dtype, values.dtype))
    one = q.shape[1] == 1 and q.shape[0] > 0 and softmax_backend(backend, q.device, dtype) == "sdpa"
    step = _one_query(q, keys, values, beta) if one else None
    if step is not None:
        by_pairs = window is not None or (tokens is not None and tokens.document is not None)
        seen = intervals(1, time, False, window, tokens, q.device) if by_pairs else None
        scale = q.shape[-1] ** -0.5
        mask = _mask(Pairs.of(None, None if tokens is None else tokens.keep, seen, False, scale), keys)
        if packing is not None and step is softmax_step:
            with without_autocast(q.device):
                read = packed_step(q[:, 0], keys, values, packing, mask, scale)
            if read is not None:
                return _as(dtype, beta, Read(*(x[:, None] for x in read)))
    v, free_values = unpacked(values, packing, split, 0 if beta is None else beta.shape[-1])
    if step is not None:
        f, temperatures = _second(v, free_values, beta, keys.shape[1])
        with without_autocast(q.device):
            read = step(q[:, 0], keys, v, f, temperatures, mask, scale, f is v)
        if read is not None:
            return _as(dtype, beta, read)
    k, v, free_values = (None if x is None else x.transpose(1, 2) for x in (keys, v, free_values))
    return softmax_read(q, k, v, beta, free_values, window=window, tokens=tokens, backend=backend)


def _second(v: Tensor, free_values: Tensor | None, beta: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """The values whose free energy is read, and its temperatures; attention is a pair of which the second is empty."""
    if beta is None:
        return v[..., :0], v.new_empty(heads, 0)
    return v if free_values is None else free_values, beta


def _one_query(*tensors: Tensor | None) -> Callable[..., Read | None] | None:
    """What reads a single query exactly, or says None; itself None where a derivative is wanted or a graph exported.

    Under a compiler, which is at work for eager calls on a GPU too, it looks at no value.
    """
    if exporting() or transformed(*tensors) or differentiated(*tensors):
        return None
    traced = tensors[0].is_cuda or torch.compiler.is_compiling()
    return fused(traced_step, tensors[0]) if traced else softmax_step


def _mask(pairs: Pairs, keys: Tensor) -> Float[Tensor, "#b #h t"] | None:
    """What is added to the scores of one query: the bias, -inf where a key is not seen; None: nothing."""
    if not pairs.restricted():
        return None
    bias = 0.0 if pairs.bias is None else pairs.bias.to(compute_dtype(pairs.bias))
    return torch.where(pairs.allowed(1, keys.shape[-2], keys.device), bias, -torch.inf)[:, :, 0]


def _as(dtype: torch.dtype, beta: Tensor | None, read: Read) -> Read:
    return Read(read.mean.to(dtype), None if beta is None else read.free_energy.to(dtype))
