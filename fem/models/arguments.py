"""Arguments of transformers' callers: masks, those that mark documents, and those to ignore."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import TransformersKwargs

from fem.ops.common.tokens import last_kept_before

SAID_BY_POSITIONS = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}  # ignored beside position_ids, which say the same
CHANGES_THE_READ = {*SAID_BY_POSITIONS, "is_causal"}
SET_ASIDE = {*TransformersKwargs.__annotations__, "token_type_ids", "cache_position", "tokenizer"} - CHANGES_THE_READ


def check_names(model: object, further: dict, position_ids: Tensor | None) -> None:
    """Raise TypeError on an argument that would be dropped although it says what is read, or is unknown."""
    known = SET_ASIDE if position_ids is None else SET_ASIDE | SAID_BY_POSITIONS
    unknown = [name for name, value in further.items() if name not in known and value is not None]
    if unknown:
        raise TypeError(
            f"{type(model).__name__}.forward takes no argument {', '.join(map(repr, unknown))}; documents are "
            "segment_ids or position_ids that restart."
        )


def mask_of_new_tokens(attention_mask: Tensor | None, past: int | Tensor, x: Tensor) -> Tensor | None:
    """The part of the mask (B, T_past + T) that covers the new tokens x (B, T, D); None where it keeps all of them.

    Of a static cache only the device knows T_past, and the mask may begin anywhere.
    Raises ValueError on another shape, TypeError on floating numbers other than 0 and 1.
    """
    if attention_mask is None:
        return None
    if isinstance(past, Tensor):
        past = max(0, attention_mask.shape[-1] - x.shape[1])
    wanted = (x.shape[0], past + x.shape[1])
    if tuple(attention_mask.shape) != wanted:
        by_pairs = " A mask of pairs needs attn_implementation='sdpa'." if attention_mask.dim() == 4 else ""
        raise ValueError(
            f"attention_mask must have shape (batch, cached + new tokens) = {wanted}, "
            f"got {tuple(attention_mask.shape)}.{by_pairs}"
        )
    if torch.compiler.is_compiling() or attention_mask.is_meta:
        return attention_mask[:, past:]
    if attention_mask.is_floating_point():  # as peft's prompt tuning makes it; rows of 0 are added to scores
        keep = attention_mask == 1
        attention_mask = keep if bool((keep | (attention_mask == 0)).all() & keep.any(1).all()) else attention_mask
    mask = attention_mask[:, past:]
    return None if bool((mask == 1).all()) else mask  # a call without mask is the fastest


def is_of_tokens(attention_mask: Tensor | dict | None) -> bool:
    """Whether a mask is (B, T), of tokens, and not of pairs of them, as engines' own masks are."""
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 2


def read_documents(
    x: Tensor,
    attention_mask: Tensor | dict | None,
    position_ids: Tensor | None,
    past: int | Tensor,
    segment_ids: Tensor | None,
) -> Tensor | None:
    """The document of every token of x (B, T, ...); None where there is only one.

    segment_ids: (B, T), an id per token; they come first. position_ids: (B, T); a kept token that does not follow the
    one before opens a document, unless a cache went before: a masked token's position is ignored, and gaps that masked
    tokens leave are none. Raises ValueError on positions of another length or of floating numbers.
    """
    if segment_ids is not None:
        return segment_ids
    if position_ids is None or isinstance(past, Tensor) or past:
        return None
    if position_ids.shape[-1] != x.shape[1] or position_ids.is_floating_point():
        raise ValueError(
            f"position_ids must be integers that cover the {x.shape[1]} tokens, got shape "
            f"{tuple(position_ids.shape)} and dtype {position_ids.dtype}."
        )
    opens = _restarts(position_ids, attention_mask)
    if not torch.compiler.is_compiling() and not bool(opens.any()):
        return None
    return opens.long().cumsum(-1).expand(x.shape[0], -1)


def _restarts(position_ids: Tensor, attention_mask: Tensor | dict | None) -> Tensor:
    """Where a document opens. Without a mask any jump opens one, as transformers' packing has it."""
    if not is_of_tokens(attention_mask) or attention_mask.shape[-1] != position_ids.shape[-1]:
        return F.pad(position_ids.diff(dim=-1) != 1, (1, 0))
    keep = attention_mask.bool()
    seen = torch.where(keep, position_ids, -1)
    before = last_kept_before(keep)[:, :-1]
    previous = torch.where(before < 0, -1, seen.gather(-1, before.clamp_min(0)))
    return keep & (before >= 0) & (seen <= previous)
