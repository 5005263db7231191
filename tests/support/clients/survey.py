"""Every model type of transformers, made small and turned into FEM: does it compute the same, or is it refused?"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from fem.models import replace_attention

WIDTH, LAYERS, HEADS, KEY_HEADS, VOCABULARY, TIME, SIDE = 32, 2, 4, 2, 99, 7, 32
LARGEST = 30_000_000  # parameters that a model made small may still have
SMALL = (
    (WIDTH, "hidden_size d_model n_embd dim embed_dim encoder_hidden_size decoder_hidden_size projection_dim emb_dim"),
    (
        WIDTH,
        "embedding_size word_embed_proj_dim hidden_dim output_hidden_size encoder_dim decoder_dim width "
        "projection_size mamba_d_ssm",
    ),
    (LAYERS, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers"),
    (LAYERS, "num_decoder_layers depth"),
    (KEY_HEADS, "num_key_value_heads num_experts_per_tok linear_num_key_heads n_groups"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads nhead"),
    (HEADS, "num_local_experts num_experts n_routed_experts mamba_n_heads mamba_num_heads linear_num_value_heads"),
    (2 * WIDTH, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dim_feedforward d_ff mlp_dim"),
    (2 * WIDTH, "moe_intermediate_size max_position_embeddings n_positions max_source_positions max_target_positions"),
    (
        WIDTH // HEADS,
        "head_dim d_kv patch_size attention_head_dim rotary_dim qk_nope_head_dim qk_rope_head_dim shape_size",
    ),
    (WIDTH // HEADS, "v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state index_head_dim"),
    (2 * WIDTH // HEADS, "mamba_d_head mamba_head_dim q_lora_rank kv_lora_rank"),
    (WIDTH // 8, "coordinate_size"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (SIDE, "image_size"),
)
SIZES = {name: size for size, names in SMALL for name in names.split()}
ALL_LAYERS = {name: size for name, size in SIZES.items() if not any(name in names for size, names in SMALL[2:4])}
EQUAL_HEADS = SIZES | {"num_key_value_heads": HEADS}
# Where a config says None, too.
FILLED = EQUAL_HEADS | {"prediction_length": TIME, "image_size": 2 * SIDE, "window_size": 2}
ATTEMPTS = (SIZES, ALL_LAYERS, EQUAL_HEADS, FILLED)  # a hybrid shows all its kinds in all its layers
WAYS = ("", "text alone", "frames first", "video")
DERIVED = {  # fields that a config derives from its sizes
    *("layer_types", "per_layer_config", "mlp_layer_types", "stage_names", "out_features", "out_indices"),
    *("transformers_version", "architectures", "model_type"),
}
LAMBDA = -20.0  # lambda = 2e-9, so that the outputs differ by rounding only
ERROR = 1e-4  # largest error of an output that counts as right, as a part of its spread


@dataclass(frozen=True)
class Finding:
    """The result for a model type: "right", "refused", "wrong", "crashed", "not run" or "not built"."""

    model_type: str
    result: str
    reason: str = ""


def survey(model_type: str) -> Finding:
    """Build the model type small, run it, replace its attention, and run it again on the same input.

    First it is built on the meta device, which shows whether its attention can be replaced at all. Then small models
    and inputs are tried until what was replaced shows in an output, by its rounding at least.
    """
    known = on_meta(model_type)
    if known.result == "refused":
        return known
    failures, refusals = [], []
    for model, inputs in _ways(model_type, failures):
        try:
            with torch.no_grad():
                expected, again = outputs(model, inputs), outputs(model, inputs)
            if not expected or not all(map(torch.equal, expected, again)):
                raise ValueError("its output is empty or random")
        except Exception as error:
            failures.append(said(error))
            continue
        try:
            replaced = replace_attention(copy.deepcopy(model), lambda_init=LAMBDA)
            with torch.no_grad():
                found = outputs(replaced, inputs)
        except ValueError as error:
            refusals.append(said(error))
            continue
        except Exception as error:
            return Finding(model_type, "crashed", said(error))
        worst = max(difference(a, b) for a, b in zip(found, expected, strict=True))
        if worst > 0:
            return Finding(model_type, "right" if worst < ERROR else "wrong", f"error {worst:.1e} of the spread")
        failures.append("ValueError: what was replaced reaches no output")
    if refusals:
        return Finding(model_type, "refused", refusals[0])
    reasons = [*(text for text in failures if "validat" not in text), *failures, known.reason]
    return Finding(model_type, known.result, reasons[0])


def model_types() -> list[str]:
    """The model types that AutoModel builds."""
    return sorted(set(CONFIG_MAPPING) & set(MODEL_MAPPING_NAMES))


def _ways(model_type: str, failures: list[str]) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Small models of the type, and inputs that it may take; what could not be built is said in `failures`."""
    for sizes in ATTEMPTS:
        try:
            model = build(model_type, sizes)
            ways = [example(model, how) for how in WAYS]
        except Exception as error:
            failures.append(said(error))
            continue
        kinds = [{name: x.shape for name, x in inputs.items()} for inputs in ways]
        yield from ((model, inputs) for n, inputs in enumerate(ways) if kinds.index(kinds[n]) == n)


def on_meta(model_type: str) -> Finding:
    """Whether its attention is refused, tried on the meta device: "refused", else "not run"; or "not built"."""
    failures = []
    for sizes in (ALL_LAYERS, None, SIZES):
        try:
            fields = {} if sizes is None else shrink(CONFIG_MAPPING[model_type]().to_dict(), sizes)
            with torch.device("meta"):
                model = AutoModel.from_config(CONFIG_MAPPING[model_type](**fields))
        except Exception as error:
            failures.append(said(error))
            continue
        try:
            with torch.device("meta"):
                replace_attention(model)
        except ValueError as error:
            return Finding(model_type, "refused", said(error))
        except Exception as error:  # it may work on real tensors
            return Finding(model_type, "not run", said(error))
        return Finding(model_type, "not run")
    return Finding(model_type, "not built", failures[0])


def build(model_type: str, sizes: dict[str, int] = SIZES) -> nn.Module:
    small = CONFIG_MAPPING[model_type](**shrink(CONFIG_MAPPING[model_type]().to_dict(), sizes))
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in AutoModel.from_config(small).parameters())
    if weights > LARGEST:
        raise MemoryError(f"{weights:,} parameters although made small")
    torch.manual_seed(0)
    model = AutoModel.from_config(small).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def shrink(fields: dict, sizes: dict[str, int]) -> dict:
    """The fields of a config with small sizes, in its parts as well; layer lists are left to the config."""
    kept = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            kept[name] = shrink(value, sizes) | {"model_type": value["model_type"]}
        elif isinstance(value, dict) and "rope_type" in value:
            kept[name] = value | {"mrope_section": _sections(value, fields, sizes)}
        elif name.startswith("vocab_size") or (
            name in sizes and isinstance(value, int) and not isinstance(value, bool)
        ):
            kept[name] = min(sizes[name], value or sizes[name])
        elif value is None and sizes is FILLED and name in sizes:
            kept[name] = sizes[name]
        elif name in sizes and name.startswith("num") and isinstance(value, list):  # one for each stage
            kept[name] = [sizes[name]] * len(value)
        elif name.endswith("token_id") or name == "padding_idx":
            kept[name] = min(value, 2) if isinstance(value, int) else 0 if name == "pad_token_id" else value
        elif name not in DERIVED:
            kept[name] = value
    return kept


def _sections(rope: dict, fields: dict, sizes: dict[str, int]) -> list[int]:
    """How many rotated pairs of a small head encode time, height and width."""
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor")) or 1.0
    pairs, parts = int(sizes["head_dim"] * share) // 2, len(rope.get("mrope_section", "thw"))
    return [pairs // parts + (part < pairs % parts) for part in range(parts)]


def example(model: nn.Module, how: str = "") -> dict[str, Tensor]:
    """Inputs for the arguments of the model's forward that this survey knows.

    how: "text alone", without pictures; "frames first", audio features as (B, time, frequencies); "video", pictures as
    (B, frames, colours, height, width) and sound as (B, 1, time).
    """
    torch.manual_seed(1)
    names = inspect.signature(model.forward).parameters
    size = lambda name, default: _size(model.config, name, default)  # noqa: E731
    ids = torch.randint(3, VOCABULARY, (2, TIME))
    side, patch, colours = size("image_size", SIDE), size("patch_size", 8), size("num_channels", 3)
    mels, frames = size("num_mel_bins", size("feature_projection_input_dim", 80)), 2 * size("max_source_positions", 32)
    film = torch.randn(2, size("num_frames", size("frames_per_clip", 4)), colours, side, side)
    patches, past = (side // patch) ** 2, size("context_length", 32)
    sound = {"frames first": (2, size("max_length", frames), mels), "video": (2, 1, 4000)}.get(how, (2, 4000))
    offers = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "qformer_input_ids": ids,
        "bbox": torch.zeros(2, TIME, 4, dtype=torch.long),
        "pixel_values": film if how == "video" else film[:, 0],
        "pixel_values_videos": film,
        "noise": torch.rand(2, patches),
        "input_values": torch.randn(sound),
        "input_features": torch.randn(2, *((frames, mels) if how == "frames first" else (mels, frames))),
        "past_values": torch.randn(2, past, size("num_input_channels", 1)),
    }
    if "spatial_shapes" in names:  # rows of patches
        offers["pixel_values"] = torch.randn(2, patches, colours * patch**2)
        offers["pixel_attention_mask"] = torch.ones(2, patches, dtype=torch.long)
        offers["spatial_shapes"] = torch.tensor([[side // patch, side // patch]] * 2)
    if "past_time_features" in names:  # a series, its lags and what is known of every step
        past, ahead, known = past + max(model.config.lags_sequence), TIME, size("num_time_features", 0)
        offers["past_values"], offers["future_values"] = torch.randn(2, past), torch.randn(2, ahead)
        offers["past_observed_mask"] = torch.ones(2, past)
        offers["past_time_features"] = torch.randn(2, past, known)
        offers["future_time_features"] = torch.randn(2, ahead, known)
    if "grid_thw" in names:  # pictures as rows of patches: one of 4 x 4
        depth = size("in_channels", 3) * size("temporal_patch_size", 2)
        offers["hidden_states"] = torch.randn(16, depth * patch**2)
        offers["grid_thw"] = torch.tensor([[1, 4, 4]])
    unwanted = {"input_values", "input_features"} - {model.main_input_name}
    if "input_ids" in names and how == "text alone":
        unwanted |= {"pixel_values", "pixel_values_videos"}
    return {name: value for name, value in offers.items() if name in names and name not in unwanted}


def _size(config: PreTrainedConfig, name: str, default: int) -> int:
    for part in (config, *(getattr(config, key, None) for key in ("vision_config", "audio_config", "encoder"))):
        value = getattr(part, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int):
            return value
    return default


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """All floating tensors that a call returns, in order."""
    uncached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    found = tree_leaves(model(**inputs, **uncached, return_dict=True))
    return [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest error, as a part of the spread of what is expected."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    spread = (expected[finite].max() - expected[finite].min()).clamp_min(1e-3) if finite.any() else 1.0
    return float((found - expected)[finite].abs().max() / spread) if finite.any() else 0.0


def said(error: Exception) -> str:
    """The error in one line, without terminal colours and paths of this machine."""
    line = re.sub(r"\x1b\[\d+m|/\S*/(?=site-packages)", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {line}"[:300]
