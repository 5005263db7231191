"""What `fem finetune` compares, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fem.runs.recipes import listed, require_not_negative, require_one_of, require_positive
from fem.runs.run import option

ARCHITECTURES = {"gpt2": "GPT-2", "llama": "Llama"}
ATTENTION = "attention"
FIELDS: dict[str, dict | None] = {
    ATTENTION: None,  # the original as it is
    "attention+G": {"use_temperature": False},  # the outer gate alone, no free energy
    "attention+LTG/r4": {"gate_rank": 4},  # nearly the original's parameters
    "attention+LTG": {},
}
EARLIER = dict(zip(("original", "gate", "slim", "fem"), FIELDS))  # names of version 0.1


@dataclass(frozen=True, kw_only=True)
class FinetuneRecipe:
    """A model, its training, and further training of it with every mixer. The defaults take a laptop some minutes."""

    text: Path | None = option(None, "UTF-8 text file; default: Python's sources and help topics.", called="text_file")
    architecture: str = option("gpt2", "gpt2, or llama with grouped heads.")
    mixers: str = option(
        ",".join(FIELDS),
        "attention: the model as it is; its copies: +G (the outer gate alone), +LTG/r4 (gates of rank 4), "
        "+LTG (full gates).",
    )
    layers: int = option(3, "Blocks of the original.")
    width: int = option(96, "Width of the original.")
    heads: int = option(4, "Heads of the original; llama has half as many key-value heads.")
    vocabulary: int = option(1024, "Entries of the byte-pair tokenizer.")
    context: int = option(64, "Tokens per sequence.")
    batch: int = option(16, "Sequences per step.", called="batch_size")
    steps: int = option(600, "Steps that train the original.")
    further_steps: int = option(300, "Steps of further training with each mixer.")
    learning_rate: float = option(2e-3, "Peak learning rate of AdamW for the original.")
    further_learning_rate: float = option(1e-3, "Peak learning rate of AdamW in the further training.")
    awakening: float = option(30.0, "Factor on the learning rate of lambda and beta, since lambda starts at 5e-5.")
    runs: int = option(3, "Orders of the data; all mixers are trained in each.", called="seeds")
    seed: int = option(0, "Seed of the weights and of the first order of the data.")

    def __post_init__(self):
        require_one_of("architecture", self.architecture, ARCHITECTURES)
        if not {ATTENTION} <= set(self.mixer_names) <= FIELDS.keys():
            raise ValueError(f"mixers must be {ATTENTION} and some of {', '.join(FIELDS)}, got {self.mixers!r}.")
        require_positive(self, "layers", "width", "heads", "context", "batch", "steps", "further_steps", "runs")
        require_positive(self, "vocabulary", "learning_rate", "further_learning_rate", "awakening")
        require_not_negative(self, "seed")
        if self.architecture == "llama" and self.heads % 2:
            raise ValueError(f"heads must be even for llama, got {self.heads}.")
        name, share = ("width / 2", self.width / 2) if self.architecture == "llama" else ("width", self.width)
        if share % self.heads:  # llama's heads are rotated, so that their widths are even
            raise ValueError(f"heads must divide {name} = {share:g}, got {self.heads}.")

    @property
    def mixer_names(self) -> list[str]:
        return [EARLIER.get(name, name) for name in listed(self.mixers)]
