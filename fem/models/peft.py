"""The parameters of a FEM model that peft is to train."""

LORA = {"target_modules": ["query", "key", "value", "output"], "modules_to_save": ["beta", "inner"]}
"""LoraConfig(**LORA): low-rank updates of the projections; beta and lambda, which are small and which attention lacks,
are trained whole. Priors without queries have no "query" and "key". After `replace_attention`: the original's targets
and the same modules_to_save.
"""
