"""What peft trains of a FEM model unless it is told: low-rank changes of what attention has, too."""

from __future__ import annotations

import sys

TARGETS = ["query", "key", "value", "output"]  # those of them that a prior has

LORA = {"target_modules": TARGETS, "modules_to_save": ["beta", "inner"]}
"""LoraConfig(**LORA): low-rank changes of the projections, and beta and lambda trained whole: they are small, and are
what a free energy has beyond attention. After `replace_attention`: the original's targets and the same modules_to_save.
"""


def teach_peft() -> None:
    """Tell peft, where it is imported, the `TARGETS` of a FEM model, as its table tells those of other models."""
    table = getattr(sys.modules.get("peft.utils.constants"), "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", {})
    table.setdefault("fem", TARGETS)
