"""What a forward pass reads beside the tokens: its cache, documents, positions and masks."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from fem.models.arguments import is_of_tokens, mask_of_new_tokens, read_documents
from fem.models.cache import CACHE
from fem.models.engines.attention import EXACT
from fem.models.engines.obstacles import FULL, SLIDING
from fem.ops.common.tokens import PLAIN, Tokens, whole_rows

KEPT = "kept"  # among the masks of a compiled step: which new tokens the conditioner reads
WRITTEN = "written_by_fem"  # on a cache: it holds states, or values [v | e], not those of another model


def tokens_in(cache: object) -> int | Tensor:
    """The tokens in the cache, which is marked as filled by a FEM model; a static one counts on the device.

    Raises TypeError on what is no cache, ValueError on one that another model has filled.
    """
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        raise TypeError(
            f"past_key_values must be a cache of transformers, got a {type(cache).__name__}; leave it out to begin one."
        )
    seen = cache.get_seq_length()
    if isinstance(seen, int):
        if seen and not getattr(cache, WRITTEN, False):
            raise ValueError(
                f"past_key_values must be a cache that a FEM model has filled, got {type(cache).__name__} with {seen} "
                "tokens from elsewhere, which lack exp(beta v); instead of peft's PrefixTuningConfig use "
                "PromptTuningConfig."
            )
        setattr(cache, WRITTEN, True)
    return seen


def documents_of(
    config: PreTrainedConfig,
    x: Tensor,
    attention_mask: Tensor | dict | None,
    position_ids: Tensor | None,
    segment_ids: Tensor | None,
    past: int | Tensor,
    cached: bool,
) -> Tensor | None:
    """The document of every token of x, (B, T), by `read_documents`; None: there is one, or the mask says more.

    Raises ValueError where positions that restart would not tell transformers' masks where documents begin.
    """
    if config._attn_implementation == EXACT:
        return read_documents(x, attention_mask, position_ids, past, segment_ids)
    documents, compiling = segment_ids, torch.compiler.is_compiling()
    alone = attention_mask is None and not cached
    by_pairs = attention_mask is not None and not is_of_tokens(attention_mask)  # says itself what a token sees
    if isinstance(past, int) and (alone or not (by_pairs or compiling)):
        documents = read_documents(x, attention_mask, position_ids, past, segment_ids)
    if documents is None:
        return None
    name = config._attn_implementation
    seen = is_of_tokens(attention_mask) and not compiling
    whole = attention_mask is None or (seen and bool((attention_mask == 1).all()))
    if cached or not whole or ("flash" in name and len(x) > 1):
        raise ValueError(
            f"attn_implementation={name!r} reads packed documents (segment_ids, or position_ids that restart) only "
            "without a cache and without hidden tokens, flash attention only in one row; leave it out."
        )
    return documents


def positions_of(
    x: Tensor, attention_mask, position_ids: Tensor | None, segment_ids: Tensor | None, past: int | Tensor
) -> Int[Tensor, "b t"]:
    """Positions of the new tokens: from 0 in each document, or counted over the tokens that a 2D mask keeps."""
    if segment_ids is not None:
        return whole_rows(tuple(x.shape[:2]), x.device, None, segment_ids).position
    if position_ids is not None:
        return position_ids
    if is_of_tokens(attention_mask):
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
    return torch.arange(past, past + x.shape[1], device=x.device)[None].expand(len(x), -1)


def tokens_read_by(
    conditioned: bool, x: Tensor, attention_mask: Tensor | dict | None, documents: Tensor | None, past: int | Tensor
) -> Tokens:
    """The new tokens as a conditioner reads them: which it skips, and where it forgets.

    Raises ValueError on a mask of pairs, which does not say what it skips.
    """
    if isinstance(attention_mask, dict) and KEPT in attention_mask:
        attention_mask = attention_mask[KEPT]
    if not conditioned or (attention_mask is None and documents is None):
        return PLAIN
    if attention_mask is not None and not is_of_tokens(attention_mask):
        raise ValueError(
            "attention_mask must be of tokens, (batch, cached + new tokens), as the conditioner (use_conv=True) skips "
            "those that are masked, got one of pairs."
        )
    keep = mask_of_new_tokens(attention_mask, past, x)
    return whole_rows(tuple(x.shape[:2]), x.device, keep, documents)


def masks_of(
    config: PreTrainedConfig, kinds: set[str], x: Tensor, attention_mask, position_ids: Tensor, cache: Cache | None
) -> dict:
    """The engine's mask for each kind of layer; transformers makes it in the form that config names.

    Raises TypeError on a mask of pairs that transformers would add to scores as zeros and ones.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    by_pairs, name = isinstance(attention_mask, Tensor) and attention_mask.dim() == 4, config._attn_implementation
    if name in ("eager", "flex_attention") and by_pairs and not attention_mask.is_floating_point():
        raise TypeError(
            f"attention_mask of pairs must hold numbers that {name!r} adds to scores, got dtype "
            f"{attention_mask.dtype}; 'sdpa' takes booleans."
        )
    make = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}
    options = {"attention_mask": attention_mask, CACHE: cache, "position_ids": position_ids}
    return {kind: make[kind](config=config, inputs_embeds=x, **options) for kind in kinds}
