"""Sentence embeddings read by a free energy, as a module of sentence-transformers."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from sentence_transformers.base.modules import Module

from fem.pooling import FreeEnergyPooling


class FreeEnergySentencePooling(Module):
    """s = FreeEnergyPooling(h_1 .. h_T): one learnt query reads the token embeddings (B, T, D) into (B, n_embd).

    Behind a Transformer in SentenceTransformer(modules=[Transformer(path), FreeEnergySentencePooling(D, heads)]); it is
    trained with it, as it starts from nothing. memory_dim: D where it is not n_embd. fields: those of
    `FreeEnergyCrossMixer`. Raises what `FreeEnergyPooling` does.
    """

    config_keys = ["n_embd", "n_head", "memory_dim", "fields"]  # noqa: RUF012  (the name and type are the library's)

    def __init__(self, n_embd: int, n_head: int, memory_dim: int | None = None, fields: dict[str, Any] | None = None):
        super().__init__()
        self.n_embd, self.n_head, self.memory_dim, self.fields = n_embd, n_head, memory_dim, fields or {}
        self.pooling = FreeEnergyPooling(n_embd, n_head, memory_dim=memory_dim, **self.fields)

    def forward(self, features: MutableMapping[str, Any], **_) -> MutableMapping[str, Any]:
        pooled = self.pooling(features["token_embeddings"], features["attention_mask"].bool())
        features["sentence_embedding"] = pooled.squeeze(1)
        return features

    def get_sentence_embedding_dimension(self) -> int:
        return self.n_embd

    def save(self, output_path: str | Path, *_, safe_serialization: bool = True, **__) -> None:
        self.save_config(str(output_path))
        self.save_torch_weights(str(output_path), safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **hub) -> FreeEnergySentencePooling:
        hub = {name: hub.get(name) for name in ("token", "cache_folder", "revision", "local_files_only") if name in hub}
        module = cls(**cls.load_config(model_name_or_path, subfolder=subfolder, **hub))
        cls.load_torch_weights(model_name_or_path, subfolder=subfolder, model=module, **hub)
        return module
