"""The read of a softmax layer by an engine's attention over the engine's cache: one call over [v | e]."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.models.engines.support import layer_type
from fem.ops.common.packing import Packing
from fem.ops.common.read import Read
from fem.ops.common.tokens import PLAIN
from fem.ops.softmax.cached import REACH, fixed_packing, pack, unpack

EXACT = "exact"  # the attn_implementation of a model that reads with the library's own kernels and cache


class EngineAttention(nn.Module):
    """Mean and free energy from the attention that config._attn_implementation names, over its own cache.

        e = exp(beta f)        [mean | R] = softmax(q k / sqrt(d_k)) [v | e]        F = log(R) / beta

    q (B, T, H, d_k), k (B, T, H_kv, d_k), v (B, T, H_kv, d_v), f = free_values (B, T, H_kv, d_f), or v itself where
    they are None; beta (H_kv, d_f), or None for the mean only. Heads are padded with zeros to config.head_dim.
    e is right while |beta f| <= REACH[f.dtype] nats and is clipped there beyond, with a warning on a CPU; `largest`
    keeps the largest |beta f| since the model was loaded. attention_mask: the engine's, or a dict of them by kind of
    layer; keywords: the engine's, handed on.
    """

    def __init__(self, config: PreTrainedConfig, mixer: FreeEnergyMixerConfig, layer: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.is_causal = True
        self.scaling = mixer.key_width**-0.5
        self.sliding_window = mixer.window
        self.kind = layer_type(mixer)
        self.num_key_value_groups = mixer.n_head // mixer.kv_heads
        self.width = config.head_dim
        self.register_buffer("largest", torch.zeros(()), persistent=False)
        self.warned = False

    def reset_parameters(self) -> None:
        """Set the largest |beta f| seen back to 0."""
        nn.init.zeros_(self.largest)
        self.warned = False

    def forward(
        self,
        q: Float[Tensor, "b t h dk"],
        k: Float[Tensor, "b t hkv dk"],
        v: Float[Tensor, "b t hkv dv"],
        beta: Float[Tensor, "hkv df"] | None,
        free_values: Float[Tensor, "b t hkv df"] | None,
        attention_mask,
        past_key_values: Cache | None,
        **keywords,
    ) -> Read:
        batch, time = v.shape[:2]
        packing = None if beta is None else fixed_packing(beta, torch.zeros_like(beta))
        values = v if packing is None else self._pack(v, v if free_values is None else free_values, packing)
        width = values.shape[3]
        q, k, values = (F.pad(x, (0, self.width - x.shape[3])).transpose(1, 2) for x in (q, k, values))
        if past_key_values is not None:
            k, values = past_key_values.update(k, values, self.layer_idx)
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[self.kind]
        keywords["sliding_window"] = self.sliding_window
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _eager)
        out, _ = attend(self, q, k, values, attention_mask, dropout=0.0, scaling=self.scaling, **keywords)
        out = out.reshape(batch, time, -1, self.width)[..., :width]
        if packing is None:
            return Read(out, None)
        read = unpack(out, packing.per_query_head(out.shape[2]))
        return Read(*(x.to(v.dtype) for x in read))

    def _pack(self, v: Tensor, f: Tensor, packing: Packing) -> Float[Tensor, "b t hkv w"]:
        reach, limit = packing.exponents(f.detach().float()).detach().abs().amax(), REACH[v.dtype]
        torch.maximum(self.largest, reach.float(), out=self.largest)
        looks = v.device.type == "cpu" and not torch.compiler.is_compiling() and not self.warned
        if looks and not self.largest <= limit:  # NaN too
            self.warned = True
            warnings.warn(
                f"layer {self.layer_idx}: |beta v| reaches {self.largest:.1f} nats, but [v | e] in {v.dtype} holds "
                f"{limit:g}: e is clipped there and F is wrong; a model without attn_implementation reads exactly.",
                stacklevel=3,
            )
        return pack(v, f, packing)


def served(mixer: FreeEnergyMixer, x: Float[Tensor, "b t d"], position: Tensor, attention) -> Float[Tensor, "b t d"]:
    """A softmax layer read by attention(q, k, v, beta, f), which keeps its own cache; position (B, T) of the tokens."""
    features, _ = mixer.features(x, PLAIN, None)
    beta = mixer.temperature(x)
    v, free_values = mixer.values(x, features, beta)
    q, k = mixer.prior.queries_and_keys(features, position)
    read = attention(q, k, v, beta, free_values)
    return mixer.output(mixer.dropout(mixer.gate.mixed(features, read).flatten(-2)))


def _eager(module: EngineAttention, q, k, values, attention_mask, scaling, dropout=0.0, **keywords):
    """softmax(scaling q k + mask) values, with materialised weights, as transformers' "eager" attention."""
    k, values = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, values))
    scores = scaling * q @ k.mT
    if attention_mask is not None:
        scores = scores + attention_mask
    p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p @ values).transpose(1, 2), p
