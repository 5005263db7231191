"""The slice `long`: prefill and train step of one layer and of a small model at long contexts, beside attention's.

Each cell (part, mixer, tokens) has its own record in one JSON, which is written after every cell; the same command
goes on with the cells that are missing.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from fem.models import FEMForCausalLM
from fem.models.presets import preset
from fem.runs.run import note, read_json, write_json
from fem.train.model import build_model
from fem_research.bench.workloads import Attention
from fem_research.card_day.facts import circumstances_of_card
from fem_research.common.blocks import build_mixer
from fem_research.common.measure import Step, cpu_growth, cpu_seconds, gpu_seconds
from fem_research.common.mixers import fields_of

ATTENTION = "attention"  # as a layer torch's own; as a model, FEM's with all its parts off
MIXERS = (ATTENTION, "softmax+CLTG/r64", "softmax+CLTG", "softmax+LTG/r64/s.5", "gla", "gla+LTG/r64")
PARTS = ("layer", "model")
GRAPHS = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
FEWEST, MOST = 3, 20


@dataclass(frozen=True, kw_only=True)
class LongRecipe:
    """What is measured. One row at a time, in bfloat16; the model has tied embeddings and a SwiGLU of 8/3 its width."""

    lengths: tuple[int, ...] = (8192, 32768, 131072)
    mixers: tuple[str, ...] = MIXERS
    parts: tuple[str, ...] = PARTS
    width: int = 1024
    heads: int = 16
    layers: int = 4
    vocabulary: int = 16384
    seconds: float = 2.0  # of a cell's repeated steps
    compile: bool = True  # train steps; prefills are eager, as in generation


def steps_of(part: str, mixer: str, length: int, recipe: LongRecipe, device: torch.device) -> tuple[Step, Step, int]:
    """A prefill that fills a cache, a train step (forward and backward), and the number of parameters."""
    torch.manual_seed(0)
    if part == "model":
        return _of_model(mixer, length, recipe, device)
    plain = mixer == ATTENTION
    layer = Attention(recipe.width, recipe.heads) if plain else build_mixer(mixer, recipe.width, recipe.heads)
    layer = layer.to(device, torch.bfloat16)
    x = torch.randn(1, length, recipe.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def prefill() -> object:
        if plain:
            return layer(x), layer.project(x, torch.arange(length, device=device))[1:]
        return layer(x, return_state=True)

    def train() -> None:
        x.grad = None
        layer.zero_grad()
        trained(x).backward(gradient)

    trained = torch.compile(layer, dynamic=False) if recipe.compile else layer
    return prefill, train, _count(layer)


def _of_model(mixer: str, length: int, recipe: LongRecipe, device: torch.device) -> tuple[Step, Step, int]:
    fields = fields_of("softmax" if mixer == ATTENTION else mixer)
    config = preset(
        "fem-sm-tiny",
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=round(recipe.width * 8 / 3 / 256) * 256 or recipe.width,
        max_position_embeddings=length,
        prior_type=fields.pop("prior_type"),
        mixer=fields,
    )
    model: FEMForCausalLM = build_model(config, 0).to(device, torch.bfloat16)
    if recipe.compile:
        for block in model.model.layers:
            block.compile(dynamic=False)
    ids = torch.randint(recipe.vocabulary, (1, length), device=device)

    def prefill() -> object:
        model.eval()
        return model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def train() -> None:
        model.train()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return prefill, train, _count(model)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def measure(step: Step, seconds: float, device: torch.device) -> dict[str, float | int | None]:
    """Median seconds, bytes that a step adds at its peak, and the seconds of the first step, which compiles."""
    cuda = device.type == "cuda"
    start = time.monotonic()
    step()
    if cuda:
        torch.cuda.synchronize()
    first = time.monotonic() - start
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before
    else:
        grown = cpu_growth(step)
    clock = gpu_seconds if cuda else cpu_seconds
    times: list[float] = []
    while len(times) < FEWEST or (sum(times) < seconds and len(times) < MOST):
        times.append(clock(step))
    return {"seconds": statistics.median(times), "steps": len(times), "extra_bytes": grown, "first_seconds": first}


def cell(part: str, mixer: str, length: int, recipe: LongRecipe, device: torch.device) -> dict:
    """What a prefill and a train step of this mixer take; "failed" where there is too little memory for one."""
    torch._dynamo.reset()
    prefill, train, parameters = steps_of(part, mixer, length, recipe, device)
    found: dict = {"part": part, "mixer": mixer, "tokens": length, "parameters": parameters}
    with torch._dynamo.config.patch(GRAPHS):
        for name, step in (("prefill", prefill), ("train", train)):
            try:
                if name == "prefill":
                    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                        found[name] = measure(step, recipe.seconds, device)
                else:
                    found[name] = measure(step, recipe.seconds, device)
            except RuntimeError as error:  # of the compiler, or of a card with too little memory
                found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return found


def run(recipe: LongRecipe, output: Path, minutes: float = float("inf")) -> dict:
    """All cells, short contexts first, until the time is over; returns what the JSON holds."""
    deadline = time.monotonic() + 60 * minutes
    file, device = output / "long.json", torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {name: value for name, value in asdict(recipe).items() if name not in ("lengths", "mixers", "parts")}
    found = read_json(file) or {"recipe": sizes, "cells": []} | circumstances_of_card()
    if found["recipe"] != sizes:
        raise ValueError(f"{str(file)!r} holds cells of another size; give another output.")
    output.mkdir(parents=True, exist_ok=True)
    wanted = [(p, m, t) for p in recipe.parts for t in recipe.lengths for m in recipe.mixers]
    for key in wanted:
        if key in {(one["part"], one["mixer"], one["tokens"]) for one in found["cells"]}:
            continue
        if time.monotonic() > deadline:
            break
        found["cells"].append(cell(*key, recipe, device))
        found["finished"] = len(found["cells"]) >= len(wanted)
        write_json(file, found)
        note(f"{', '.join(map(str, key))} tokens: {in_words(found['cells'][-1])}")
        gc.collect()
        torch.cuda.empty_cache()
    return found


def in_words(one: dict) -> str:
    parts = []
    for name in ("prefill", "train"):
        it = one[name]
        if "failed" in it:
            parts.append(f"{name} failed, {it['failed']}")
        else:
            parts.append(f"{name} {1e3 * it['seconds']:.2f} ms, {(it['extra_bytes'] or 0) / 2**20:.0f} MiB")
    return "; ".join(parts)


def table(found: dict) -> list[dict]:
    """A row a cell: milliseconds, MiB, and their ratios to attention's."""
    by_key = {(one["part"], one["mixer"], one["tokens"]): one for one in found["cells"]}
    rows = []
    for (part, mixer, length), one in by_key.items():
        base = by_key.get((part, ATTENTION, length), {})
        row: dict = {"part": part, "mixer": mixer, "tokens": length}
        for name in ("prefill", "train"):
            for field, unit, scale in (("seconds", "ms", 1e3), ("extra_bytes", "MiB", 2**-20)):
                mine, theirs = (it.get(name, {}).get(field) for it in (one, base))
                row[f"{name} {unit}"] = None if mine is None else scale * mine
                row[f"{name} {unit} ratio"] = f"{mine / theirs:.2f}" if mine and theirs else None
        rows.append(row)
    return rows
