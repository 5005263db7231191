"""`fem demo`: what FEM does, in a few minutes: the argmax task, two language models, and a look inside one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast

from fem.inspect import MOST_TOKENS
from fem.inspect.experiment import encode
from fem.inspect.layers import division, layer_tables, readings
from fem.inspect.page import page
from fem.models import FEMForCausalLM
from fem.plots import channel_readings
from fem.provenance import provenance
from fem.tables import markdown_table, show_table
from fem.train.generate import continue_prompt
from fem.train.model import build_model
from fem_research.argmax import experiment as argmax
from fem_research.argmax.settings import ArgmaxRecipe
from fem_research.common import pictures
from fem_research.common.measure import cpu_threads
from fem_research.common.names import display
from fem_research.common.paired import spread
from fem_research.demo.settings import DemoRecipe
from fem_research.lm.small import MIXERS, model_config, train
from fem_research.lm.text import Corpus, build_corpus
from fem_research.runs.run import Run, command_line, open_run, progress
from fem_research.runs.tables import write_table

WORDS = (12, 24)  # fewest and most words of the sentence that the model reads for the picture
PROMPT_WORDS, SAMPLE_TOKENS = 6, 60
PLAIN = re.compile(r"[A-Z][A-Za-z ,;'-]+[.!?]")


def run(recipe: DemoRecipe, output: Path) -> dict:
    """The whole demo, written to `output`; returns what results.json holds."""
    task, language = ArgmaxRecipe(steps=recipe.argmax_steps, seed=recipe.seed, seeds=1), recipe.language()
    for mixer in MIXERS.values():  # an error here comes before the first minute of work
        model_config(language, mixer, recipe.vocabulary)
    documents = recipe.documents()
    with cpu_threads(recipe.threads), open_run(output, "demo", recipe) as under_way:
        folder = under_way.folder
        with progress() as bars:
            reading_text = bars.add_task("text and tokenizer", total=1)
            corpus = build_corpus(documents, recipe.vocabulary, recipe.context)
            bars.update(reading_text, completed=1)
            curves = argmax.compare(task, under_way, bars)
            ends, lm_curves, fem = compare(recipe, corpus, under_way, bars)
        scores = summary(ends)
        rows = argmax.rows(curves, task, argmax.baselines(task))
        tables = {"argmax": rows, "lm": language_rows(scores, corpus.bytes_per_token)}
        for name, table in tables.items():
            write_table(folder, name, table)
        sentence = plain_sentence(held_out(corpus))
        room = min(recipe.context // 2, MOST_TOKENS)
        sentence = corpus.tokenizer.decode(corpus.tokenizer(sentence)["input_ids"][:room])
        reading = look_inside(fem, corpus.tokenizer, sentence, folder)
        sample = generate(fem, corpus.tokenizer, sentence, recipe.seed)
        for part in (fem, corpus.tokenizer):
            part.save_pretrained(folder / "model")
        argmax.draw_curves(folder / "argmax.png", curves, task)
        draw(folder, lm_curves, reading)
        measured = {"argmax": argmax.scores(curves), "curves": curves, "lm": scores, "lm_curves": lm_curves}
        results = under_way.finish(measured | {"reading": reading})
        text = report(recipe, tables, argmax.ended(curves, task), caption(reading), sample)
        (folder / "report.md").write_text(text, encoding="utf-8")
    show_table("Every channel's maximum in one read", tables["argmax"])
    show_table("Language models of equal size", tables["lm"])
    Console().print(sample, markup=False, highlight=False, soft_wrap=True)
    return results


ByMixer = dict[str, list]  # a value per seed


def compare(recipe: DemoRecipe, corpus: Corpus, run: Run, bars: Progress) -> tuple[ByMixer, ByMixer, FEMForCausalLM]:
    """Train a model of every mixer with every seed on the same data in the same order; returns their last scores, their
    curves and FEM's model of the first seed. Measurements are appended to the run's metrics.jsonl."""
    ends, curves, models = {name: [] for name in MIXERS}, {name: [] for name in MIXERS}, []
    for seed in range(recipe.seed, recipe.seed + recipe.seeds):
        for name, mixer in MIXERS.items():
            language = replace(recipe.language(), seed=seed)
            model = build_model(model_config(language, mixer, len(corpus.tokenizer)), seed)
            end = train(model, corpus, language, bars, f"language model: {display(name)}, seed {seed}")
            curves[name].append(end.pop("curve"))
            ends[name].append(end)
            for score in curves[name][-1]:
                run.log(experiment="lm", model=name, seed=seed, **score)
            models += [model] if name == "fem" else []
    return ends, curves, models[0]


def summary(ends: ByMixer) -> dict[str, dict]:
    """Means over the seeds, and every seed's validation loss."""
    return {
        name: {metric: mean(seed[metric] for seed in seeds) for metric in ("val_loss", "tokens_per_second")}
        | {"parameters": int(seeds[0]["parameters"]), "val_losses": [seed["val_loss"] for seed in seeds]}
        for name, seeds in ends.items()
    }


def language_rows(scores: Mapping[str, dict], bytes_per_token: float) -> list[dict]:
    """Validation loss in nats per token, its standard deviation over seeds, and in bits per byte."""
    return [
        {"mixer": display(name), "loss": score["val_loss"], "sd": spread(score["val_losses"])}
        | {"seeds": len(score["val_losses"]), "bits/byte": score["val_loss"] / math.log(2) / bytes_per_token}
        | {"parameters": score["parameters"], "tokens/s": score["tokens_per_second"]}
        for name, score in scores.items()
    ]


def draw(folder: Path, curves: ByMixer, reading: Mapping) -> None:
    """lm.png, the losses over steps and over time, and reading.png, what two heads read."""
    panels = [
        ("validation loss (nats per token)", "step", "step", "val_loss"),
        ("the same over time", "seconds of training on this machine", "seconds", "val_loss"),
    ]
    pictures.curves(folder / "lm.png", "Language models of equal size", curves, panels)
    words, heads = reading["words"], reading["shown"]
    tables = [(head["title"], np.array(head["prior"]), np.array(head["channels"])) for head in heads]
    channel_readings(folder / "reading.png", "What each channel reads at the end of the sentence", words, tables)


def held_out(corpus: Corpus) -> str:
    """The beginning of the text that no model was trained on."""
    rows = corpus.validation[: min(64, len(corpus.validation))]["input_ids"]
    return corpus.tokenizer.decode(rows.flatten())


def plain_sentence(text: str) -> str:
    """The first sentence of `text` with 12 to 24 words and plain punctuation; its first words where there is none."""
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
    least, most = WORDS
    plain = (part for part in parts if PLAIN.fullmatch(part) and least <= len(part.split()) <= most)
    return next(plain, " ".join(text.split()[:most]))


def look_inside(model: FEMForCausalLM, tokenizer: PreTrainedTokenizerFast, sentence: str, folder: Path) -> dict:
    """The page of `fem inspect` on the sentence, and what two heads read at its end: the one whose channels read most
    different words, and the median one.
    """
    ids, tokens = encode(tokenizer, sentence)
    found = readings(model, torch.tensor([ids], device=model.device))
    layers = [layer_tables(number, "softmax", reading) for number, reading in enumerate(found, start=1)]
    starts = [index for index, token in enumerate(tokens) if index == 0 or token[:1].isspace()]
    words = ["".join(tokens[begin:end]).strip() for begin, end in zip(starts, [*starts[1:], None])]

    def channels(place: tuple[int, int]) -> np.ndarray:
        """Weights of the words, (d, words): sums over their tokens."""
        return np.add.reduceat(layers[place[0]].read[place[1], :, -1], starts, axis=1)

    places = [(layer, head) for layer, tables in enumerate(layers) for head in range(tables.heads)]
    ranked = sorted(places, key=lambda place: division(channels(place)), reverse=True)
    explored = page("the demo's FEM model", tokens, layers, ranked[0])
    (folder / "inspect.html").write_text(explored, encoding="utf-8")
    shown = [
        {
            "title": f"the {what} of {len(ranked)} heads: layer {layer + 1}, head {head + 1}",
            "prior": np.add.reduceat(layers[layer].prior[head, 0, -1], starts).round(5).tolist(),
            "channels": channels((layer, head)).round(5).tolist(),
        }
        for what, (layer, head) in (("most divided", ranked[0]), ("median", ranked[len(ranked) // 2]))
    ]
    counts = [division(channels(place))[0] for place in ranked]
    return {"sentence": sentence, "words": words, "shown": shown, "favourites": counts}


def caption(reading: Mapping) -> str:
    channels, counts = len(reading["shown"][0]["channels"]), reading["favourites"]
    more = sum(count > 1 for count in counts)
    return f"""The FEM model reads, at the end of "{reading["sentence"]}",
which it was not trained on. A row is a channel, a dot marks the word that it reads most; a word's tokens are summed.
Above: the head whose {channels} channels read most different words, {counts[0]}. Below: the median head, with
{counts[len(counts) // 2]}. In {more} of {len(counts)} heads the channels do not agree on one word. Attention reads the
row `prior` in every channel. Every head, channel and token: open `inspect.html` in a browser."""


def generate(model: FEMForCausalLM, tokenizer: PreTrainedTokenizerFast, sentence: str, seed: int) -> str:
    """The sentence's first words and a sampled continuation."""
    begin = " ".join(sentence.split()[:PROMPT_WORDS])
    new = min(SAMPLE_TOKENS, model.config.max_position_embeddings - len(tokenizer(begin)["input_ids"]))
    return f"{begin} >>>{continue_prompt(model, tokenizer, begin, max_new_tokens=new, seed=seed)}"


def report(recipe: DemoRecipe, tables: dict[str, list[dict]], ended: str, caption: str, sample: str) -> str:
    source = (
        "what `help()` says of Python's own subjects, half a megabyte of English"
        if recipe.text is None
        else recipe.text.name
    )
    hits = {row["read"]: row["hits"] for row in tables["argmax"]}
    losses = {row["mixer"]: f"{row['loss']:.3f}" for row in tables["lm"]}
    return f"""# What the Free Energy Mixer does

In one read of {ArgmaxRecipe().heads} heads FEM finds {hits["FEM"]} of the channels' largest values, attention
{hits["attention"]}; with a head for every channel attention finds them too
(`fem argmax --heads {ArgmaxRecipe().channels}`).
Language models of equal size end at {losses["FEM"]} nats per token with FEM and {losses["attention"]} with attention,
on text that neither was trained on; how far such a difference can be trusted is a question for many seeds, which
`fem ablate` asks.

## Which word each channel reads

![weights of the words in each channel of two heads](reading.png)

{caption}

## Every channel's maximum in one read

Each channel's largest value sits at a token of its own. Softmax attention reads one average for all channels of a head;
FEM lets the values compete. Hits: the share of channels read within half the distance of their two largest values;
error: mean squared error over the variance of the winners.

{markdown_table(tables["argmax"], {"hits": max})}
![validation error and hits over steps](argmax.png)

{ended}

## Language models of equal size

Blocks: {recipe.layers}, of width {recipe.width}; {recipe.steps} steps of {recipe.batch_size} x {recipe.context} tokens
from {source}; losses on its held-out end, in nats per token.
Same data in the same order, same seeds, parameters within 1 %.

{markdown_table(tables["lm"], {"loss": min})}
![validation loss over steps](lm.png)

## A sample

The beginning of that sentence, then `>>>`, then what the FEM model made of it:

```text
{sample}
```

{provenance(command_line("demo", recipe, DemoRecipe()))}
The model is in `model/`: `import fem.models`, then `AutoModelForCausalLM.from_pretrained` loads it.
"""
