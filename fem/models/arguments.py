"""What callers of transformers' models pass: a model, arguments that mark documents, and those to ignore."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from fem.ops.common.steps import running_maximum

# Ignored, as a mixer knows this already: its cache counts the tokens, cu_seq_lens_q has the sizes of documents.
SET_ASIDE = {
    "token_type_ids",
    "cache_position",
    "tokenizer",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "output_router_logits",
}


def check_language_model(model: object) -> None:
    """Raise TypeError unless the model's config knows a mixer for every layer."""
    if not hasattr(getattr(model, "config", None), "mixer_configs"):
        raise TypeError(f"model must be a FEM language model, got a {type(model).__name__}.")


def check_names(model: object, further: dict) -> None:
    """Raise TypeError on an argument that neither the model nor transformers knows."""
    unknown = [name for name, value in further.items() if name not in SET_ASIDE and value is not None]
    if unknown:
        raise TypeError(
            f"{type(model).__name__}.forward takes no argument {', '.join(map(repr, unknown))}; documents are "
            "segment_ids, seq_idx, cu_seq_lens_q or position_ids that restart."
        )


def mask_of_new_tokens(attention_mask: Tensor | None, past: int, x: Tensor) -> Tensor | None:
    """The part of the mask (B, T_past + T) that covers the new tokens x (B, T, D); None where it keeps all of them.

    Raises ValueError on another shape, TypeError on floating numbers other than 0 and 1.
    """
    if attention_mask is None:
        return None
    wanted = (x.shape[0], past + x.shape[1])
    if tuple(attention_mask.shape) != wanted:
        by_pairs = " A mask of pairs needs attn_implementation='sdpa'." if attention_mask.dim() == 4 else ""
        raise ValueError(
            f"attention_mask must have shape (batch, cached + new tokens) = {wanted}, "
            f"got {tuple(attention_mask.shape)}.{by_pairs}"
        )
    if torch.compiler.is_compiling():
        return attention_mask[:, past:]
    if attention_mask.is_floating_point():
        attention_mask = _from_floats(attention_mask)
    mask = attention_mask[:, past:]
    return None if bool((mask == 1).all()) else mask  # a call without mask is the fastest


def _from_floats(mask: Tensor) -> Bool[Tensor, "b t"]:
    """A mask of floating 0 and 1, as peft's prompt tuning makes it. Raises TypeError on one that is added to scores."""
    keep = mask == 1
    if bool(((mask == 0) | keep).all()) and bool(keep.any(-1).all()):
        return keep
    raise TypeError(
        f"attention_mask must be bool, or 0 and 1 with 1 = keep, got {mask.dtype} with other numbers or rows of zeros; "
        "one that is added to the scores has no place here."
    )


def read_documents(
    x: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past: int,
    segment_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """The document of every token of x (B, T, ...), from the first of the four that says so; None: there is but one.

    segment_ids, seq_idx: (B, T), an id per token. cu_seq_lens_q: (documents + 1,), where each of the documents of one
    row starts, and its end. position_ids: (B, T); a kept token that does not follow the one before opens a document,
    unless a cache went before: a masked token's position is ignored, and gaps that masked tokens leave are none.
    Raises ValueError on wrong shapes.
    """
    if segment_ids is not None:
        return segment_ids
    if seq_idx is not None:
        return seq_idx
    if cu_seq_lens_q is not None:
        return _between(cu_seq_lens_q, x, past)
    if position_ids is None or past:
        return None
    if position_ids.shape[-1] != x.shape[1]:
        raise ValueError(f"position_ids must cover the {x.shape[1]} tokens, got shape {tuple(position_ids.shape)}.")
    opens = _restarts(position_ids, attention_mask)
    if not torch.compiler.is_compiling() and not bool(opens.any()):
        return None
    return opens.long().cumsum(-1).expand(x.shape[0], -1)


def _between(starts: Tensor, x: Tensor, past: int) -> Int[Tensor, "1 t"]:
    if past or x.shape[0] != 1 or starts.dim() != 1:
        raise ValueError(
            "cu_seq_lens_q must hold the starts of the documents of one row without a cache, got shape "
            f"{tuple(starts.shape)} for {x.shape[0]} rows and {past} cached tokens; pass segment_ids instead."
        )
    places = torch.arange(x.shape[1], device=x.device)
    return torch.searchsorted(starts.to(x.device, places.dtype), places, right=True)[None]


def _restarts(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Where a document opens. Without a mask any jump opens one, as transformers' packing has it."""
    if attention_mask is None or attention_mask.shape[-1] != position_ids.shape[-1] or attention_mask.dim() != 2:
        return F.pad(position_ids.diff(dim=-1) != 1, (1, 0))
    keep = attention_mask.bool()
    seen = torch.where(keep, position_ids, -1)
    places = running_maximum(torch.where(keep, torch.arange(keep.shape[1], device=keep.device), -1))
    before = F.pad(places, (1, 0), value=-1)[:, :-1]
    previous = torch.where(before < 0, -1, seen.gather(-1, before.clamp_min(0)))
    return keep & (before >= 0) & (seen <= previous)
