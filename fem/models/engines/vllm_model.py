"""The language model inside vLLM: its Transformers backend, which here splits beta by heads as well."""

from __future__ import annotations

from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.utils import set_weight_attrs

from fem.gates import Temperature
from fem.models.engines.obstacles import check_cache_dtype, obstacle_to_pages, obstacle_to_states
from fem.models.engines.parallel import check_heads


class FEMForCausalLM(TransformersForCausalLM):
    def __init__(self, *, vllm_config, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        reason = obstacle_to_pages(config)
        if reason is not None and obstacle_to_states(config) is None:
            raise ValueError(
                f"{reason.partition(';')[0]}; serve this model with "
                """--hf-overrides '{"architectures": ["FEMStatesForCausalLM"]}', by slots for states."""
            )
        check_cache_dtype(config, vllm_config.cache_config.cache_dtype)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        ranks = get_tensor_model_parallel_world_size()
        check_heads(self.config, ranks)
        super().recursive_replace()
        for module in self.model.modules():
            if isinstance(module, Temperature):
                theta = module.theta  # heads first
                local = theta.new_empty(len(theta) // ranks, *theta.shape[1:], device=self.device_config.device)
                module.theta = nn.Parameter(local, requires_grad=False)
                set_weight_attrs(module.theta, {"weight_loader": sharded_weight_loader(0)})
