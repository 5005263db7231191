"""Self-attention of transformers' models: whatever reads through transformers' attention functions."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterable
from dataclasses import fields
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache

from fem.functional import softmax_read
from fem.mixer import FreeEnergyMixer
from fem.models.engines.attention import refuse_split_rows
from fem.models.surgery.fresh import MixerAttention
from fem.models.surgery.head import FreeEnergyHead
from fem.models.surgery.masks import check_mask
from fem.models.surgery.site import CrossAttention, Refused, Site
from fem.ops.softmax.support import as_bias

FREE_ENERGY = "free_energy"
QUERIES = (  # the projections that make queries, keys and values: three maps, two, or one
    *("q_proj k_proj v_proj", "query key value", "q_lin k_lin v_lin", "c_attn", "query_key_value"),
    *("qkv_proj", "Wqkv", "qkv", "in_proj", "q k v", "linear_q linear_k linear_v", "kv_a_proj_with_mqa kv_b_proj"),
    "q_proj",  # over the keys and values of an earlier layer
)
SWAPPED = ({"q_proj", "k_proj", "v_proj"}, {"query", "key", "value"}, {"c_attn"})  # a mixer may stand in their place
ARGUMENTS = {  # what the attention is called with, where a MixerAttention may stand in its place
    *("hidden_states", "attention_mask", "position_embeddings", "position_ids", "past_key_values", "cache"),
    "layer_past",
    *("key_value_states", "encoder_hidden_states", "encoder_attention_mask", "output_attentions", "use_cache"),
    "kwargs",
}
OUTPUTS = {
    *("o_proj", "out_proj", "dense", "proj", "c_proj", "projection_layer", "out_lin", "Wo", "projection", "o"),
    "linear_out",
}
BESIDE = {  # parts that an attention may have besides: they make what is read, or come after the read
    *("rotary_emb", "q_proj", "q_a_proj", "q_b_proj", "gate_proj", "g_proj"),
    *("relative_attention_bias", "relative_position_bias", "relative_k_proj", "linear_pos", "distance_embedding"),
}
ANYWHERE = ("Norm", "Dropout", "Identity")  # in the names of their classes: likewise, whatever they are called
OWN = {"sinks", "bias_u", "bias_v", "pos_bias_u", "pos_bias_v", "scaling", "gate_bias"}  # parameters, likewise
CROSS_NAMES = {"encoder_attn", "crossattention", "cross_attn", "cross_attention", "EncDecAttention"}
HEADS = ("num_heads", "num_attention_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "kv_heads")
HEAD_WIDTHS = ("v_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
UNREADABLE = {  # arguments of an attention function that change p in ways a softmax read has no place for
    "cache": "it reads a paged cache",
    "relative_position_bias": "it adds a position bias of its own",
    "sinks": "it has attention sinks for every token",
}


class _Running(threading.local):
    """The features of the attention whose call runs, until its attention function reads them. In a list, as Dynamo
    loses an attribute that is set anew behind FlexAttention."""

    def __init__(self):
        self.features = []


RUNNING = _Running()


def find(module: nn.Module, name: str, parent: nn.Module | None) -> Site | None:
    """The site that the attention `module` is; None if it is not one of transformers. Raises Refused."""
    if not isinstance(getattr(module, "config", None), PreTrainedConfig):
        return None
    if "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False) or name in CROSS_NAMES:
        raise CrossAttention("it is cross-attention")
    parts = {name for name, _ in module.named_children()}
    projections = next((names for names in map(set, map(str.split, QUERIES)) if names <= parts), None)
    parameters = [name for name, _ in module.named_parameters(recurse=False) if name not in OWN]
    known = {name for name, part in module.named_children() if any(kind in type(part).__name__ for kind in ANYWHERE)}
    if projections is None or len(parts & OUTPUTS) > 1 or parts - projections - OUTPUTS - BESIDE - known or parameters:
        raise Refused(
            f"it has parts that are not known to leave a plain softmax ({', '.join(sorted([*parts, *parameters]))})"
        )
    maps = [getattr(module, name) for name in sorted(projections | parts & OUTPUTS)]
    if any(getattr(part, "weight", None) is None or part.weight.dim() != 2 for part in maps):
        raise Refused(
            f"its projections ({', '.join(sorted({type(part).__name__ for part in maps}))}) are not linear maps"
        )
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(type(module).forward).__globals__:
        raise Refused("it does not call transformers' attention functions; use a model class that does")
    heads = _first(module, HEADS) or _first(module.config, ("num_attention_heads", *HEADS))
    total = _first(module, ("embed_dim", "all_head_size", "inner_dim"))
    width = _first(module, HEAD_WIDTHS) or (total // heads if total and heads else None)  # of values, if keys are wider
    if heads is None or width is None:
        raise Refused("neither it nor its config says how many heads it has, and how wide they are")
    first = next(part for name, part in module.named_children() if name in projections)
    groups = _first(module, ("num_key_value_groups",))
    kv_heads = heads // groups if groups else _first(module, KV_HEADS) or heads
    width_in = getattr(first, "in_features", first.weight.shape[0])  # GPT-2's Conv1D has no in_features
    sizes = {"n_embd": width_in, "n_head": heads, "n_kv_head": kv_heads}
    return Site(
        module,
        first.weight,
        fields=sizes | {"fem_dim": heads * width, "qk_dim": heads * width},
        graft=lambda head: _graft(module, head),
        compare=_compare,
        fresh=sizes | _fresh_fields(module) if _takes_a_mixer(module, projections) else None,
        swap=partial(_swap, module, parent),
    )


def _takes_a_mixer(module: nn.Module, projections: set[str]) -> bool:
    """Whether a mixer can be called in its place. Chunks of tokens are in its mask, but not in that of one token; a
    hybrid layer's cache holds the state of a Mamba beside it; a model with layers of cross-attention (Mllama) asks its
    cache for keys."""
    called = inspect.signature(module.forward).parameters
    chunked = getattr(module.config, "attention_chunk_size", None)
    hybrid = "hybrid" in (getattr(module.config, "layer_types", None) or ())
    crossed = getattr(module.config, "cross_attention_layers", None)
    known = "hidden_states" in called and called.keys() <= ARGUMENTS
    return projections in SWAPPED and known and not (chunked or hybrid or crossed)


def _fresh_fields(module: nn.Module) -> dict:
    """What decides which tokens a mixer in its place sees, and where. The window is the layer's own, or the config's
    where that is a field of its class, as Mistral's is."""
    declared = "sliding_window" in {field.name for field in fields(module.config)}
    window = getattr(module, "sliding_window", module.config.sliding_window if declared else None)
    causal = _is_causal(module) or bool(getattr(module, "is_decoder", False))  # NLLB-MoE's decoder says the latter only
    rope = getattr(module.config, "rope_parameters", None) or {}
    theta = rope.get(getattr(module, "layer_type", None), rope).get("rope_theta")
    turned = {"use_rope": False} if theta is None else {"use_rope": True, "rope_theta": theta}
    return {"causal": causal, "dropout": _dropout(module), "window": window} | turned


def _graft(attention: nn.Module, head: FreeEnergyHead) -> nn.Module:
    attention.is_causal = _is_causal(attention)
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = FREE_ENERGY
    attention.free_energy = head
    attention.register_forward_pre_hook(partial(_hand_on_features, _first_argument(attention)), with_kwargs=True)
    attention.register_forward_hook(_was_read)
    attention.register_forward_hook(_forget, always_call=True)
    return attention


def _mean(
    features, q, k, v, bias, causal: bool, scale: float | None, mask: Tensor | None
) -> Float[Tensor, "b tq h dv"]:
    """A head at lambda = 0 and g = 1: what the original computes."""
    bias = bias if mask is None else as_bias(mask, q.dtype)
    return softmax_read(q, k, v, None, causal=causal, scale=scale, bias=bias).mean


def _compare(attention: nn.Module, args: tuple, kwargs: dict, output: object) -> str | None:
    """A forward hook: why a read of ours in the place of the attention's own differs; None where it does not."""
    config, own = attention.config, "is_causal" in vars(attention)
    args = tuple(None if isinstance(x, Cache) else x for x in args)  # a cache holds these tokens by now
    kwargs = {name: None if isinstance(x, Cache) else x for name, x in kwargs.items()}
    attention.is_causal, attention.config = _is_causal(attention), copy.deepcopy(config)
    attention.config._attn_implementation, attention.free_energy = FREE_ENERGY, _mean
    _hand_on_features(_first_argument(attention), attention, args, kwargs)
    try:
        found = attention.forward(*args, **kwargs)
        _was_read(attention, args, found)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return str(error).rstrip(".")
    finally:
        RUNNING.features.clear()
        attention.config = config
        del attention.free_energy
        if not own:
            del attention.is_causal
    found, wanted = (x[0] if isinstance(x, tuple) else x for x in (found, output))
    if not wanted.isfinite().all():
        return None
    error = ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()
    if error <= max(1e-3, 8 * torch.finfo(wanted.dtype).eps):
        return None
    return f"read as a softmax prior, its output differs by {error:.0e} of its largest entry"


def _swap(attention: nn.Module, parent: nn.Module | None, mixer: FreeEnergyMixer) -> nn.Module:
    # BERT keeps its output projection in the module around; the mixer brings one.
    if not any(hasattr(attention, name) for name in OUTPUTS):
        output = getattr(parent, "output", None)
        if not isinstance(getattr(output, "dense", None), nn.Linear):
            raise ValueError(f"{type(attention).__name__} has no output projection; pass the module around it.")
        output.dense = nn.Identity()
    return MixerAttention(mixer, attention, _is_causal(attention))


def _first(thing: object, names: Iterable[str]) -> int | None:
    """The first of the attributes that is a positive whole number."""
    values = (getattr(thing, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _is_causal(attention: nn.Module) -> bool:
    """Whether transformers' attention functions would read causally; the eager one leaves that to its mask."""
    return bool(getattr(attention, "is_causal", attention.config._attn_implementation != "eager"))


def _dropout(attention: nn.Module) -> float:
    names = ("attn_dropout", "dropout", "attention_dropout", "dropout_prob")
    parts = (getattr(attention, name, None) for name in names)
    rates = (getattr(part, "p", part) for part in parts)
    return float(next((rate for rate in rates if isinstance(rate, (int, float))), 0.0))


def _first_argument(attention: nn.Module) -> str:
    """The name of the features that an attention projects."""
    return list(inspect.signature(type(attention).forward).parameters)[1]  # behind self


def _hand_on_features(name: str, attention: nn.Module, args: tuple, kwargs: dict) -> None:
    """Keep the first argument of the call, of that name, for the gates."""
    RUNNING.features[:] = [args[0] if args else kwargs[name]]


def _was_read(attention: nn.Module, args: tuple, output: object) -> None:
    """Raise ValueError where the call that ends has read by another function than ours."""
    if RUNNING.features:
        RUNNING.features.clear()
        raise ValueError(
            f"{type(attention).__name__} does not call transformers' attention functions, so its free energy is never "
            "read; use a model class that does."
        )


def _forget(attention: nn.Module, args: tuple, output: object) -> None:
    """Let the features go where the call has failed before it read them: they hold all that gradients need."""
    RUNNING.features.clear()


def free_energy_attention(
    attention: nn.Module,
    query: Float[Tensor, "b h tq dk"],
    key: Float[Tensor, "b hkv t dk"],
    value: Float[Tensor, "b hkv t dv"],
    attention_mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " h"] | None = None,
    **kwargs,
) -> tuple[Float[Tensor, "b tq h dv"], None]:
    """transformers' attention function of an attention with a head, which reads its prior (Eq. 11).

    attention_mask is the original's, broadcastable to (B, H, T_q, T): True = attend, or added to the scores, as
    position_bias is (T5's). softcap: scores s are softcap tanh(s / softcap). s_aux: the score of an attention sink, a
    first key with value 0 that every query sees, in F as in the mean. Dropout falls on the mixed output.
    Raises ValueError on what a softmax read cannot express.
    """
    for name, reason in UNREADABLE.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(attention).__name__} cannot be read as a softmax prior: {reason}.")
    refuse_split_rows()
    features = RUNNING.features.pop()
    rows, _, queries, _ = query.shape
    width = features.shape[-1]
    check_mask(attention_mask, key.shape[2], kwargs)
    features = features.reshape(rows, queries, width)  # images have rows and columns, packed documents no batch
    causal = attention_mask is None and queries > 1 and (_is_causal(attention) if is_causal is None else is_causal)
    if causal:  # without a mask the first query meets the first key: the rest of a static cache is still empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    masked = position_bias is None and softcap is None and s_aux is None  # at most: nothing else is added to scores
    bias = None if masked or attention_mask is None else as_bias(attention_mask, query.dtype)
    if position_bias is not None:
        position_bias = position_bias[..., : key.shape[2]]
        bias = position_bias if bias is None else bias + position_bias
    if softcap is not None:
        query, key, bias = _capped(query, key, bias, scaling, softcap)
    if s_aux is not None:
        key, value, bias = _with_sink(key, value, bias, s_aux, query.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o = attention.free_energy(features, q, k, v, bias, causal, scaling, attention_mask if masked else None)
    return F.dropout(o, dropout), None


def _capped(
    query: Float[Tensor, "b h tq dk"],
    key: Float[Tensor, "b hkv t dk"],
    bias: Float[Tensor, "..."] | None,
    scaling: float | None,
    softcap: float,
) -> tuple[Float[Tensor, "b h tq 1"], Float[Tensor, "b hkv t 1"], Float[Tensor, "b h tq t"]]:
    """Capped scores as a bias, (B, H, T_q, T) numbers as in the original, beside queries and keys that add nothing."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scaling * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3)
    scores = softcap * torch.tanh(scores / softcap)
    nothing = [x.new_zeros(*x.shape[:3], 1) for x in (query, key)]
    return *nothing, scores if bias is None else scores + bias


def _with_sink(
    key: Float[Tensor, "b hkv t dk"],
    value: Float[Tensor, "b hkv t dv"],
    bias: Float[Tensor, "..."] | None,
    score: Float[Tensor, " h"],
    heads: int,
) -> tuple[Float[Tensor, "b hkv t_1 dk"], Float[Tensor, "b hkv t_1 dv"], Float[Tensor, "..."]]:
    """Keys, values and biases behind a key and a value of zeros, which head h scores with score_h."""
    bias = key.new_zeros(1, 1, 1, key.shape[2]) if bias is None else bias
    first = score.to(bias.dtype)[:, None, None].expand(len(bias), -1, bias.shape[2], 1)
    key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
    return key, value, torch.cat([first, bias.expand(-1, heads, -1, -1)], -1)


AttentionInterface.register(FREE_ENERGY, free_energy_attention)
