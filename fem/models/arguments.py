"""What a forward pass reads beside the tokens: arguments of transformers' callers, the cache, documents and masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import TransformersKwargs

from fem.models.cache import CACHE
from fem.models.engines.attention import EXACT
from fem.models.engines.obstacles import FULL, SLIDING
from fem.ops.common.backend import has_values
from fem.ops.common.tokens import PLAIN, Tokens, as_bool, last_kept_before, whole_rows

SAID_BY_POSITIONS = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}  # ignored beside position_ids, which say the same
SET_ASIDE = {*TransformersKwargs.__annotations__, "token_type_ids", "cache_position", "tokenizer", "logits_to_keep"}
SET_ASIDE -= {*SAID_BY_POSITIONS, "is_causal"}  # which change the read
KEPT = "kept"  # among the masks of a compiled step: which new tokens the conditioner reads
WRITTEN = "written_by_fem"  # on a cache: it holds states, or values [v | e], not those of another model


def check_names(model: object, further: dict, position_ids: Tensor | None) -> None:
    """Raise TypeError on an argument that would be dropped although it says what is read, or is unknown."""
    known = SET_ASIDE if position_ids is None else SET_ASIDE | SAID_BY_POSITIONS
    unknown = [name for name, value in further.items() if name not in known and value is not None]
    if unknown:
        raise TypeError(
            f"{type(model).__name__}.forward takes no argument {', '.join(map(repr, unknown))}; documents are "
            "segment_ids or position_ids that restart."
        )


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


class Inputs(NamedTuple):
    """New tokens x, (B, T) or embedded (B, T, D), and what a call says of them; `past` tokens stand in the cache."""

    x: Tensor
    attention_mask: Tensor | dict | None = None
    position_ids: Tensor | None = None
    segment_ids: Tensor | None = None
    past: int | Tensor = 0

    @property
    def masks_tokens(self) -> bool:
        """Whether there is a mask, of tokens (B, T), and not of pairs of them, as engines' own masks are."""
        return isinstance(self.attention_mask, Tensor) and self.attention_mask.dim() == 2

    def mask(self) -> Tensor | None:
        """The part of the mask (B, T_past + T) that covers the new tokens; None where it keeps all of them.

        Raises ValueError on another shape, TypeError on floating numbers other than 0 and 1.
        """
        if self.attention_mask is None:
            return None
        mask = self._of_new_tokens(self._whole_mask())
        if not has_values(mask):
            return mask
        return None if bool((mask == 1).all()) else mask  # a call without mask is the fastest

    def _whole_mask(self) -> Tensor:
        """The mask over the cached tokens too; as booleans where it holds 0.0 and 1.0.

        Of a static cache only the device knows T_past: the mask may begin anywhere, or be as long as the cache.
        Raises ValueError on another shape.
        """
        mask, (batch, time) = self.attention_mask, self.x.shape[:2]
        past = max(0, mask.shape[-1] - time) if isinstance(self.past, Tensor) else self.past
        wanted = (batch, past + time)
        if tuple(mask.shape) != wanted:
            by_pairs = " A mask of pairs needs attn_implementation='sdpa'." if mask.dim() == 4 else ""
            raise ValueError(
                f"attention_mask must have shape (batch, cached + new tokens) = {wanted}, "
                f"got {tuple(mask.shape)}.{by_pairs}"
            )
        if has_values(mask) and mask.is_floating_point():  # as peft's prompt tuning makes it
            keep = mask == 1  # rows of 0 are added to scores
            mask = keep if bool((keep | (mask == 0)).all() & keep.any(1).all()) else mask
        return mask

    def _of_new_tokens(self, x: Tensor) -> Tensor:
        """Those columns (B, T) of x that belong to the new tokens."""
        time = self.x.shape[1]
        if not isinstance(self.past, Tensor):
            return x[:, self.past :]
        first = self.past.clamp_max(x.shape[1] - time)
        return x.index_select(1, first + torch.arange(time, device=x.device))

    def documents(self) -> Tensor | None:
        """The document of every token, (B, T); None where there is only one.

        segment_ids: (B, T), an id per token; they come first. position_ids: (B, T); a kept token that does not follow
        the one before opens a document, unless a cache went before: a masked token's position is ignored, and gaps that
        masked tokens leave are none. Raises ValueError on positions of another length or of floating numbers.
        """
        if self.segment_ids is not None:
            return self.segment_ids
        batch, time = self.x.shape[:2]
        if self.position_ids is None or isinstance(self.past, Tensor) or self.past:
            return None
        if self.position_ids.shape[-1] != time or self.position_ids.is_floating_point():
            raise ValueError(
                f"position_ids must be integers that cover the {time} tokens, got shape "
                f"{tuple(self.position_ids.shape)} and dtype {self.position_ids.dtype}."
            )
        opens = self._restarts(self.position_ids)
        if has_values(opens) and not bool(opens.any()):
            return None
        return opens.long().cumsum(-1).expand(batch, -1)

    def _restarts(self, position: Tensor) -> Tensor:
        """Where a document opens. Without a mask any jump opens one, as transformers' packing has it."""
        if not self.masks_tokens or self.attention_mask.shape != self.x.shape[:2]:
            return F.pad(position.diff(dim=-1) != 1, (1, 0))
        keep = self.attention_mask.bool()
        before, position = last_kept_before(keep)[:, :-1], position.expand_as(keep)
        return keep & (before >= 0) & (position <= position.gather(-1, before.clamp_min(0)))

    def documents_under(self, name: str, cached: bool) -> Tensor | None:
        """`documents` as an attn_implementation can keep them apart; None: there is one, or the mask says more.

        Raises ValueError where positions that restart would not tell transformers' masks where documents begin.
        """
        if name == EXACT:
            return self.documents()
        compiling, masked = torch.compiler.is_compiling(), self.attention_mask is not None
        by_pairs = masked and not self.masks_tokens  # says itself what a token sees
        looks = not (masked or cached) or not (by_pairs or compiling)
        if (documents := self.documents() if looks else self.segment_ids) is None:
            return None
        whole = not masked or (self.masks_tokens and not compiling and bool((self.attention_mask == 1).all()))
        if cached or not whole or ("flash" in name and len(self.x) > 1):
            raise ValueError(
                f"attn_implementation={name!r} reads packed documents (segment_ids, or position_ids that restart) only "
                "without a cache and without hidden tokens, flash attention only in one row; leave it out."
            )
        return documents

    def positions(self) -> Int[Tensor, "b t"]:
        """Positions of the new tokens: from 0 in each document, or counted over the tokens that a 2D mask keeps."""
        x, past = self.x, self.past
        if self.segment_ids is not None:
            return whole_rows(tuple(x.shape[:2]), x.device, None, self.segment_ids).position
        if self.position_ids is not None:
            return self.position_ids
        if self.masks_tokens:
            kept = self.mask()
            mask = self.attention_mask.to(torch.bool if kept is None else kept.dtype)
            return self._of_new_tokens(whole_rows(tuple(mask.shape), x.device, mask).position)
        return torch.arange(past, past + x.shape[1], device=x.device)[None].expand(x.shape[0], -1)

    def read_by_conditioner(self, documents: Tensor | None) -> Tokens:
        """The new tokens as a conditioner reads them: which it skips, and where it forgets.

        Raises ValueError on a mask of pairs, which does not say what it skips.
        """
        given = self
        if isinstance(self.attention_mask, dict) and KEPT in self.attention_mask:
            given = self._replace(attention_mask=self.attention_mask[KEPT])
        if given.attention_mask is None and documents is None:
            return PLAIN
        if given.attention_mask is not None and not given.masks_tokens:
            raise ValueError(
                "attention_mask must be of tokens, (batch, cached + new tokens), as the conditioner (use_conv=True) "
                "skips those that are masked, got one of pairs."
            )
        return whole_rows(tuple(self.x.shape[:2]), self.x.device, given.mask(), documents)

    def masks(self, config: PreTrainedConfig, kinds: set[str], cache: Cache | None) -> dict:
        """The engine's mask for each kind of layer; transformers makes it in the form that config names.

        Raises TypeError on a mask of pairs that transformers would add to scores as zeros and ones, and as `mask` does
        on one of tokens, which transformers would cut or fill up.
        """
        mask, name = self.attention_mask, config._attn_implementation
        if isinstance(mask, dict):
            return mask
        by_pairs = mask is not None and mask.dim() == 4
        if mask is not None and not by_pairs:
            as_bool(self._whole_mask(), "attention_mask")
        if name in ("eager", "flex_attention") and by_pairs and not mask.is_floating_point():
            raise TypeError(
                f"attention_mask of pairs must hold numbers that {name!r} adds to scores, got dtype {mask.dtype}; "
                "'sdpa' takes booleans."
            )
        make = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}
        options = {"attention_mask": mask, CACHE: cache, "position_ids": self.position_ids}
        return {kind: make[kind](config=config, inputs_embeds=self.x, **options) for kind in kinds}
