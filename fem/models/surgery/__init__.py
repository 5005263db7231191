"""The Free Energy Mixer inside a model that you already have."""
