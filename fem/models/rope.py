"""Scaled rotary angles of a language model: transformers' own frequencies, handed to the mixers."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fem.config import FreeEnergyMixerConfig
from fem.prior_table import PRIORS, ROTARY

KINDS = ("linear", "yarn", "llama3", "proportional")  # not those whose angles change with the length of a row


def rope_of(config: PreTrainedConfig) -> dict | None:
    """The rope_parameters of a config, where it has any."""
    return getattr(config, "rope_parameters", None)


def read_rope(config: PreTrainedConfig, given: dict | None) -> None:
    """Sets config.rope_parameters, in the words of transformers, where some are given.

    Raises ValueError on a kind of scaling that is unknown, on a rope_theta that differs from the mixers', and on what
    nothing reads.
    """
    if not given:
        return
    theta = config.mixer.get("rope_theta")
    rope = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta, **given}
    if rope["rope_type"] not in ("default", *KINDS):
        raise ValueError(
            f"rope_parameters must have a rope_type of default, {', '.join(KINDS)}; got {rope['rope_type']!r}."
        )
    if rope["rope_type"] == "default" and (unread := rope.keys() - {"rope_type", "rope_theta"}):
        raise ValueError(
            f"rope_parameters of rope_type default hold a rope_theta, got {min(unread)} = {rope[min(unread)]!r}, which "
            "it does not read; leave it out, or name a rope_type that does."
        )
    if theta not in (None, rope["rope_theta"]):
        raise ValueError(
            f"rope_theta is given twice, rope_parameters={rope['rope_theta']} and mixer={theta}; leave it out of mixer."
        )
    config.rope_parameters = rope


def check_turns(config: PreTrainedConfig, mixers: list[FreeEnergyMixerConfig]) -> None:
    """Raise ValueError on scaled angles where no layer turns its queries and keys."""
    rope = rope_of(config)
    if rope and rope["rope_type"] != "default" and all(mixer.rope_frequencies is None for mixer in mixers):
        raise ValueError(
            f"rope_parameters needs a layer with rotary positions, use_rope=True and a prior that has them; got "
            f"{rope!r} without one."
        )


def scaled(config: PreTrainedConfig, mixer: FreeEnergyMixerConfig) -> FreeEnergyMixerConfig:
    """The mixer with the angles of config.rope_parameters, as a Llama of its key width would turn by.

    Raises ValueError on parameters that transformers refuses, and on those that turn only a part of a head.
    """
    rope = rope_of(config)
    turns = mixer.use_rope and ROTARY[0] in PRIORS[mixer.prior_type].uses
    if not rope or rope["rope_type"] == "default" or not turns:
        return mixer
    try:
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=mixer.key_width,
            max_position_embeddings=config.max_position_embeddings or 4096,
            rope_parameters={**rope, "rope_theta": mixer.rope_theta},
        )
        with torch.device("cpu"):  # whatever device a model is being built on
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama, "cpu")
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"rope_parameters cannot be read by transformers, got {rope!r}: {error}") from error
    return replace(mixer, rope_frequencies=tuple(frequencies.tolist()), rope_factor=float(factor))
