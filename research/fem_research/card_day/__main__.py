"""python -m fem_research.card_day SLICE: everything that waits for a card, in slices of under nine minutes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fem.provenance import PAGE, provenance
from fem.recipes import listed
from fem.tables import markdown_table, show_table
from fem_research.card_day.recipe import ROWS, TrainingRecipe
from fem_research.common.mixers import above_zero, numbers
from fem_research.runs.run import without_folders
from fem_research.runs.tables import write_page

HERE = Path("runs/card_day")
PACKED, TOKENS = HERE / "packed", HERE / "tokens"
MAD_ROWS = "attention,attention+C,attention+CL,attention+CLT,FEM,GLA,FEM-GLA"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Output = Annotated[Path, typer.Option(help="Folder of the results.")]


def page(output: Path, slice_: str, rows: Sequence[Mapping]) -> None:
    """The page of a slice's run, which ends with its command; `fem report` adds the run to the record."""
    given = [without_folders(word) for word in sys.argv[2:]]
    command = f"make card-day SLICE={slice_}" + (f" ARGS={shlex.quote(shlex.join(given))}" if given else "")
    write_page(output, f"A day with a card: {slice_}", markdown_table(rows), provenance(command))
    show_table(slice_, rows, str(output / PAGE))


def by_semicolons(text: str) -> tuple[str, ...]:
    """The names in an option, as names of mixers may hold commas."""
    return tuple(name for part in text.split(";") if (name := part.strip()))


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """The whole numbers in an option; ValueError of another one, which would be cut."""
    found = numbers(name, text)
    if any(number % 1 for number in found):
        raise ValueError(f"{name} must be whole numbers, got {text!r}.")
    return tuple(map(int, found))


@app.command()
def pack(
    source: Annotated[Path, typer.Argument(help="The package linux-source-6.1 as a .deb, or the tarball in it.")],
    output: Annotated[Path, typer.Option(help="Folder of the pieces.")] = PACKED,
    seed: int = 0,
    megabytes: Annotated[float, typer.Option(help="Text, in 10^6 bytes.")] = 400.0,
    piece_megabytes: Annotated[float, typer.Option(help="Text of a piece, in 10^6 bytes.")] = 200.0,
    held_out_megabytes: float = 4.0,
    tokenizer_megabytes: Annotated[float, typer.Option(help="Text that the tokenizer is trained on.")] = 50.0,
    vocabulary: int = 16384,
) -> None:
    """Turn Linux's sources into pieces of text that travel, and a tokenizer; needs no card."""
    from fem_research.card_day import linux_text

    facts = linux_text.pack(
        source,
        output,
        seed=seed,
        megabytes=megabytes,
        piece_megabytes=piece_megabytes,
        held_out_megabytes=held_out_megabytes,
        tokenizer_megabytes=tokenizer_megabytes,
        vocabulary=vocabulary,
    )
    for name, piece in facts["pieces"].items():
        print(f"{name}: {piece['files']} files, {piece['bytes']:,} bytes in {piece['packed']:,}, {piece['sha256']}")
    print(f"tokenizer: {facts['vocabulary']} entries, {facts['tokenizer']}")


@app.command()
def text(
    packed: Annotated[Path, typer.Option(help="Folder of the pieces.")] = PACKED,
    output: Annotated[Path, typer.Option(help="Folder of the tokens.")] = TOKENS,
) -> None:
    """Tokenise the pieces that are there; tokens that are there already are kept."""
    from fem_research.card_day import linux_text

    facts = linux_text.tokenise(packed, output)
    for part in ("train", linux_text.HELD_OUT):
        print(f"{part}: {facts[part]['tokens']:,} tokens of {facts[part]['bytes']:,} bytes, {facts[part]['sha256']}")


@app.command()
def train(
    tokens: Annotated[Path, typer.Option(help="Folder of the tokens.")] = TOKENS,
    output: Output = HERE / "train",
    rows: Annotated[str, typer.Option(help="Mixers, with semicolons between them.")] = ";".join(ROWS),
    million_tokens: Annotated[float, typer.Option(help="Tokens of a training, in 10^6.")] = 100.0,
    rates: Annotated[str, typer.Option(help="Peak learning rates, with commas between them.")] = "0.001",
    seeds: Annotated[
        str, typer.Option(help="Seeds, with commas between them; all rows of the first come first.")
    ] = "0",
    minutes: Annotated[float, typer.Option(help="Time for all rows; a training is saved when it is over.")] = 8.5,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    mlp_width: int = 2048,
    context: int = 1024,
    batch: int = 64,
    micro: Annotated[int, typer.Option(help="Rows of a forward pass.")] = 64,
    bf16: bool = True,
    compile: bool = True,
    warm: Annotated[bool, typer.Option("--warm", help="One step of each row on random tokens: fills caches.")] = False,
    vocabulary: Annotated[int, typer.Option(help="Of --warm, which reads no tokens.")] = 16384,
) -> None:
    """Train the rows one after the other; the same command goes on with what was stopped."""
    from fem.provenance import note
    from fem.train.signals import Paused
    from fem_research.card_day import training

    mixers = by_semicolons(rows)
    recipes = [
        TrainingRecipe(
            mixer=mixer,
            tokens=round(million_tokens * 1e6),
            rate=rate,
            seed=seed,
            width=width,
            layers=layers,
            heads=heads,
            mlp_width=mlp_width,
            context=context,
            batch=batch,
            micro=micro,
            bf16=bf16,
            compile=compile,
        )
        for seed in whole_numbers("seeds", seeds)
        for mixer in mixers
        for rate in above_zero("rates", rates)
    ]
    try:
        if warm:
            training.warm(recipes, vocabulary)
        else:
            training.run(recipes, tokens, output, minutes)
            table(output)
    except Paused as stopped:
        note(f"{stopped}; the same command goes on.")
        raise SystemExit(stopped.code) from None


@app.command()
def table(output: Output = HERE / "train") -> None:
    """Write the page of the trainings, as `train` does at its end: losses at equal tokens and time, speed, memory."""
    from fem_research.card_day import table as slice_

    page(output, "train", slice_.write(output))


@app.command()
def layers(
    output: Output = HERE / "layers",
    mixers: Annotated[str, typer.Option(help="Mixers, with semicolons between them; default: softmax's.")] = "",
    modes: Annotated[str, typer.Option(help="Modes, with semicolons between them; default: all.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens, with commas between them.")] = "2048,512,16384",
    tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 16384,
    minutes: Annotated[float, typer.Option(help="Time for all cells.")] = 8.5,
    seconds: Annotated[float, typer.Option(help="Seconds of repeated steps.")] = 0.5,
    width: int = 1024,
    heads: int = 16,
) -> None:
    """One layer's steps: eager, compiled, replayed from a CUDA graph, and without the fused kernels."""
    from fem_research.card_day import layers as slice_

    recipe = slice_.LayersRecipe(
        mixers=by_semicolons(mixers) or slice_.MIXERS,
        modes=by_semicolons(modes) or slice_.MODES,
        lengths=whole_numbers("lengths", lengths),
        tokens=tokens,
        width=width,
        heads=heads,
        seconds=seconds,
    )
    page(output, "layers", slice_.table(slice_.run(recipe, output, minutes)))


@app.command()
def long(
    output: Output = HERE / "long",
    lengths: Annotated[str, typer.Option(help="Tokens, with commas between them.")] = "8192,32768,131072",
    mixers: Annotated[str, typer.Option(help="Mixers, with semicolons between them; default: softmax and GLA.")] = "",
    parts: Annotated[str, typer.Option(help="layer, model, or both with a comma.")] = "layer,model",
    minutes: Annotated[float, typer.Option(help="Time for all cells.")] = 8.5,
    seconds: Annotated[float, typer.Option(help="Seconds of repeated steps.")] = 2.0,
    width: int = 1024,
    heads: int = 16,
    layers: int = 4,
    compile: bool = True,
) -> None:
    """Prefill and train step at long contexts, beside attention's; the same command goes on."""
    from fem_research.card_day import long as slice_

    recipe = slice_.LongRecipe(
        lengths=whole_numbers("lengths", lengths),
        mixers=by_semicolons(mixers) or slice_.MIXERS,
        parts=tuple(listed(parts)),
        width=width,
        heads=heads,
        layers=layers,
        seconds=seconds,
        compile=compile,
    )
    page(output, "long", slice_.table(slice_.run(recipe, output, minutes)))


@app.command()
def table7(
    output: Output = HERE / "table7",
    mixers: Annotated[
        str, typer.Option(help="Mixers of `fem bench`, with semicolons; default: all of the table.")
    ] = "",
    dtypes: str = "bfloat16,float32",
    modes: Annotated[str, typer.Option(help="compiled, eager, or both with a comma.")] = "compiled,eager",
    minutes: Annotated[float, typer.Option(help="Time for all cells.")] = 8.5,
    seconds: Annotated[float, typer.Option(help="Seconds of repeated steps.")] = 2.0,
    batch: int = 8,
    time: int = 1024,
    width: int = 768,
    heads: int = 12,
    layers: int = 12,
) -> None:
    """The paper's Table 7 on this card; the same command goes on."""
    from fem_research.card_day import table7 as slice_

    sizes = {"batch": batch, "time": time, "width": width, "heads": heads, "layers": layers, "seconds": seconds}
    names = by_semicolons(mixers) or slice_.MIXERS
    recipe = slice_.Table7Recipe(mixers=names, dtypes=tuple(listed(dtypes)), modes=tuple(listed(modes)), **sizes)
    page(output, "table7", slice_.table(slice_.run(recipe, output, minutes)))


@app.command()
def mad(
    output: Output = HERE / "mad",
    mixers: Annotated[str, typer.Option(help="Mixers, with commas between them.")] = MAD_ROWS,
    tasks: Annotated[str, typer.Option(help="all, or some of MAD's tasks.")] = "all",
    profile: Annotated[str, typer.Option(help="Profile of `fem mad`.")] = "paper-one",
    workers: Annotated[int, typer.Option(help="Trainings side by side on the card.")] = 8,
) -> None:
    """MAD, one setting a task at its own size; the same command goes on."""
    from fem_research.mad.experiment import run
    from fem_research.mad.settings import MADRecipe

    run(MADRecipe(profile=profile, mixers=mixers, tasks=tasks, seeds=1), output, workers)


def main() -> None:
    try:
        app()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
