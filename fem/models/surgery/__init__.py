"""The Free Energy Mixer inside a model that you already have."""

from fem.models.surgery.replace import replace_attention

__all__ = ["replace_attention"]
