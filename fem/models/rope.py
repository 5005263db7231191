"""Scaled rotary angles of a language model: transformers' own frequencies, handed to the mixers."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fem.config import FreeEnergyMixerConfig
from fem.prior_table import PRIORS, ROTARY

BY_LENGTH = ("dynamic", "longrope")  # whose angles depend on a length: here on the longest row's


def read_rope(config: PreTrainedConfig, given: dict | None, rope_theta: float | None) -> None:
    """Sets config.rope_parameters, where any are given, in the words of transformers 5, from older ones too.

    Raises ValueError on a kind of scaling that is unknown.
    """
    if not given and rope_theta is None:
        return
    rope = {"rope_theta": rope_theta or config.mixer.get("rope_theta", 10000.0), **(given or {})}
    rope["rope_type"] = kind = rope.pop("type", None) or rope.get("rope_type", "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(ROPE_INIT_FUNCTIONS)
        raise ValueError(f"rope_parameters must have a rope_type of default, {known}; got {kind!r}.")
    if config.mixer.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        raise ValueError(
            f"rope_theta is given twice, rope_parameters={rope['rope_theta']} and mixer={config.mixer['rope_theta']}; "
            "leave it out of mixer."
        )
    config.mixer["rope_theta"] = rope["rope_theta"]
    config.rope_parameters = rope


def scaled(config: PreTrainedConfig, mixer: FreeEnergyMixerConfig) -> FreeEnergyMixerConfig:
    """The mixer with the angles of config.rope_parameters, as a Llama of its key width would turn by.

    A Llama's angles under "dynamic" and "longrope" change with the length of the row. These are the ones that it has in
    its longest row, config.max_position_embeddings, whatever the row: then a cached key stays right.
    Raises ValueError on parameters that transformers refuses, on those that turn only a part of a head, and where
    angles by length meet rows without a limit.
    """
    rope = getattr(config, "rope_parameters", None)
    turns = mixer.use_rope and ROTARY[0] in PRIORS[mixer.prior_type].uses
    if not rope or rope["rope_type"] == "default" or not turns:
        return mixer
    kind, longest = rope["rope_type"], config.max_position_embeddings
    if longest is None and kind in BY_LENGTH:
        raise ValueError(f"rope_type={kind!r} needs max_position_embeddings, the longest row, got None.")
    planes = mixer.key_width // 2
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(rope.get(name) or ()) != planes:
            got = rope.get(name)
            raise ValueError(f"{name} needs one number for each of the {planes} planes of a head, got {got}.")
    trained = rope.get("original_max_position_embeddings") or longest or 4096
    longest = longest or trained
    try:
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=mixer.key_width,
            max_position_embeddings=trained if kind == "dynamic" else longest,
            rope_parameters={**rope, "rope_theta": mixer.rope_theta},
        )
        with torch.device("cpu"):  # whatever device a model is being built on
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, "cpu", seq_len=longest)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"rope_parameters cannot be read by transformers, got {rope!r}: {error}") from error
    return replace(mixer, rope_frequencies=tuple(frequencies.tolist()), rope_factor=float(factor))
