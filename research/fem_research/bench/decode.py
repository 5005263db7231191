"""Generation token by token: seconds per token, and the bytes of a layer's state.

"decode" is the layer's own streaming, call by call. "served" is one compiled graph over transformers' static cache, as
`model.generate(cache_implementation="static")` runs a model with `attn_implementation="sdpa"`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import StaticCache

from fem.mixer import FreeEnergyMixer
from fem.models import FEMConfig
from fem.models.engines import attention as engine
from fem_research.bench.cases import Case
from fem_research.bench.mixers import Attention, build_mixer
from fem_research.common.measure import alternate

STRETCH = 512  # tokens generated at a time, at most, from the same context each time

Stream = tuple[Callable[[], list[Tensor]], int]  # what generates a stretch, and bytes of the state before it


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, dict[str, float | int]]:
    """Every mixer's median seconds per token after a context of `size.time` tokens, and bytes of the state then.

    A stretch is an eighth of the context, for which a FEM cache is copied once, to make room: that copy is in its time.
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

    return generate, before.nbytes


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

        def read(x: Tensor, place: Tensor, mask: Tensor | None) -> Tensor:
            q, k, v = layer.project(x, place)
            k, v = cache.update(k, v, 0)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            return layer.output(o.transpose(1, 2).flatten(2))

    else:
        attend = engine.EngineAttention(config, layer.config, 0).to(prompt.device)

        def read(x: Tensor, place: Tensor, mask: Tensor | None) -> Tensor:
            return engine.served(layer, x, place, lambda q, k, v, beta, f: attend(q, k, v, beta, f, mask, cache))

    read(prompt, position[:time], None)
    graph = torch.compile(lambda x, place: read(x, place, (place >= position)[None, None, None]), fullgraph=True)

    def generate() -> list[Tensor]:
        cache.layers[0].cumulative_length.fill_(time)
        return [graph(x, place) for x, place in zip(tokens, position[time:].split(1))]

    return generate, (cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes) * time // length
