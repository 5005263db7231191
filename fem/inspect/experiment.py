"""`fem inspect`: what each channel of each head of a language model reads from a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fem.inspect.layers import LayerTables, by_division, layer_tables, readers, readings
from fem.inspect.settings import MOST_TOKENS, InspectRecipe
from fem.provenance import CONFIG, RESULTS, check_output, circumstances, write_json
from fem.tables import show_table, write_csv

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IN_CSV_ALONE = ("prior", "beta", "hidden beta")  # the table on a terminal has room for 80 columns of text
SHORT = {"tokens in prior": "tokens p", "tokens in posterior": "tokens q", "read most at the end": "tokens read most"}


def head_rows(layers: Sequence[LayerTables]) -> list[dict]:
    """A row per head: means over channels and tokens, and how many different tokens its channels read most."""
    average = lambda part, head: None if part is None else float(part[head].mean())  # noqa: E731
    return [
        {
            "layer": tables.layer,
            "head": head + 1,
            "prior": tables.prior_type,
            "tokens in prior": average(tables.prior_tokens, head),
            "tokens in posterior": average(tables.posterior_tokens, head),
            "read most at the end": len(set(tables.read[head, :, -1].argmax(-1).tolist())),
            "lambda": average(tables.lambda_, head),
            "beta": average(tables.beta, head),
            "hidden beta": average(tables.hidden_beta, head),
            "gate": average(tables.gate, head),
            "KL gap": average(tables.gap, head),
        }
        for tables in layers
        for head in range(tables.heads)
    ]


def short(rows: Sequence[dict]) -> list[dict]:
    """`head_rows` for a terminal of 80 columns."""
    return [{SHORT.get(name, name): value for name, value in row.items() if name not in IN_CSV_ALONE} for row in rows]


def visible(token: str) -> str:
    """The token with visible signs for its white space, and for `|`, which would end a cell of a Markdown table."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·").replace("|", "¦")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[str]]:
    """Token ids of the text, and the piece of text that each stands for, with the space before it.

    A token that ends inside a character or is not in the text stands for what it decodes to.
    Raises ValueError on more than MOST_TOKENS tokens, and on none.
    """
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


def read_layers(model: PreTrainedModel, ids: Sequence[int], recipe: InspectRecipe) -> list[LayerTables]:
    """The tables of the chosen layers of a model. Raises ValueError on a model without FEM and on unknown layers."""
    names = list(readers(model).values())
    if not names:
        raise ValueError(f"model must have Free Energy Mixer layers, got a {type(model).__name__} without any.")
    chosen = recipe.chosen(len(names))
    if unknown := [number for number in chosen if not 1 <= number <= len(names)]:
        raise ValueError(f"layers must be among 1 to {len(names)}, got {unknown[0]}.")
    model = model.float() if model.dtype.itemsize == 2 else model
    layer_readings = readings(model, torch.tensor([ids], device=model.device))
    return [layer_tables(number, names[number - 1], layer_readings[number - 1]) for number in chosen]


def run(folder: str, recipe: InspectRecipe, output: Path) -> dict:
    """Tables, picture and page of what the model in `folder` reads, written to `output`; returns results.json."""
    from fem.inspect.page import page
    from fem.plots import channel_readings
    from fem.train.checkpoints import load_language_model

    recipe = replace(recipe, model=str(folder))
    check_output(output, "inspect")
    model, tokenizer = load_language_model(folder)
    ids, tokens = encode(tokenizer, recipe.text)
    layers = read_layers(model, ids, recipe)
    index, head = by_division(layers)[0]
    explored = page(str(folder), tokens, layers, (index, head))
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / CONFIG, {"experiment": "inspect", "recipe": asdict(recipe)} | circumstances())
    most = layers[index]
    rows = head_rows(layers)
    write_csv(output / "heads.csv", rows)
    name = f"layer {most.layer}, head {head + 1}: the head whose channels differ most"
    channel_readings(
        output / "inspect.png",
        "What each channel reads at the last token",
        [visible(token) for token in tokens],
        [(name, most.prior[head, :, -1].mean(0), most.read[head, :, -1])],
    )
    (output / "inspect.html").write_text(explored, encoding="utf-8")
    results = {"model": str(folder), "tokens": tokens, "heads": rows}
    write_json(output / RESULTS, results)
    title = f"What {len(tokens)} tokens read: means over channels and tokens; p: prior, q: posterior"
    show_table(title, short(rows), "heads.csv")
    return results
