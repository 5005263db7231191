"""The read of a softmax layer by an engine's attention over the engine's cache: one call over [v | e]."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache

from fem.models.cache import CACHE
from fem.ops.common.backend import transformed
from fem.ops.common.read import Read
from fem.ops.softmax.cached import REACH, fixed_packing, pack, unpack
from fem.ops.softmax.packing import Packing

SPLITTING = "torch/distributed/tensor/experimental"  # the file of a function in the place of torch's attention
EXACT = "exact"  # the attn_implementation of a model that reads with the library's own kernels and states


def attend(
    block: nn.Module,
    attention: Callable,
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv df"] | None,
    free_values: Float[Tensor, "b t hkv df"] | None,
    *,
    attention_mask=None,
    past_key_values: Cache | None = None,
    **keywords,
) -> Read:
    """Mean and free energy from attention(q, k, values, mask, **keywords) of transformers' interface, over its cache.

        e = exp(beta f)        [mean | R] = softmax(q k / sqrt(d_k)) [v | e]        F = log(R) / beta

    f = free_values, or v itself where they are None; beta None: the mean only. Heads are padded with zeros to
    block.head_dim. e is right while |beta f| <= REACH[f.dtype] nats and is clipped there beyond, with a warning on a
    CPU; block.largest keeps the largest |beta f| since the model was loaded. attention_mask: the engine's, or a dict
    of them by kind of layer; keywords: the engine's, handed on.
    """
    batch, time = v.shape[:2]
    packing = None if beta is None else fixed_packing(beta, torch.zeros_like(beta))
    values = v if packing is None else _packed(block, v, v if free_values is None else free_values, packing)
    width, head = values.shape[3], block.head_dim
    q, k, values = (F.pad(x, (0, head - x.shape[3])).transpose(1, 2) for x in (q, k, values))
    if past_key_values is not None:
        k, values = past_key_values.update(k, values, block.layer_idx)
    if CACHE == "cache" and "cache" in keywords:  # pages, which the attentions of older versions write themselves
        k, values = keywords.pop("cache").update(k, values, block.layer_idx, kwargs=keywords)
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask[block.kind]
    keywords["sliding_window"] = block.sliding_window
    out, _ = attention(q, k, values, attention_mask, dropout=0.0, **keywords)
    out = out.reshape(batch, time, -1, head)[..., :width]
    if packing is None:
        return Read(out, None)
    read = unpack(out, packing.per_query_head(out.shape[2]))
    return Read(*(x.to(v.dtype) for x in read))


def refuse_split_rows() -> None:
    """Raise ValueError within torch's own `context_parallel`: it splits rows for scaled_dot_product_attention alone,
    which neither the read of a replaced attention nor the conditioner calls, so each process would read its part."""
    function = None if torch.compiler.is_compiling() else getattr(F.scaled_dot_product_attention, "__code__", None)
    if function is not None and SPLITTING in function.co_filename.replace("\\", "/"):
        raise ValueError(
            "rows must not be split by torch's context_parallel, whose attention this model does not call; of a "
            "FEM model fem.models.context.context_parallel splits them."
        )


def _packed(block: nn.Module, v: Tensor, f: Tensor, packing: Packing) -> Float[Tensor, "b t hkv w"]:
    if transformed(v):  # by torch.func, which lets nothing be written to a tensor from outside
        return pack(v, f, packing)
    reach, limit = packing.exponents(f.detach().float()).detach().abs().amax(), REACH[v.dtype]
    if block.largest.device != reach.device:  # one of them is on the meta device
        block.largest = torch.zeros_like(reach)
    torch.maximum(block.largest, reach.float(), out=block.largest)
    looks = v.device.type == "cpu" and not torch.compiler.is_compiling() and not block.warned
    if looks and not block.largest <= limit:  # NaN too
        block.warned = True
        warnings.warn(
            f"layer {block.layer_idx}: |beta v| reaches {block.largest:.1f} nats, but [v | e] in {v.dtype} holds "
            f"{limit:g}: e is clipped there and F is wrong; a model without attn_implementation reads exactly.",
            stacklevel=3,
        )
    return pack(v, f, packing)
