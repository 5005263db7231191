"""The mixers that are measured, their forward and train steps, generation token by token, and what they cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fem.functional import softmax_read
from fem.mixer import FreeEnergyMixer
from fem.models import FEMConfig
from fem.models.engines.attention import attend
from fem.models.modeling import FEMBlock
from fem.ops.common.rope import frequencies, rotate_all
from fem_research.bench.cases import BASELINE, Case, Size
from fem_research.common import blocks
from fem_research.common.diff_attention import number_layers
from fem_research.common.measure import Step, alternate, cpu_growth, gpu_growth, in_fresh_process, operations
from fem_research.common.mixers import BASELINES, OTHERS, available, mixer_config
from fem_research.common.names import colour

PLAIN = ", plain"  # after a mixer's name: the plain backend
COMPILED = ", compiled"  # after a mixer's name: by torch.compile, of blocks each by itself


def mixer_of(name: str) -> str:
    """The mixer as it is typed: "attention+LTG" of "attention+LTG, plain"."""
    return name.partition(", ")[0]


def colour_of(name: str) -> str:
    return colour(mixer_of(name))


def baseline_of(name: str) -> str:
    """The mixer that a mixer's costs are divided by: attention, compiled where the mixer is."""
    return BASELINE + COMPILED if name.endswith(COMPILED) else BASELINE


class Attention(nn.Module):
    """o = W_O softmax(q k / sqrt(d)) v with RoPE, the layer that FEM replaces: 4 D^2 weights, torch's SDPA."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def project(self, x: Float[Tensor, "b t d"], position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, (B, H, T, d) each."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        q, k = rotate_all((q, k), position, frequencies(q.shape[-1], 10000.0, q.device))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        position = x.new_ones(x.shape[1]).cumsum(0).long() - 1
        o = F.scaled_dot_product_attention(*self.project(x, position), is_causal=True)
        return self.output(o.transpose(1, 2).flatten(2))


def build_mixer(name: str, size: Size) -> nn.Module:
    """The mixer to measure. Raises ModuleNotFoundError where it is a baseline whose library is not installed."""
    name = name.removesuffix(COMPILED)
    if name == BASELINE:
        return Attention(size.width, size.heads)
    if name in BASELINES:
        return blocks.build(name, size.width, size.heads)
    if name in OTHERS:
        return blocks.build_mixer(name, size.width, size.heads)
    backend = "plain" if name.endswith(PLAIN) else "auto"
    return FreeEnergyMixer(mixer_config(mixer_of(name), size.width, size.heads, backend=backend))


class Block(nn.Module):
    """x + Mixer(LayerNorm(x)), then x + MLP(LayerNorm(x)), the MLP 4 D wide: GPT-2's block."""

    def __init__(self, width: int, mixer: nn.Module):
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = mixer
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def build_blocks(name: str, size: Size, layers: int) -> nn.Sequential:
    """Blocks without embeddings and head: Table 7 counts 2 x 85M operations per token, only GPT-2's blocks."""
    return number_layers(nn.Sequential(*(Block(size.width, build_mixer(name, size)) for _ in range(layers))))


SHORT = 16
Result = dict[str, int | float | None]


class Workload(NamedTuple):
    output: Callable[[], Tensor]
    forward: Step
    train: Step
    parameters: int | None


def runs(case: Case, name: str, device: torch.device) -> bool:
    """Whether the mixer can be measured here."""
    return name not in BASELINES or available(name, device)


def workload(case: Case, name: str, device: torch.device, time: int | None = None) -> Workload:
    """Steps on a random input, whose gradient is computed too. time: another length than the case's."""
    size = case.size if time is None else Size(case.size.batch, time, case.size.width, case.size.heads)
    dtype = getattr(torch, case.dtype)
    if case.part == "read":
        return _of_read(name, size, device, dtype)
    build = build_blocks(name, size, case.layers) if case.layers else build_mixer(name, size)
    module = build.to(device, dtype)
    if name.endswith(COMPILED):
        for part in module if case.layers else (module,):
            part.compile()
    return steps_of(module, size, device, dtype)


def steps_of(module: nn.Module, size: Size, device: torch.device, dtype: torch.dtype) -> Workload:
    """The steps of a module that reads (B, T, D), on a random input."""
    x = torch.randn(size.batch, size.time, size.width, device=device, dtype=dtype, requires_grad=True)
    parameters = list(module.parameters())
    return _steps(lambda: module(x), [x, *parameters], sum(p.numel() for p in parameters))


def _of_read(name: str, size: Size, device: torch.device, dtype: torch.dtype) -> Workload:
    """Attention over values of width d, or FEM's read of values of width d / 2: equal weights and equal operations."""
    width = size.width // size.heads
    draw = lambda d: torch.randn(size.batch, size.time, size.heads, d, device=device, dtype=dtype, requires_grad=True)  # noqa: E731
    q, k, v = draw(width), draw(width), draw(width if name == BASELINE else width // 2)
    if name == BASELINE:
        heads_first = lambda: (x.transpose(1, 2) for x in (q, k, v))  # noqa: E731
        return _steps(lambda: F.scaled_dot_product_attention(*heads_first(), is_causal=True), [q, k, v], None)
    beta = torch.full((size.heads, width // 2), 1.95, device=device, requires_grad=True)
    backend = name.partition(", ")[2] or "auto"
    return _steps(lambda: torch.cat(softmax_read(q, k, v, beta, backend=backend), -1), [q, k, v, beta], None)


def _steps(output: Callable[[], Tensor], leaves: list[nn.Parameter | Tensor], parameters: int | None) -> Workload:
    gradient = None

    def forward() -> None:
        with torch.no_grad():
            output()

    def train() -> None:
        nonlocal gradient
        for leaf in leaves:
            leaf.grad = None
        y = output()
        gradient = torch.randn_like(y) if gradient is None else gradient
        y.backward(gradient)

    return Workload(output, forward, train, parameters)


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Result]:
    """Costs of every mixer that runs here: seconds, operations, and bytes that a step adds at its peak."""
    torch._dynamo.reset()  # of graphs for other lengths, which the compiler would take for one of any length
    built = {name: prepared(case, name, device) for name in case.mixers if runs(case, name, device)}
    work = {name: steps for name, steps in built.items() if steps is not None}
    forward = alternate({name: steps.forward for name, steps in work.items()}, seconds / 3, device)
    train = alternate({name: steps.train for name, steps in work.items()}, seconds, device)
    memory = _memory(case, work, device)
    return {
        name: {
            "parameters": steps.parameters,
            "forward_s": forward[name],
            "train_s": train[name],
            **memory[name],
            "forward_flop": operations(steps.forward) if case.layers else None,
            "train_flop": operations(steps.train) if case.layers else None,
        }
        for name, steps in work.items()
    }


def prepared(case: Case, name: str, device: torch.device) -> Workload | None:
    """The mixer's steps, after a first train step; None, with a warning, where memory or a baseline's library fails."""
    try:
        steps = workload(case, name, device)
        steps.train()
        return steps
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        why = "the GPU has too little memory"
    except Exception as error:
        if name not in BASELINES:
            raise
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"{name} is left out of {case.name}: {why}.", stacklevel=2)
    return None


Growth = dict[str, int | None]


def _memory(case: Case, work: dict[str, Workload], device: torch.device) -> dict[str, Growth]:
    if device.type == "cuda":
        return {name: _growth(case, steps, gpu_growth) for name, steps in work.items()}
    return in_fresh_process(cpu_growths, case, list(work), torch.get_num_threads())


def _growth(case: Case, steps: Workload, growth: Callable[[Step], int | None]) -> Growth:
    """Bytes that a train step adds; of a model of several blocks those of a forward pass too."""
    forward = {"forward_extra_bytes": growth(steps.forward)} if case.layers else {}
    return forward | {"train_extra_bytes": growth(steps.train)}


def cpu_growths(case: Case, names: list[str], threads: int) -> dict[str, Growth]:
    """`_growth` of each mixer, after a short train step that loads all code. For `in_fresh_process`."""
    torch.set_num_threads(threads)
    growths, cpu = {}, torch.device("cpu")
    for name in names:
        workload(case, name, cpu, SHORT).train()
        steps = workload(case, name, cpu)
        growths[name] = _growth(case, steps, cpu_growth)
        del steps
    return growths


STRETCH = 512  # tokens generated at a time, at most, from the same context each time

Stream = tuple[Callable[[], list[Tensor]], int]  # what generates a stretch, and bytes of the state before it


def measure_tokens(case: Case, device: torch.device, seconds: float) -> dict[str, dict[str, float | int]]:
    """Every mixer's median seconds per token after a context of `size.time` tokens, and bytes of the state then.

    A stretch is an eighth of the context. The time includes one copy of a FEM cache, which makes room.
    """
    dtype, size = getattr(torch, case.dtype), case.size
    stretch = min(STRETCH, max(1, size.time // 8))
    prompt = torch.randn(size.batch, size.time, size.width, device=device, dtype=dtype)
    tokens = torch.randn(stretch, size.batch, 1, size.width, device=device, dtype=dtype)
    streams = {}
    with torch.no_grad():
        for name in case.mixers:
            layer = build_mixer(name, size).to(device, dtype).eval()
            streams[name] = (served if case.part == "served" else stream)(layer, prompt, tokens)
        taken = alternate({name: generate for name, (generate, _) in streams.items()}, seconds, device)
    return {
        name: {"token_s": taken[name] / stretch, "state_bytes": state_bytes}
        for name, (_, state_bytes) in streams.items()
    }


def stream(
    layer: Attention | FreeEnergyMixer, prompt: Float[Tensor, "b t d"], tokens: Float[Tensor, "n b 1 d"]
) -> Stream:
    """A function that feeds the tokens one by one to a layer that has read the prompt, and the state's bytes."""
    return (_attention if isinstance(layer, Attention) else _fem)(layer, prompt, tokens)


def _attention(layer: Attention, prompt: Tensor, tokens: Tensor) -> Stream:
    """With a KV cache that is allocated once, at its final length."""
    time = prompt.shape[1]
    position = torch.arange(time + len(tokens), device=prompt.device)
    _, *prefilled = layer.project(prompt, position[:time])
    caches = [F.pad(x, (0, 0, 0, len(tokens))) for x in prefilled]

    def generate() -> list[Tensor]:
        outputs = []
        for end, x in enumerate(tokens, start=time + 1):
            q, *new = layer.project(x, position[end - 1 : end])
            for cache, one in zip(caches, new):
                cache[:, :, end - 1 : end] = one
            o = F.scaled_dot_product_attention(q, *(cache[:, :, :end] for cache in caches))
            outputs.append(layer.output(o.transpose(1, 2).flatten(2)))
        return outputs

    return generate, sum(x.nbytes for x in prefilled)


def _fem(layer: FreeEnergyMixer, prompt: Tensor, tokens: Tensor) -> Stream:
    _, before = layer(prompt, return_state=True)

    def generate() -> list[Tensor]:
        state, outputs = before, []
        for x in tokens:
            y, state = layer(x, state=state, return_state=True)
            outputs.append(y)
        return outputs

    return generate, before.reorder(torch.arange(before.batch)).nbytes  # without room for further tokens


def served(
    layer: Attention | FreeEnergyMixer, prompt: Float[Tensor, "b t d"], tokens: Float[Tensor, "n b 1 d"]
) -> Stream:
    """`stream` by one compiled graph over a cache of fixed length. FEM: the softmax prior without a conditioner."""
    time, length = prompt.shape[1], prompt.shape[1] + len(tokens)
    heads = layer.heads if isinstance(layer, Attention) else layer.config.n_head
    config = FEMConfig(
        hidden_size=prompt.shape[2], num_attention_heads=heads, num_hidden_layers=1, attn_implementation="sdpa"
    )
    cache = StaticCache(config=config, max_cache_len=length)
    position = torch.arange(length, device=prompt.device)
    if isinstance(layer, Attention):

        def read(x: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
            q, k, v = layer.project(x, at)
            k, v = cache.update(k, v, 0)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            return layer.output(o.transpose(1, 2).flatten(2))

    else:
        block = FEMBlock(config, layer.config, 0).to(prompt.device)
        by = partial(ALL_ATTENTION_FUNCTIONS["sdpa"], block, scaling=block.scaling)

        def read(x: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
            return layer.read_by(x, at, partial(attend, block, by, attention_mask=mask, past_key_values=cache))[0]

    read(prompt, position[:time], None)
    graph = torch.compile(lambda x, at: read(x, at, (at >= position)[None, None, None]), fullgraph=True)

    def generate() -> list[Tensor]:
        cache.layers[0].cumulative_length.fill_(time)
        return [graph(x, at) for x, at in zip(tokens, position[time:].split(1))]

    return generate, (cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes) * time // length
