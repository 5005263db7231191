"""Self-attention of transformers' models: GPT-2, BERT, and all whose projections are q_proj, k_proj, v_proj, o_proj."""

from __future__ import annotations

import copy
import inspect
import sys

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from fem.mixer import FreeEnergyMixer
from fem.models.cache import MixerMemory
from fem.models.surgery.head import FreeEnergyHead, as_bias
from fem.models.surgery.host import CrossAttention, Refused, Site

FREE_ENERGY = "free_energy"
LAYOUTS = (  # the projections of a family, and the parts beside them that leave what is attended to alone
    ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm", "rotary_emb"}),
    ({"c_attn", "c_proj"}, {"attn_dropout", "resid_dropout"}),
    ({"query", "key", "value"}, {"dropout"}),
)
UNREADABLE = {  # arguments of an attention function that change p in ways a softmax read has no place for
    "softcap": "it caps its scores (softcap)",
    "s_aux": "it has attention sinks",
    "position_bias": "it adds a position bias of its own",
    "cache": "it reads a paged cache",
}


def find(module: nn.Module, path: str, parent: nn.Module | None) -> PretrainedSite | None:
    """The site that the attention `module` is; None if transformers does not bring it. Raises Refused."""
    if isinstance(module, MixerAttention):
        return PretrainedSite(module, path, parent)
    if not isinstance(getattr(module, "config", None), PreTrainedConfig):
        return None
    if "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False):
        raise CrossAttention("it is cross-attention")
    parts = set(dict(module.named_children())) - {FREE_ENERGY}
    known = any(projections <= parts <= projections | beside for projections, beside in LAYOUTS)
    if not known or dict(module.named_parameters(recurse=False)):
        raise Refused(f"its parts ({', '.join(sorted(parts))}) are not those of GPT-2, Llama, BERT or ViT")
    if getattr(module, "attn_logit_softcapping", None) is not None:
        raise Refused(UNREADABLE["softcap"])
    takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values())
    if not takes_more or not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
        raise Refused("it does not call transformers' attention functions; use a model class that does")
    site = PretrainedSite(module, path, parent)
    if not site.replaced and site.query_width != site.fields["n_head"] * site.head_width:
        raise Refused(f"its queries are {site.query_width} wide, which is not heads times head width")
    return site


class PretrainedSite(Site):
    @property
    def weight(self) -> Tensor:
        host = self.module
        return next(getattr(host, name).weight for name in ("q_proj", "c_attn", "query") if hasattr(host, name))

    @property
    def head_width(self) -> int:
        host = self.module
        return host.attention_head_size if hasattr(host, "attention_head_size") else host.head_dim

    @property
    def query_width(self) -> int:
        host = self.module
        return host.embed_dim if hasattr(host, "c_attn") else self.weight.shape[0]

    @property
    def fields(self) -> dict:
        host, config = self.module, self.module.config
        theta = _rope_theta(host)
        return {
            "n_embd": config.hidden_size,
            "n_head": config.num_attention_heads,
            "causal": bool(host.is_causal),
            "dropout": _dropout(host),
            "use_rope": theta is not None,
            **({} if theta is None else {"rope_theta": theta}),
        }

    @property
    def kv_heads(self) -> int:
        return self.module.config.num_attention_heads // getattr(self.module, "num_key_value_groups", 1)

    @property
    def softmax_fields(self) -> dict:
        return {"n_kv_head": self.kv_heads, "window": getattr(self.module, "sliding_window", None)}

    @property
    def widths(self) -> dict:
        return {"n_kv_head": self.kv_heads, "fem_dim": self.query_width, "qk_dim": self.query_width}

    def graft(self, head: FreeEnergyHead) -> nn.Module:
        host = self.module
        host.config = copy.deepcopy(host.config)
        host.config._attn_implementation = FREE_ENERGY
        host.free_energy = head
        host.register_forward_pre_hook(_hand_on_features, with_kwargs=True)
        return host

    def swap(self, mixer: FreeEnergyMixer) -> nn.Module:
        host = self.module
        if hasattr(host, "query"):  # BERT keeps its output projection in the module around; the mixer brings one
            if self.parent is None:
                raise ValueError(f"{type(host).__name__} has no output projection; pass the module around it.")
            self.parent.output.dense = nn.Identity()
        return MixerAttention(mixer, host)


def _rope_theta(host: nn.Module) -> float | None:
    rope = getattr(host.config, "rope_parameters", None) or {}
    return rope.get(getattr(host, "layer_type", None), rope).get("rope_theta")


def _dropout(host: nn.Module) -> float:
    for name in ("attn_dropout", "dropout"):
        if hasattr(host, name):
            return getattr(host, name).p
    return host.attention_dropout


def _hand_on_features(host: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The gates read what the projections read; transformers passes further arguments on to the attention function."""
    return args, kwargs | {"features": args[0] if args else kwargs["hidden_states"]}


def free_energy_attention(
    host: nn.Module,
    query: Float[Tensor, "b h tq dk"],
    key: Float[Tensor, "b hkv t dk"],
    value: Float[Tensor, "b hkv t dv"],
    attention_mask: Tensor | None,
    features: Float[Tensor, "b tq d"],
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Float[Tensor, "b tq h dv"], None]:
    """transformers' attention function of a grafted host: its prior, read by `host.free_energy` (Eq. 11).

    attention_mask is the host's, broadcastable to (B, H, T_q, T): True = attend, or added to the scores. Dropout falls
    on the mixed output. Raises ValueError on what a softmax read cannot express.
    """
    for name, reason in UNREADABLE.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(host).__name__} cannot be read as a softmax prior: {reason}.")
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ValueError(
            f"attention_mask must have 4 dimensions, got {tuple(attention_mask.shape)}; "
            "call model.set_attn_implementation('sdpa'), whose masks a free energy can be read under."
        )
    queries = query.shape[2]
    causal = attention_mask is None and queries > 1 and (host.is_causal if is_causal is None else is_causal)
    if causal:  # without a mask the first query meets the first key: the rest of a static cache is still empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    bias = None if attention_mask is None else as_bias(attention_mask, query.dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o = host.free_energy(features, q, k, v, bias, causal, scaling)
    return F.dropout(o, dropout), None


AttentionInterface.register(FREE_ENERGY, free_energy_attention)


class MixerAttention(nn.Module):
    """A FreeEnergyMixer that is called as an attention of transformers.

    hidden_states (B, T, D) -> ((B, T, D), None). Padding and packed documents are read off the host's 4-dimensional
    mask; the state is kept in the host's cache. Raises ValueError on a cache of fixed size and on another mask.
    """

    def __init__(self, mixer: FreeEnergyMixer, host: nn.Module):
        super().__init__()
        self.mixer = mixer
        self.layer_idx = getattr(host, "layer_idx", None)
        self.resid_dropout = getattr(host, "resid_dropout", nn.Identity())

    def forward(
        self,
        hidden_states: Float[Tensor, "b t d"],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Float[Tensor, "b t d"], None]:
        keep, segments = (None, None) if attention_mask is None else _tokens(attention_mask, hidden_states.shape[1])
        if past_key_values is None:
            return self.resid_dropout(self.mixer(hidden_states, keep, segments)), None
        memory = self._memory(past_key_values)
        segments = None if memory.state is not None else segments
        y, state = self.mixer(hidden_states, keep, segments, state=memory.state, return_state=True)
        memory.remember(state, tokens=hidden_states.shape[1])
        return self.resid_dropout(y), None

    def _memory(self, cache: Cache) -> MixerMemory:
        layers = cache.self_attention_cache.layers if isinstance(cache, EncoderDecoderCache) else cache.layers
        if self.layer_idx == len(layers):
            layers.append(MixerMemory())
        memory = layers[self.layer_idx]
        if type(memory) is not MixerMemory:
            if not isinstance(memory, DynamicLayer) or memory.is_initialized:
                raise ValueError(
                    f"past_key_values must be a DynamicCache of this model, got {type(memory).__name__} in layer "
                    f"{self.layer_idx}; a mixer keeps a state of its own: leave past_key_values out."
                )
            memory = layers[self.layer_idx] = MixerMemory()
        return memory


def _tokens(mask: Tensor, time: int) -> tuple[Bool[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Which of the last `time` tokens exist, and which document each is of, from the pairs that a mask allows.

    A token exists where it sees itself; it opens a document where it does not see the existing token before it.
    """
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask must have 4 dimensions, got {tuple(mask.shape)}; "
            "call model.set_attn_implementation('sdpa')."
        )
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    pairs = allowed[:, 0, :, -time:].expand(-1, time, -1)
    keep = pairs.diagonal(dim1=1, dim2=2)
    last = torch.where(keep, torch.arange(time, device=mask.device), -1).cummax(1).values
    before = F.pad(last, (1, 0), value=-1)[:, :-1]
    sees = pairs.gather(2, before.clamp_min(0)[..., None])[..., 0]
    return keep, (keep & (before >= 0) & ~sees).cumsum(1)
