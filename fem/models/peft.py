"""The parameters of a FEM model that peft trains by default: low-rank updates of the projections, as in attention."""

from __future__ import annotations

import sys

TARGETS = ["query", "key", "value", "output"]  # priors without queries have only the last two

LORA = {"target_modules": TARGETS, "modules_to_save": ["beta", "inner"]}
"""LoraConfig(**LORA): low-rank updates of the projections; beta and lambda, which are small and which attention lacks,
are trained whole. After `replace_attention`: the original's targets and the same modules_to_save.
"""


def teach_peft() -> None:
    """Tell peft, where it is imported, the `TARGETS` of a FEM model, as its table tells those of other models."""
    table = getattr(sys.modules.get("peft.utils.constants"), "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", {})
    table.setdefault("fem", TARGETS)
