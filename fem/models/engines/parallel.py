"""The tensor-parallel plan of transformers and vLLM, which splits a model by heads over several devices."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fem.config import FreeEnergyMixerConfig
from fem.priors import OURS, PRIORS


def tensor_plan(config: PreTrainedConfig) -> dict[str, str]:
    """base_model_tp_plan: projections to heads are split by columns, the output by rows; the conditioner is not split.

    Where some layer's heads share what is learnt (an SSM's B and C, one decay for all heads) the mixers stay whole on
    every device, and only the SwiGLUs are split.
    """
    plan = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    mixers = config.mixer_configs()
    priors = [PRIORS[mixer.prior_type] for mixer in mixers]
    by_heads = all(prior in OURS and prior.map_names for prior in priors)  # of the library's, an SSM alone has others
    if by_heads and all(mixer.decay != "scalar" for mixer in mixers):
        for mixer, prior in zip(mixers, priors):
            columns = ["value", *(f"prior.{name}" for name in prior.map_names), *["value_scale"] * mixer.use_conv]
            own = dict.fromkeys(columns, "colwise") | {"output": "rowwise"} | of_heads(mixer)
            plan |= {f"mixer.{name}": style for name, style in own.items()}
    return {f"layers.*.{name}": style for name, style in plan.items()}


def check_heads(config: PreTrainedConfig, processes: int) -> None:
    """Raises ValueError where the heads of layers that the plan splits cannot be dealt to this many processes."""
    if not any(name.startswith("layers.*.mixer.") for name in config.base_model_tp_plan):
        return
    for mixer in config.mixer_configs():
        if mixer.n_head % processes or mixer.kv_heads % processes:
            raise ValueError(
                "num_attention_heads and num_key_value_heads must be multiples of the processes that share a layer, "
                f"{processes} (tensor parallel), got {mixer.n_head} and {mixer.kv_heads}."
            )


def of_heads(mixer: FreeEnergyMixerConfig) -> dict[str, str]:
    """What beta and the gates, which a replaced attention has too, need."""
    up = ".up" if mixer.gate_rank else ""  # of a slim gate the first map is shared by the heads
    columns = [f"gate.inner{up}"] * mixer.learns_lambda + [f"gate.outer{up}"] * mixer.use_outer_gate
    beta = {"beta": "local_params", "beta.theta": "colwise"} if mixer.use_temperature else {}
    return dict.fromkeys(columns, "colwise") | beta
