"""What FEM does, in a few minutes: the argmax task, two language models on real text, and a look inside."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from fem.experiments import argmax
from fem.experiments.common.options import recipe_options
from fem.experiments.common.run import command_line, cpu_threads, open_run, option, progress, provenance
from fem.experiments.common.tables import markdown_table, show_table, write_table

if TYPE_CHECKING:
    from fem.experiments.lm.text import Corpus
    from fem.models import FEMForCausalLM

PICTURE_TOKENS, PROMPT_TOKENS, SAMPLE_TOKENS = 24, 16, 80


@dataclass(frozen=True, kw_only=True)
class DemoRecipe:
    """The demo's sizes. The defaults take under eight minutes on two cores."""

    text: Path | None = option(None, "Your own UTF-8 text file, instead of Python's sources and help topics.")  # noqa: RUF009
    seeds: int = option(1, "How many seeds the language models are trained with.")
    seed: int = option(0, "First seed.")
    argmax_steps: int = option(4_000, "Most steps of each argmax reader.")
    steps: int = option(500, "Steps of each language model.")
    layers: int = option(4, "Blocks of a language model.")
    width: int = option(128, "Width of a language model.")
    heads: int = option(4, "Heads of a language model.")
    mlp_width: int = option(352, "Width of softmax attention's SwiGLU.")
    vocabulary: int = option(2048, "Entries of the byte-pair tokenizer.")
    context: int = option(128, "Tokens of one row.")
    batch: int = option(16, "Rows a step.")
    threads: int = option(1, "CPU threads; more help where the machine is idle, and hurt where it is busy.")

    def __post_init__(self):
        for name, value in asdict(self).items():
            if name not in ("text", "seed") and value < 1:
                raise ValueError(f"{name} must be positive, got {value}.")
        if self.context < PICTURE_TOKENS:
            raise ValueError(f"context must be at least {PICTURE_TOKENS} tokens for the picture, got {self.context}.")

    def language(self) -> dict:
        """The fields that a `LanguageRecipe` has too."""
        own = ("text", "seeds", "argmax_steps", "threads")
        return {name: value for name, value in asdict(self).items() if name not in own}


def run(recipe: DemoRecipe, output: Path) -> dict:
    """The whole demo, written to `output`; returns what results.json holds."""
    from fem.experiments.lm.compare import compare
    from fem.experiments.lm.small import MIXERS, LanguageRecipe, model_config
    from fem.experiments.lm.text import build_corpus

    task = replace(argmax.SMALL, steps=recipe.argmax_steps, seed=recipe.seed, seeds=1)
    seeds, language = range(recipe.seed, recipe.seed + recipe.seeds), LanguageRecipe(**recipe.language())
    for mixer in MIXERS.values():  # what cannot be built is said before the first minute of work
        model_config(language, mixer, recipe.vocabulary)
    with cpu_threads(recipe.threads), open_run(output, "demo", recipe) as under_way:
        folder = under_way.folder
        with progress() as bars:
            reading_text = bars.add_task("text and tokenizer", total=1)
            corpus = build_corpus(recipe.text, recipe.vocabulary, recipe.context)
            bars.update(reading_text, completed=1)
            curves = argmax.compare(task, under_way, bars)
            models = compare(MIXERS, language, seeds, corpus, under_way, bars)
        tables = {"argmax": argmax.rows(curves, task), "lm": models.rows(corpus.bytes_per_token)}
        for name, rows in tables.items():
            write_table(folder, name, rows)
        argmax.plot(curves, task, folder / "argmax.png")
        models.plot(folder / "lm.png")
        fem = models.models["fem"]
        caption = look_inside(fem, corpus, folder)
        sample = generate(fem, corpus, recipe.seed)
        for part in (fem, corpus.tokenizer):
            part.save_pretrained(folder / "model")
        text = report(recipe, tables, caption, sample)
        (folder / "report.md").write_text(text, encoding="utf-8")
        results = under_way.finish({"argmax": argmax.scores(curves), "lm": models.scores()})
    show_table("Every channel's maximum in one read", tables["argmax"])
    show_table("Language models of equal size", tables["lm"])
    Console().print(sample, markup=False, highlight=False)
    return results


def look_inside(model: FEMForCausalLM, corpus: Corpus, folder: Path) -> str:
    """The page of `fem inspect` on a few held-out tokens, and a picture of the head whose channels differ most.

    Returns the picture's caption.
    """
    from fem.experiments.inspect.layers import layer_tables, most_divided, readings
    from fem.experiments.inspect.page import write_page
    from fem.plots import channel_reading

    ids = held_out(corpus)[:PICTURE_TOKENS]
    found = readings(model, ids[None].to(model.device))
    layers = [layer_tables(number, "softmax", reading) for number, reading in enumerate(found, start=1)]
    place, head = most_divided(layers)
    prior, channels = layers[place].prior[head, 0, -1], layers[place].read[head, :, -1]
    tokens = [corpus.tokenizer.decode([token]) for token in ids.tolist()]
    names = [label(token) for token in tokens]
    title = f"Layer {place + 1}, head {head + 1}: what each channel reads at the last token"
    channel_reading(folder / "reading.png", title, names, prior, channels)
    write_page(folder / "inspect.html", "the demo's FEM model", tokens, layers, (place, head))
    counts = [len(set(tables.read[each, :, -1].argmax(1))) for tables in layers for each in range(tables.heads)]
    favourites = counts[sum(tables.heads for tables in layers[:place]) + head]
    return (
        f"Layer {place + 1}, head {head + 1} of the trained FEM model, at the last of {len(names)} held-out tokens: of "
        f"all {len(counts)} heads the one whose channels differ most. Its {len(channels)} channels have {favourites} "
        f"different favourite tokens, by which they are sorted; the median head has {median(counts):.0f}. Softmax "
        "attention reads the top row in every channel. Every head, channel and token: open `inspect.html` in a browser."
    )


def label(token: str) -> str:
    """A token as an axis can show it: white space made visible, the middle of a long one left out."""
    shown = token.replace("\n", "⏎").replace(" ", "·")
    return shown if len(shown) <= 9 else f"{shown[:4]}…{shown[-4:]}"


def generate(model: FEMForCausalLM, corpus: Corpus, seed: int) -> str:
    """A held-out beginning and what the model makes of it, by sampling."""
    prompt = held_out(corpus)[None, :PROMPT_TOKENS].to(model.device)
    room = model.config.max_position_embeddings - prompt.shape[1]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = model.generate(
            prompt, max_new_tokens=min(SAMPLE_TOKENS, room), do_sample=True, temperature=0.8, top_k=50
        )
    begin, rest = tokens[0].tensor_split([prompt.shape[1]])
    return f"{corpus.tokenizer.decode(begin)} >>> {corpus.tokenizer.decode(rest, skip_special_tokens=True)}"


def held_out(corpus: Corpus) -> torch.Tensor:
    return corpus.validation[len(corpus.validation) // 2]["input_ids"]


def report(recipe: DemoRecipe, tables: dict[str, list[dict]], caption: str, sample: str) -> str:
    source = "the sources and help topics of this Python" if recipe.text is None else recipe.text.name
    return f"""# What the Free Energy Mixer does

## Every channel's maximum in one read

Each channel's largest value sits at a token of its own. Softmax attention reads one average for all channels of a head;
FEM lets the values compete. Hits: the share of channels read within half the distance of their two largest values;
error: mean squared error over the variance of the winners.

{markdown_table(tables["argmax"])}
![validation error and hits over steps](argmax.png)

## Language models of equal size

{recipe.layers} blocks of width {recipe.width}, {recipe.steps} steps of {recipe.batch} x {recipe.context} tokens
from {source}; losses on held-out text, in nats per token.
Same data in the same order, same seeds, parameters within 1 %.

{markdown_table(tables["lm"])}
![validation loss over steps](lm.png)

## Which token each channel reads

![weights of the tokens in each channel of one head](reading.png)

{caption}

## A sample

Held-out beginning, then `>>>`, then what the FEM model made of it:

```text
{sample}
```

{provenance(command_line("demo", recipe, DemoRecipe()))}
The model is in `model/`: `import fem.models`, then `AutoModelForCausalLM.from_pretrained` loads it.
"""


@recipe_options(DemoRecipe())
def command(
    changes: dict,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
):
    """What FEM does, in minutes: the argmax task, two language models on real text, a look inside."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    run(replace(DemoRecipe(), **changes), output)
    typer.echo(
        f"""written to {output}: report.md, inspect.html, results.json, plots, and the model. Next:
  fem generate --model {output}/model --prompt "def "    what the model writes
  fem inspect {output}/model --text "import os"          which token each channel reads, in a text of yours
  fem train --data FILE --output runs/mine             a model of your own text"""
    )
