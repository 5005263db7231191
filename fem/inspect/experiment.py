"""`fem inspect`: what each channel of each head of a language model reads from a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fem.checks import require_text
from fem.inspect import MOST_TOKENS
from fem.inspect.layers import LayerTables, by_division, layer_tables, readers, readings
from fem.provenance import CONFIG, RESULTS, check_output, circumstances, replacing, write_json
from fem.recipes import listed, require_some_of
from fem.tables import show_table, write_csv

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def head_rows(layers: Sequence[LayerTables]) -> list[dict]:
    """A row per head: means over channels and tokens, and how many different tokens its channels read most."""
    average = lambda part, head: None if part is None else float(part[head].mean())  # noqa: E731
    return [
        {
            "layer": tables.layer,
            "head": head + 1,
            "tokens in prior": average(tables.prior_tokens, head),
            "tokens in posterior": average(tables.posterior_tokens, head),
            "tokens at the end": len(set(tables.read[head, :, -1].argmax(-1).tolist())),
            "lambda": average(tables.lambda_, head),
            "beta": average(tables.beta, head),
            "hidden beta": average(tables.hidden_beta, head),
            "gate": average(tables.gate, head),
            "KL gap": average(tables.gap, head),
            "prior": tables.prior_type,
        }
        for tables in layers
        for head in range(tables.heads)
    ]


def visible(token: str) -> str:
    """The token with visible signs for its white space, and for `|`, which would end a cell of a Markdown table."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("|", "¦")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[str]]:
    """Token ids of the text, and the piece of text that each stands for, with the space before it.

    A token that ends inside a character or is not in the text stands for what it decodes to.
    Raises ValueError on more than MOST_TOKENS tokens, and on none.
    """
    require_text("text", text)
    encoded = tokenizer(text, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded["input_ids"]
    if not 1 <= len(ids) <= MOST_TOKENS:
        remedy = "shorten it" if ids else "give a longer one"
        raise ValueError(f"text must have 1 to {MOST_TOKENS} tokens, got {len(ids)}; {remedy}.")
    if not tokenizer.is_fast:
        return ids, [tokenizer.decode([token]) for token in ids]
    ends = [end for _, end in encoded["offset_mapping"]]
    begins = np.maximum.accumulate([0, *ends]).tolist()
    return ids, [text[begin:end] or tokenizer.decode([token]) for token, begin, end in zip(ids, begins, ends)]


def read_layers(model: PreTrainedModel, ids: Sequence[int], layers: str | None) -> list[LayerTables]:
    """The tables of a model's layers, or of those that `layers` names. Raises ValueError where there are none."""
    names = {str(number): prior for number, prior in enumerate(readers(model).values(), start=1)}
    if not names:
        raise ValueError(f"model must have Free Energy Mixer layers, got a {type(model).__name__} without any.")
    chosen = list(names) if layers is None else listed(layers)
    require_some_of("layers", chosen, names)
    model = model.float() if model.dtype.itemsize == 2 else model
    found = zip(names, readings(model, torch.tensor([ids], device=model.device)))
    return [layer_tables(int(number), names[number], reading) for number, reading in found if number in chosen]


def run(folder: str, text: str, layers: str | None, output: Path) -> dict:
    """Tables, picture and page of what the model in `folder` reads from a text, written to `output`; returns
    results.json. layers: those to show, numbered from 1, such as "1,4"; None: all.
    """
    from fem.inspect.page import page
    from fem.plots import channel_readings
    from fem.train.checkpoints import load_language_model

    check_output(output, "inspect")
    model, tokenizer = load_language_model(folder)
    ids, tokens = encode(tokenizer, text)
    tables = read_layers(model, ids, layers)
    index, head = by_division(tables)[0]
    explored = page(folder, tokens, tables, (index, head))
    output.mkdir(parents=True, exist_ok=True)
    recipe = {"model": folder, "text": text, "layers": layers}
    write_json(output / CONFIG, {"experiment": "inspect", "recipe": recipe} | circumstances())
    most = tables[index]
    rows = head_rows(tables)
    write_csv(output / "heads.csv", rows)
    name = f"layer {most.layer}, head {head + 1}: the head whose channels differ most"
    channel_readings(
        output / "inspect.png",
        "What each channel reads at the last token",
        [visible(token) for token in tokens],
        [(name, most.prior[head, :, -1].mean(0), most.read[head, :, -1])],
    )
    with replacing(output / "inspect.html") as staged:
        staged.write_text(explored, encoding="utf-8")
    results = {"model": folder, "tokens": tokens, "heads": rows}
    write_json(output / RESULTS, results)
    title = f"How many of {len(tokens)} tokens a head reads: means over channels and tokens"
    show_table(title, rows, "heads.csv")
    return results
