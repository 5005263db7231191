"""The models that an engine can serve, by its attention or by slots for states."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fem.config import FreeEnergyMixerConfig
from fem.prior_table import PRIORS
from fem.priors.softmax import SoftmaxPrior

FULL, SLIDING = "full_attention", "sliding_attention"
EXACTLY = "leave out attn_implementation, and generate() streams the model in its exact form, with a state of its own."


def obstacle(config: PreTrainedConfig) -> str | None:
    """Why no attention of transformers can read such a model, in one sentence; None: it can."""
    mixers = config.mixer_configs()
    for layer, mixer in enumerate(mixers):
        if not attends(mixer):
            prior = f"the {mixer.prior_type!r} prior, which is not an attention over keys and values"
            return f"layer {layer} has {prior}; {EXACTLY}"
        if mixer.window == 1:
            return f"layer {layer} has a window of 1, for which transformers' caches keep all tokens; {EXACTLY}"
        if mixer.use_conv and mixer.window is not None:
            return (
                f"layer {layer} has a window and the conditioner, and a cache that forgets tokens has no place for its "
                f"state; {EXACTLY}"
            )
    if {mixer.kv_heads for mixer in mixers} != {config.num_key_value_heads}:
        return "its layers have several numbers of key heads, and an engine's cache has num_key_value_heads of them."
    windows = {mixer.window for mixer in mixers} - {None}
    if len(windows) > 1:
        return f"its layers have windows of {' and '.join(map(str, sorted(windows)))} tokens, and an engine knows one."
    return None


def obstacle_to_pages(config: PreTrainedConfig) -> str | None:
    """Why no engine that keeps pages of keys and values, and nothing else, can serve such a model; None: one can."""
    if (reason := obstacle(config)) is not None:
        return reason
    for layer, mixer in enumerate(config.mixer_configs()):
        if mixer.use_conv:
            return (
                f"layer {layer} has the conditioner (use_conv=True), whose state an engine's pages do not hold; "
                'generate() keeps it, with attn_implementation="sdpa" or in the exact form.'
            )
    return None


def obstacle_to_states(config: PreTrainedConfig) -> str | None:
    """Why no engine can serve such a model by slots for states, each as large as the next, beside an attention's cache
    for softmax layers; None: it can."""
    mixers = config.mixer_configs()
    states = [mixer for mixer in mixers if has_state(mixer)]
    if not states:
        return "no layer has a state of fixed size."
    for layer, mixer in enumerate(mixers):
        if not attends(mixer) and keeps_tokens(mixer):
            return f"layer {layer} keeps keys and values, and its prior {mixer.prior_type!r} reads them in its own way."
        if attends(mixer) and mixer.kv_heads != config.num_key_value_heads:
            return f"layer {layer} has {mixer.kv_heads} key heads, but a cache has {config.num_key_value_heads}."
        if has_state(mixer) and mixer != states[0]:
            return f"layer {layer} has another state than the layers before, and all slots have one size."
    return None


def check_cache_dtype(config: PreTrainedConfig, dtype: str) -> None:
    """Raise ValueError where vLLM's cache has another range of numbers than [v | e] of its attention layers needs."""
    if dtype not in ("auto", "bfloat16") and any(attends(mixer) and mixer.use_lse for mixer in config.mixer_configs()):
        raise ValueError(
            "kv_cache_dtype must be 'auto' or 'bfloat16' for layers with a free energy, whose cache holds exponentials "
            f"of values, got {dtype!r}."
        )


def keeps_tokens(mixer: FreeEnergyMixerConfig) -> bool:
    """Whether the layer keeps keys and values, so that its state grows."""
    return issubclass(PRIORS[mixer.prior_type], SoftmaxPrior)


def attends(mixer: FreeEnergyMixerConfig) -> bool:
    """Whether the layer is softmax attention over keys and values that it keeps, by whatever queries and keys."""
    return keeps_tokens(mixer) and not PRIORS[mixer.prior_type].reads_otherwise()


def has_state(mixer: FreeEnergyMixerConfig) -> bool:
    """Whether the layer keeps a state of fixed size: that of its prior, or of its conditioner."""
    return mixer.use_conv or not attends(mixer)


def layer_type(mixer: FreeEnergyMixerConfig) -> str:
    """The name that transformers and vLLM have for a layer with a window, and without."""
    return FULL if mixer.window is None else SLIDING
