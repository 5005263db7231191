"""Small models of transformers whose attention tests replace."""

from __future__ import annotations

from functools import partial

import small_models
import torch
import transformers
from small_models import VOCABULARY, left_padded
from torch import nn

TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 60, "pad_token_id": 0}
DECODER = {"num_attention_heads": 4, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
GROUPED = TEXT | DECODER | {"num_key_value_heads": 2, "max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 1000.0}
DECODERS = {
    "gpt2": ("GPT2", {**TEXT, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}),
    "llama": ("Llama", GROUPED),
    "linear_rope": ("Llama", GROUPED | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama3_rope": ("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "yarn_rope": ("Llama", GROUPED | {"rope_parameters": YARN}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"num_attention_heads": 6, "head_dim": 8}),  # 6 heads do not divide 32
    "gpt_bigcode": ("GPTBigCode", {**TEXT, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
}
PADDED = left_padded(11, 7, 11)
lively = partial(small_models.lively, size=0.2)


def decoder(name: str) -> nn.Module:
    family, sizes = DECODERS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    architecture = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return lively(getattr(transformers, architecture)(config))


def bert() -> nn.Module:
    return lively(transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **DECODER, max_position_embeddings=64)))


def vision(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(image_size=8, patch_size=4, num_channels=3, **DECODER)
    return lively(getattr(transformers, f"{family}ForImageClassification")(config))


def close(actual, expected, tolerance=1e-3):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


class Attention(nn.Module):
    """What timm's ViT block computes, in the parts that timm gives it."""

    __module__ = "timm.layers.attention"

    def __init__(self, gated: bool = False):
        super().__init__()
        self.num_heads, self.scale = 4, 8**-0.5
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.q_norm, self.k_norm, self.norm = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(32)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.gate = nn.Linear(32, 32) if gated else None

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = self.q_norm(q) @ self.k_norm(k).mT * self.scale
        p = (scores if attn_mask is None else scores.masked_fill(~attn_mask, -torch.inf)).softmax(-1)
        return self.proj(self.norm((p @ v).transpose(1, 2).flatten(2)))
