"""What `fem finetune` compares, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fem.experiments.common.recipes import listed, require_one_of, require_positive
from fem.experiments.common.run import option

ARCHITECTURES = {"gpt2": "GPT-2", "llama": "Llama"}
ARMS: dict[str, dict | None] = {
    "original": None,  # the original as it is
    "gate": {"use_temperature": False},  # the outer gate alone, no free energy
    "slim": {"gate_rank": 4},  # nearly the original's parameters
    "fem": {},
}


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """A model, its training, and the further training of all arms. The defaults take a laptop some minutes."""

    text: Path | None = option(None, "UTF-8 text file; default: Python's sources and help topics.", called="text_file")
    architecture: str = option("gpt2", "gpt2, or llama with grouped heads.", also=("host",))
    arms: str = option(
        ",".join(ARMS),
        "original: the model as it is; its copies: gate (the outer gate alone), slim (gates of rank 4), fem.",
    )
    layers: int = option(3, "Blocks of the original.")
    width: int = option(96, "Width of the original.")
    heads: int = option(4, "Heads of the original; llama has half as many key-value heads.")
    vocabulary: int = option(1024, "Entries of the byte-pair tokenizer.")
    context: int = option(64, "Tokens per sequence.")
    batch: int = option(16, "Sequences per step.", called="batch_size")
    steps: int = option(600, "Steps that train the original.")
    further_steps: int = option(300, "Steps of each arm's further training.")
    learning_rate: float = option(2e-3, "Peak learning rate of AdamW for the original.")
    further_learning_rate: float = option(1e-3, "Peak learning rate of AdamW in the further training.")
    awakening: float = option(30.0, "Factor on the learning rate of lambda and beta, since lambda starts at 5e-5.")
    runs: int = option(3, "Orders of the data; all arms are trained in each.", called="seeds")
    seed: int = option(0, "Seed of the weights and of the first order of the data.")

    def __post_init__(self):
        require_one_of("architecture", self.architecture, ARCHITECTURES)
        if not {"original"} <= set(self.arm_names) <= ARMS.keys():
            raise ValueError(f"arms must be original and some of {', '.join(ARMS)}, got {self.arms!r}.")
        require_positive(self, "layers", "width", "heads", "context", "batch", "steps", "further_steps", "runs")

    @property
    def arm_names(self) -> list[str]:
        return listed(self.arms)
