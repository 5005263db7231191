"""The slice `layers`: one layer's forward pass, train step and next token, eager, compiled, and in a CUDA graph.

A replayed graph shows what the card itself needs; the other modes include the host, which launches its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fem.mixer import FreeEnergyMixer
from fem.recipes import require_some_of
from fem_research.bench.cases import Size
from fem_research.bench.workloads import Attention, Workload, steps_of
from fem_research.card_day import cells
from fem_research.common.measure import Step
from fem_research.common.mixers import canonical, mixer_config
from fem_research.common.names import display

TORCH = "attention of torch's operations"
MIXERS = (TORCH, "softmax", "softmax+LTG", "softmax+LTG/r64", "softmax+LTG/r64/s.5", "softmax+CLTG/r64", "softmax+CLTG")
MODES = ("eager", "compiled", "captured", "eager, not fused")
STEPS = ("forward", "train", "token")
NAMES = ("mixer", "mode", "time")
EXPERIMENT = "card_layers"


@dataclass(frozen=True, kw_only=True)
class LayersRecipe:
    """What is measured."""

    mixers: tuple[str, ...] = MIXERS
    modes: tuple[str, ...] = MODES
    lengths: tuple[int, ...] = (2048, 512, 16384)
    tokens: int = 16384
    width: int = 1024
    heads: int = 16
    seconds: float = 0.5

    def __post_init__(self):
        require_some_of("modes", self.modes, MODES)
        named = tuple(dict.fromkeys(name if name == TORCH else canonical(name) for name in self.mixers))
        object.__setattr__(self, "mixers", named)
        if odd := [length for length in self.lengths if not 0 < length <= self.tokens or self.tokens % length]:
            raise ValueError(f"lengths must divide tokens = {self.tokens}, got {odd[0]}.")


def build(name: str, recipe: LayersRecipe) -> nn.Module:
    if name == TORCH:
        return Attention(recipe.width, recipe.heads)
    return FreeEnergyMixer(mixer_config(name, recipe.width, recipe.heads))


def captured(step: Step) -> Step:
    """The step in a CUDA graph, which a call replays.

    Raises RuntimeError for a step that waits for the device, before it is captured: a failed capture breaks later ones.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def cell(mixer: str, mode: str, time: int, recipe: LayersRecipe, device: torch.device) -> dict:
    """Forward pass, train step, and one token behind `time` others, of one layer with bfloat16 parameters."""
    torch.manual_seed(0)
    layer = build(mixer, recipe).to(device, torch.bfloat16)
    if mode == "compiled":
        layer.compile()
    size = Size(recipe.tokens // time, time, recipe.width, recipe.heads)
    if mode == "eager, not fused" and isinstance(layer, FreeEnergyMixer):
        layer.value.register_forward_hook(lambda *_: None)  # a layer with a hook is read part by part
    try:
        work = steps_of(layer, size, device, torch.bfloat16)
        found = {"kept_bytes": kept(work)} if device.type == "cuda" and mode != "captured" else {}
        steps = {"forward": work.forward, "train": work.train}
        steps |= {} if mixer == TORCH else {"token": token(layer, size)}
        for name, step in steps.items():
            try:
                found[name] = cells.measured(captured(step) if mode == "captured" else step, recipe.seconds, device)
            except RuntimeError as error:  # a step that cannot be captured leaves the others as they are
                found[name] = cells.failed(error)
        return found
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        return {"train": cells.failed(error)}


def token(layer: nn.Module, size: Size) -> Step:
    """One token more of a stream that starts with size.time tokens; a captured step writes to one place again."""
    weight = next(layer.parameters())
    draw = partial(torch.randn, device=weight.device, dtype=weight.dtype)
    x = draw(size.batch, 1, size.width)
    with torch.no_grad():
        _, state = layer(draw(size.batch, size.time, size.width), return_state=True)

    def step() -> None:
        nonlocal state
        with torch.no_grad():
            _, state = layer(x, state=state, return_state=True)

    return step


def kept(work: Workload) -> int:
    """Bytes that a forward pass keeps for its backward, its output aside."""
    work.train()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = work.output()
    return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()


def run(recipe: LayersRecipe, output: Path, minutes: float = float("inf")) -> dict:
    """All cells, until the time is over; returns what results.json holds. A CPU captures nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared = {name: value for name, value in asdict(recipe).items() if name not in ("mixers", "modes", "lengths")}
    shared |= {"device": device.type}
    modes = [mode for mode in recipe.modes if device.type == "cuda" or mode != "captured"]
    keys = [
        (mixer, mode, time)
        for time in recipe.lengths
        for mode in modes
        for mixer in recipe.mixers
        if mixer != TORCH or mode != "eager, not fused"
    ]
    return cells.run(output, EXPERIMENT, shared, keys, lambda key: cell(*key, recipe, device), minutes, NAMES)


def table(found: Mapping) -> list[dict]:
    """A row a cell: ours beside attention by the same launches, of the same mode and length."""
    by_key = {tuple(one[name] for name in NAMES): one for one in found["cells"]}
    rows = []
    for (mixer, mode, time), one in by_key.items():
        row = {"mixer": mixer if mixer == TORCH else display(mixer), "mode": mode, "T": time}
        row |= cells.beside(one, by_key.get(("softmax", mode.partition(",")[0], time), {}), STEPS)
        row["kept MiB"] = round(one["kept_bytes"] / 2**20) if "kept_bytes" in one else None
        rows.append(row)
    return rows
