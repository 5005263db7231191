"""vLLM's side of the entry point `vllm.general_plugins`: each of its processes calls `register`."""

from __future__ import annotations


def register() -> None:
    """Have vLLM serve FEM's checkpoints with its Transformers modelling backend, over its own paged attention, and
    those with scan priors, as FEMStatesForCausalLM, with its slots for states."""
    from vllm import ModelRegistry

    import fem.models  # noqa: F401  (the Auto classes)

    ModelRegistry.register_model("FEMForCausalLM", "fem.models.engines.vllm_model:FEMForCausalLM")
    states = "FEMStatesForCausalLM"
    ModelRegistry.register_model(states, f"fem.models.engines.vllm_states:{states}")
