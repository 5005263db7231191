"""The slice `long`: prefill and train step of one layer and of a small model at long contexts, beside attention's.

A cell is (part, mixer, tokens). The same command goes on with the cells that are missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fem.models import FEMForCausalLM
from fem.models.presets import preset
from fem.recipes import require_some_of
from fem.train.model import build_model
from fem_research.bench.workloads import Attention
from fem_research.card_day import cells
from fem_research.common.blocks import build_mixer
from fem_research.common.measure import Step
from fem_research.common.mixers import canonical, fields_of
from fem_research.common.names import display

ATTENTION = "attention"  # as a layer torch's own; as a model, FEM's with all its parts off
MIXERS = (ATTENTION, "softmax+CLTG/r64", "softmax+CLTG", "softmax+LTG/r64/s.5", "gla", "gla+LTG/r64")
PARTS = ("layer", "model")
EXPERIMENT = "card_long"


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

    def __post_init__(self):
        require_some_of("parts", self.parts, PARTS)
        named = tuple(dict.fromkeys(name if name == ATTENTION else canonical(name) for name in self.mixers))
        object.__setattr__(self, "mixers", named)


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
        if not plain:
            return layer(x, return_state=True)
        q, k, v = layer.project(x, torch.arange(length, device=device))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return layer.output(o.transpose(1, 2).flatten(2)), (k, v)

    def train() -> None:
        x.grad = None
        layer.zero_grad()
        trained(x).backward(gradient)

    trained = torch.compile(layer, dynamic=False) if recipe.compile else layer
    return prefill, train, _count(layer)


def _of_model(mixer: str, length: int, recipe: LongRecipe, device: torch.device) -> tuple[Step, Step, int]:
    fields = fields_of("softmax" if mixer == ATTENTION else canonical(mixer))
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


def cell(part: str, mixer: str, length: int, recipe: LongRecipe, device: torch.device) -> dict:
    """Time and memory of a prefill and a train step of this mixer."""
    try:
        prefill, train, parameters = steps_of(part, mixer, length, recipe, device)
    except torch.OutOfMemoryError as error:
        return {"prefill": cells.failed(error)}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        filled = cells.measured(prefill, recipe.seconds, device)
    trained = cells.measured(train, recipe.seconds, device)
    return {"parameters": parameters, "prefill": filled, "train": trained}


def run(recipe: LongRecipe, output: Path, minutes: float = float("inf")) -> dict:
    """All cells, short contexts first, until the time is over; returns what results.json holds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared = {name: value for name, value in asdict(recipe).items() if name not in ("lengths", "mixers", "parts")}
    shared |= {"device": device.type}
    keys = [(part, mixer, tokens) for part in recipe.parts for tokens in recipe.lengths for mixer in recipe.mixers]
    return cells.run(
        output, EXPERIMENT, shared, keys, lambda key: cell(*key, recipe, device), minutes, ("part", "mixer", "tokens")
    )


def table(found: dict) -> list[dict]:
    """A row a cell: milliseconds, MiB, and their ratios to attention's."""
    by_key = {(one["part"], one["mixer"], one["tokens"]): one for one in found["cells"]}
    return [
        {"part": part, "mixer": display(mixer), "tokens": tokens}
        | cells.beside(one, by_key.get((part, ATTENTION, tokens), {}), ("prefill", "train"))
        for (part, mixer, tokens), one in by_key.items()
    ]
