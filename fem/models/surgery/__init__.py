"""The Free Energy Mixer inside a model that you already have."""

from fem.models.surgery.replace import load_replaced, replace_attention

__all__ = ["load_replaced", "replace_attention"]
