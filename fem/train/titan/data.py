"""The rows of `fem train` for torchtitan: the same tokens in the same order, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

from fem.models.loss import next_tokens
from fem.ops.common.tokens import whole_rows
from fem.recipes import require_one_of
from fem.train.data import Rows, Shuffled
from fem.train.recipe import DOCUMENTS


class TokenRows(BaseDataLoader):
    """Batches of a folder of tokens that `fem train` wrote (`OUTPUT/tokens`), in its order under the same seed
    and `rows`: without those that it holds out (`validation_rows`, at most a tenth).

    The state is the number of steps, so a run goes on with another number of processes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        rows: int | None = None  # from the first; None: all, held-out ones too
        documents: str = "hidden"  # or "visible", as of `fem train --documents`
        seed: int = 42

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs,
    ):
        if config.dataset_path is None:
            raise ValueError("dataloader.dataset_path must be the folder OUTPUT/tokens of a `fem train`, got None.")
        rows = Rows(Path(config.dataset_path), seq_len, config.documents == "visible")
        count = len(rows) if config.rows is None else config.rows
        if not 0 < count <= len(rows):
            raise ValueError(
                f"dataloader.rows must be 1 to {len(rows)}, the rows of {seq_len} tokens there, got {config.rows}."
            )
        require_one_of("dataloader.documents", config.documents, DOCUMENTS)
        self.rows = Shuffled(rows, count, count, config.seed)
        self.size, self.world, self.rank = local_batch_size, dp_world_size, dp_rank
        self.batches = 0  # of this process, each a part of one batch over all processes

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self.batches * self.world + self.rank) * self.size
            batch = [self.rows[index] for index in range(first, first + self.size)]
            joined = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
            self.batches += 1
            ids, documents = joined["input_ids"], joined.get("segment_ids")
            positions = whole_rows(tuple(ids.shape), ids.device, None, documents).position  # from 0 in each document
            yield {"input": ids, "positions": positions.expand(ids.shape)}, next_tokens(joined["labels"])

    def state_dict(self) -> dict:
        return {"rows": self.batches * self.size * self.world}

    def load_state_dict(self, state: dict) -> None:
        if not state:
            return
        self.batches, rest = divmod(state["rows"], self.size * self.world)
        if rest:
            raise ValueError(
                f"the checkpoint's rows must be a multiple of the batch over all processes, {self.size} x "
                f"{self.world}, got {state['rows']}."
            )
