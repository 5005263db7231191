"""What `fem demo` runs, as a recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fem.recipes import option, require_not_negative, require_positive
from fem.train.recipe import require_predictions

if TYPE_CHECKING:
    from fem_research.lm.small import LanguageRecipe

LEAST_CONTEXT = 24


@dataclass(frozen=True, kw_only=True)
class DemoRecipe:
    """The demo's sizes. The defaults take under eight minutes on two cores."""

    text: Path | None = option(
        None, "Your own UTF-8 text, instead of the help topics of this Python.", called="text_file"
    )
    seeds: int = option(1, "How many seeds the language models are trained with.")
    seed: int = option(0, "First seed.")
    argmax_steps: int = option(4_000, "Most training steps of each argmax reader.")
    steps: int = option(500, "Training steps of each language model.")
    layers: int = option(4, "Blocks of a language model.")
    width: int = option(128, "Width of a language model.")
    heads: int = option(4, "Heads of a language model.")
    mlp_width: int = option(352, "Width of softmax attention's SwiGLU.")
    vocabulary: int = option(2048, "Entries of the byte-pair tokenizer.")
    context: int = option(128, "Tokens per sequence.")
    batch_size: int = option(16, "Sequences per step.")
    threads: int = option(1, "CPU threads; more of them are faster on an idle machine, and slower on a busy one.")

    def __post_init__(self):
        require_positive(self, *(name for name in asdict(self) if name not in ("text", "seed")))
        require_predictions(self)
        require_not_negative(self, "seed")
        if self.context < LEAST_CONTEXT:
            raise ValueError(f"context must be at least {LEAST_CONTEXT} tokens for the picture, got {self.context}.")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width = {self.width}, got {self.heads}.")

    def language(self) -> LanguageRecipe:
        """The settings that both language models share."""
        from fem_research.lm.small import LanguageRecipe

        excluded = ("text", "seeds", "argmax_steps", "threads", "batch_size")
        shared = {name: value for name, value in asdict(self).items() if name not in excluded}
        return LanguageRecipe(**shared, batch=self.batch_size)

    def documents(self) -> list[str]:
        from fem_research.lm.text import help_topics, read_text

        if self.text is None and not help_topics():
            raise ValueError("text must be given: this Python comes without its help topics.")
        return ["\n\n\n".join(help_topics()) if self.text is None else read_text(self.text)]
