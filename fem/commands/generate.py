"""`fem generate`: a model's continuation of a prompt, printed token by token."""

from __future__ import annotations

from typing import Annotated

import typer

from fem.train.generate import NEW_TOKENS, continue_prompt


def command(
    model: Annotated[str, typer.Option(help="Folder of a model, or the output of fem train.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; without one, an end of text.")] = "",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Most new tokens; default: up to {NEW_TOKENS}.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of the sampling; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many of the likeliest tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
):
    """Continue a prompt, printing the text token by token."""
    from transformers import TextStreamer
    from transformers.utils.logging import disable_progress_bar

    from fem.train.checkpoints import load_language_model

    disable_progress_bar()
    network, tokenizer = load_language_model(model)
    streamer = TextStreamer(tokenizer, skip_prompt=False, skip_special_tokens=True)
    continue_prompt(
        network,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        streamer=streamer,
    )
