"""A model's continuation of a prompt, printed token by token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fem.checks import require_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation import BaseStreamer

NEW_TOKENS = 200


def continue_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float | int = 0.8,
    top_k: int = 50,
    seed: int = 0,
    streamer: BaseStreamer | None = None,
) -> str:
    """The text with which the model continues the prompt; an empty prompt is the token that begins or ends a
    document, after which a model of `fem train` has not learnt to predict.

    temperature: 0 takes the likeliest token. max_new_tokens: None is 200, or as many as fit into the context.
    Raises ValueError where they do not fit into the context, on numbers that transformers refuses, and on an empty
    prompt that no token stands for.
    """
    import torch

    require_text("prompt", prompt)
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = tokenizer(prompt)["input_ids"] or [begin]
    if ids == [None]:
        raise ValueError("prompt must hold text, as no token of this tokenizer begins or ends one, got an empty one.")
    context = getattr(model.config, "max_position_embeddings", None) or math.inf
    new = max(1, min(NEW_TOKENS, context - len(ids))) if max_new_tokens is None else max_new_tokens
    if len(ids) + max(new, 1) > context:
        raise ValueError(
            f"prompt and max_new_tokens must fit into the context of {context} tokens, got {len(ids)} and {new}."
        )
    sampling = {"do_sample": True, "temperature": float(temperature), "top_k": top_k}
    if 0 <= temperature < 1e-30:  # by which float32 cannot divide logits
        sampling = {"do_sample": False}
    prompt_ids = torch.tensor([ids], device=model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=new,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            streamer=streamer,
            **sampling,
        )
    return tokenizer.decode(tokens[0, len(ids) :], skip_special_tokens=True)
