"""What the card's language models are: sizes, data, training, and the rows in their order."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fem.recipes import option, require_not_negative, require_positive
from fem_research.common.mixers import canonical

# gates of rank 768 / 16
ROWS = ("attention", "attention+CG/r48", "FEM/r48", "FEM", "attention/conv", "attention+LTG/r48/s.5", "GLA", "FEM-GLA")


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """One training of a language model. The defaults are GPT-2 small's sizes: 98M parameters."""

    mixer: str = option("softmax", "Mixer, by the names of `fem_research.common.mixers`.")
    tokens: int = option(100_000_000, "Tokens to train on; a step is never cut.")
    rate: float = option(1e-3, "Peak learning rate of AdamW.")
    seed: int = option(0, "Seed of the weights and of the order of the rows.")
    width: int = option(768, "Width of the model.")
    layers: int = option(12, "Blocks of the model.")
    heads: int = option(12, "Heads of every mixer.")
    mlp_width: int = option(2048, "Width of attention's SwiGLU; mixers with more parameters get narrower ones.")
    context: int = option(1024, "Tokens of a row.")
    batch: int = option(64, "Rows of a step.")
    micro: int = option(64, "Rows of a forward pass.")
    warmup: float = option(0.05, "Share of the steps in which the rate rises.")
    weight_decay: float = option(0.1, "Weight decay of the weights; beta, norms and biases have none.")
    bf16: bool = option(True, "Matrix products in bfloat16; weights and moments stay float32.")
    compile: bool = option(True, "torch.compile each block.")
    validations: int = option(10, "Held-out losses on the way, evenly spaced.")
    quick_rows: int = option(128, "Held-out rows, evenly spaced, of a loss on the way; the last one reads all.")

    def __post_init__(self):
        require_positive(self, "tokens", "rate", "width", "layers", "heads", "mlp_width", "context", "batch", "micro")
        require_positive(self, "quick_rows")
        require_not_negative(self, "seed", "warmup", "weight_decay", "validations")
        object.__setattr__(self, "mixer", canonical(self.mixer))
        if self.batch % self.micro:
            raise ValueError(f"batch must be a multiple of micro = {self.micro}, got {self.batch}.")
        if self.steps < 1:
            raise ValueError(f"tokens must be at least a step's {self.step_tokens:,}, got {self.tokens:,}.")

    @property
    def step_tokens(self) -> int:
        return self.batch * self.context

    @property
    def steps(self) -> int:
        return self.tokens // self.step_tokens

    @property
    def key(self) -> str:
        """The name of its files."""
        name = re.sub(r"[^\w.]", "_", self.mixer)
        return f"{name}-w{self.width}-{self.tokens / 1e6:g}M-lr{self.rate:g}-seed{self.seed}"
