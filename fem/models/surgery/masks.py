"""What the masks of transformers' attentions say of tokens, documents and windows."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fem.ops.common.shared import known_of
from fem.ops.common.tokens import last_kept_before
from fem.ops.softmax.support import HIDDEN

BY_MASKS = "call model.set_attn_implementation('sdpa'), which passes such a mask"
OTHERWISE = {  # by whether the mixer is causal
    False: "pass causal=True to replace_attention if the model is called as a causal one, or preserve=True",
    True: "pass preserve=True to replace_attention",
}


def check_mask(attention_mask, keys: int, further: dict) -> None:
    """Raise ValueError on a mask that is none of pairs, and on windows and documents that have none.

    A flash kernel reads the last two off further arguments; under sdpa and eager they stand in the mask.
    """
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
            got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(f"attention_mask must have 4 dimensions, got {got}; {BY_MASKS}.")
        return
    window, position = further.get("sliding_window"), further.get("position_ids")
    if window is not None and window < keys:
        raise ValueError(
            f"attention_mask must show the window of {window} tokens, got None for {keys} keys; {BY_MASKS}."
        )
    packed = further.get("cu_seq_lens_q") is not None
    looks = isinstance(position, Tensor) and not position.is_meta and not torch.compiler.is_compiling()
    if not packed and looks and position.dim() == 2 and position.shape[1] > 1:
        packed = _restarts(position)
    if packed:
        raise ValueError(
            "attention_mask must show the documents of position_ids or cu_seq_lens_q, got None; pass use_cache=False, "
            f"and under flash attention {BY_MASKS}."
        )


@known_of
def _restarts(position: Int[Tensor, "b t"]) -> bool:
    return bool((position.diff(dim=-1) <= 0).any())


def tokens_of(mask: Tensor, time: int, causal: bool) -> tuple[Bool[Tensor, "b t"], Int[Tensor, "b t"]]:
    """The existing ones of the last `time` tokens, and the document of each, from the pairs that a mask allows.

    A token exists where it sees itself; it opens a document where it does not see the existing token before it. Raises
    ValueError where the mask allows other pairs than these documents, but for those before a window.
    """
    allowed = mask if mask.dtype == torch.bool else mask > HIDDEN
    pairs = allowed[:, 0, :, -time:].expand(-1, time, -1)
    keep = pairs.diagonal(dim1=1, dim2=2)
    before = last_kept_before(keep)[:, :-1]
    sees = pairs.gather(2, before.clamp_min(0)[..., None])[..., 0]
    document = (keep & (before >= 0) & ~sees).cumsum(1)
    if time > 1 and not mask.is_meta and not torch.compiler.is_compiling():
        wanted = keep[:, None] & (document[..., None] == document[:, None])
        wanted = wanted.tril() if causal else wanted
        first = pairs.byte().argmax(2, keepdim=True)  # token that is seen
        hidden = wanted & ~pairs & (torch.arange(time, device=mask.device) > first)
        biased = mask.dtype != torch.bool and bool(((mask > HIDDEN) & (mask != 0)).any())
        if biased or bool((keep[..., None] & (hidden | (pairs & ~wanted))).any()):
            later = ", and hide later tokens" if causal else ""
            got = "adds numbers to scores" if biased else "hides or shows other tokens"
            raise ValueError(
                f"attention_mask must only hide padding, other documents and tokens before a window{later}, got one "
                f"that {got}; {OTHERWISE[causal or biased]}."
            )
    return keep, document
