"""vLLM's side of the entry point `vllm.general_plugins`: each of its processes calls `register`."""

from __future__ import annotations


def register() -> None:
    """Have vLLM serve FEM's checkpoints with its Transformers modelling backend, over its own paged attention, and
    those of scan priors, as FEMStatesForCausalLM, over its slots for states."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig

    import fem.models  # noqa: F401  (the Auto classes)

    ModelRegistry.register_model("FEMForCausalLM", "fem.models.engines.vllm_model:FEMForCausalLM")
    states = "FEMStatesForCausalLM"
    ModelRegistry.register_model(states, f"fem.models.engines.vllm_states:{states}")
    MODELS_CONFIG_MAP[states] = MambaModelConfig
