"""The language model: pre-norm blocks of a Free Energy Mixer and a SwiGLU, for transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.mlp import SwiGLU
from fem.models.arguments import KEPT, SAID_BY_POSITIONS, WRITTEN, Inputs, check_names, tokens_in
from fem.models.cache import CACHE, FEMCache, given_cache, memory_of, place_beside_keys
from fem.models.configuration import FEMConfig
from fem.models.engines.attention import EXACT, attend, refuse_split_rows
from fem.models.engines.obstacles import attends, keeps_tokens, layer_type, obstacle, obstacle_to_pages
from fem.models.loss import IGNORED, cross_entropy, cross_entropy_of_logits, is_one_weight, next_tokens
from fem.models.start import start, starts_itself
from fem.ops.common.shared import Known, shared_by_layers
from fem.ops.common.tokens import PLAIN, Tokens
from fem.priors import Prior
from fem.projection import Projection

LORA = {"target_modules": ["query", "key", "value", "output"], "modules_to_save": ["beta", "inner"]}
"""LoraConfig(task_type="CAUSAL_LM", **LORA): low-rank updates of the projections; beta and lambda, which are small and
which attention lacks, are trained whole. Priors without queries have no "query" and "key". After `replace_attention`:
the original's targets and the same modules_to_save.
"""


class FEMBlock(GradientCheckpointingLayer):
    """x + Mixer(RMSNorm(x)), then x + SwiGLU(RMSNorm(x))

    Given position_ids (B, T), a softmax mixer reads through transformers' attention interface, for which the block is
    the attention module. Every other mixer reads exactly, and keeps its state in the cache. known: what the layers of a
    model share in one forward pass.
    """

    def __init__(self, config: FEMConfig, mixer: FreeEnergyMixerConfig, index: int):
        super().__init__()
        self.config, self.layer_idx, self.kind = config, index, layer_type(mixer)
        self.is_causal, self.sliding_window, self.scaling = True, mixer.window, mixer.key_width**-0.5
        self.num_key_value_groups, self.head_dim = mixer.n_head // mixer.kv_heads, config.head_dim
        self.attends, self.has_fixed_state = attends(mixer), not keeps_tokens(mixer)
        self.mixer_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = FreeEnergyMixer(mixer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        here = "cpu" if torch.get_default_device().type == "meta" else None  # where no checkpoint would fill it
        self.register_buffer("largest", torch.zeros((), device=here), persistent=False)  # |beta v| that `attend` saw
        self.warned = False

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        attention_mask: Tensor | dict | None = None,
        segment_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        tokens: Tokens = PLAIN,
        cache: Any = None,
        known: Known | None = None,
        **keywords,
    ) -> Float[Tensor, "b t d"]:
        past_key_values, y = given_cache(past_key_values, cache, keywords), self.mixer_norm(x)
        with shared_by_layers(known):
            if self.attends and position_ids is not None:
                keywords |= {"attention_mask": attention_mask, "past_key_values": past_key_values}
                kept = past_key_values is not None and self.mixer.conditioner is not None
                hidden = place_beside_keys(past_key_values, self.layer_idx) if kept else None
                if self.mixer.conditioner is not None:
                    refuse_split_rows()
                # vLLM reads this source: a forward that looks the interface up and calls it once is an attention's.
                interface = ALL_ATTENTION_FUNCTIONS.get_interface(
                    self.config._attn_implementation, eager_attention_forward
                )
                attention = lambda *inputs, **how: interface(self, *inputs, scaling=self.scaling, **how)  # noqa: E731
                read = functools.partial(attend, self, attention, **keywords)
                y, hidden = self.mixer.read_by(y, position_ids, read, tokens, hidden)
                if kept:
                    past_key_values.update_recurrent_state(hidden, self.layer_idx)
            elif past_key_values is None:
                y = self.mixer(y, attention_mask, segment_ids)
            else:
                memory = memory_of(past_key_values, self.layer_idx, self.has_fixed_state)
                y = memory.read(self.mixer, y, attention_mask, segment_ids)
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


class FEMPreTrainedModel(PreTrainedModel):
    config_class = FEMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules = ["FEMBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": FEMBlock}  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config: PreTrainedConfig):
        if not isinstance(config, self.config_class):
            raise TypeError(f"config must be a {self.config_class.__name__}, got a {type(config).__name__}.")
        if self._no_engine(config) is not None:
            self._supports_flash_attn = self._supports_flex_attn = self._supports_attention_backend = False
        super().__init__(config)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """None means the exact form; any other name is an engine's, which reads over [v | e] (`attend`).

        Raises ValueError on a model that no engine can serve.
        """
        if requested_attention in (None, EXACT):
            return EXACT
        reason = self._no_engine(self.config)
        if requested_attention == "vllm":
            reason = reason or obstacle_to_pages(self.config)
        if reason is not None:
            raise ValueError(f"attn_implementation={requested_attention!r} cannot serve this model: {reason}")
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    _no_engine = staticmethod(obstacle)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Copies no code beside the weights: the config says how a folder is opened."""

    def post_init(self) -> None:
        """In a model that is to be quantised, maps that LoRA adapts are nn.Linear itself: bitsandbytes takes no other.

        Gates and conditioner stay in full precision.
        """
        if getattr(self.config, "quantization_config", None) is not None:
            for path, part in list(self.named_modules()):
                if type(part) is Projection and path.rpartition(".")[2] in LORA["target_modules"]:
                    linear = nn.Linear(part.in_features, part.out_features, part.bias is not None, device="meta")
                    linear.weight, linear.bias = part.weight, part.bias
                    self.set_submodule(path, linear)
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The parts of mixers initialise themselves, transformers all else; loaded parameters are kept."""
        if isinstance(module, FEMBlock):
            module.largest.zero_()
        if starts_itself(module):
            start(module)
        else:
            self._refuse_unknown_start(module)
            super()._init_weights(module)

    def _refuse_unknown_start(self, module: nn.Module) -> None:
        """Raise where a checkpoint lacks parameters of a prior's own, which hold whatever was in memory."""
        is_loaded = lambda parameter: getattr(parameter, "_is_hf_initialized", False)  # noqa: E731
        if isinstance(module, Prior) and any(map(is_loaded, self.parameters())):
            for name, parameter in module.named_parameters(recurse=False):
                if not is_loaded(parameter):
                    raise ValueError(
                        f"prior {module.name!r} must have reset_parameters, as the checkpoint lacks its {name!r}, got "
                        "none."
                    )


class FEMModel(FEMPreTrainedModel):
    """Token embeddings, `FEMBlock`s and a final RMSNorm.

    input_ids (B, T), or inputs_embeds (B, T, D). attention_mask (B, T_past + T): 1 = keep, over the cached tokens too;
    masking a token equals deleting it, on either side. segment_ids (B, T): packed documents equal separate runs;
    position_ids that restart say the same (`Inputs.documents`), and otherwise positions are counted from the mask, so
    any position_ids will do. past_key_values: a DynamicCache, to which the call adds its tokens, as states or, by an
    engine's attention, as keys and [v | e]. Arguments of transformers that mean nothing to a mixer are ignored
    (`SET_ASIDE` of fem.models.arguments).

    Raises ValueError on wrong shapes and a cache that another model has filled, TypeError on unknown arguments and on a
    cache of states for an engine's attention.
    """

    def __init__(self, config: FEMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FEMBlock(config, mixer, i) for i, mixer in enumerate(config.mixer_configs()))
        self.kinds = {block.kind for block in self.layers}
        self.conditioned = any(block.mixer.conditioner is not None for block in self.layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        cache: Any = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        past_key_values = given_cache(past_key_values, cache, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"give input_ids or inputs_embeds, got {'neither' if input_ids is None else 'both'}.")
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions must be False, as no maps are kept, got True; layers[i].mixer.inspect(x) makes them."
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        config, name = self.config, self.config._attn_implementation
        if name == EXACT:
            check_names(self, kwargs, position_ids)
        elif name in ("sdpa", "eager"):  # further ones are continuous batching's
            check_names(self, {name: kwargs.get(name) for name in SAID_BY_POSITIONS}, position_ids)
        given = Inputs(x, attention_mask, position_ids, segment_ids, tokens_in(past_key_values))
        documents = given.documents_under(name, cached=past_key_values is not None or bool(use_cache))
        wants_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if past_key_values is None and wants_cache and (name == EXACT or documents is None):
            past_key_values = FEMCache(len(self.layers)) if name == EXACT else DynamicCache(config=config)
            setattr(past_key_values, WRITTEN, True)
        if name == EXACT:
            told = {"attention_mask": given.mask(), "segment_ids": documents}
        else:
            tokens = given.read_by_conditioner(documents) if self.conditioned else PLAIN
            given = given if documents is None else given._replace(attention_mask=None)
            given = given._replace(position_ids=given.positions())
            masks = given.masks(config, self.kinds, past_key_values)
            told = {"attention_mask": masks, "position_ids": given.position_ids, "tokens": tokens, **kwargs}

        told = {CACHE: past_key_values, "known": Known()} | told  # of pages, the engine's own cache
        for block in self.layers[: self.config.num_hidden_layers]:  # fewer for a draft that leaves early
            x = block(x, **told)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: past_key_values})


class FEMForCausalLM(FEMPreTrainedModel, GenerationMixin):
    """`FEMModel` with a head over the vocabulary, tied to the embeddings unless config.tie_word_embeddings is False.

    labels (B, T): the input_ids, -100 where nothing is to be predicted; the loss shifts them, and the first token of a
    document is no target. shift_labels (B, T): what each token is to predict, instead. The loss is `cross_entropy` of
    fem.models.loss: its logits exist in chunks, unless the head has an adapter or hooks, or `loss_function` was set.
    logits_to_keep: the last n positions, an index, or 0 for all; None: all, except in training with labels, where
    metrics that need them ask by logits_to_keep=0.
    num_items_in_batch: what the summed loss is divided by (the Trainer passes it). With labels no cache is built,
    unless use_cache=True. All else is `FEMModel`'s.
    """

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: FEMConfig):
        super().__init__(config)
        self.model = FEMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def _is_stateful(self) -> bool:
        """Whether the cache cannot forget tokens, so that transformers refuses assisted decoding."""
        return self.config._attn_implementation == EXACT or self.model.conditioned

    def init_continuous_batching(self, *args, **kwargs):
        """transformers' manager of pages. Raises ValueError on a model with states, which pages do not hold."""
        reason = obstacle_to_pages(self.config)
        if reason is not None:
            raise ValueError(f"continuous batching cannot serve this model: {reason}")
        return super().init_continuous_batching(*args, **kwargs)

    def create_masks_for_generate(
        self, config, inputs_embeds, attention_mask, past_key_values=None, position_ids=None, cache=None, **options
    ):
        """What a compiled step reads as its mask: that of the new tokens, and an engine's of pairs."""
        past_key_values = given_cache(past_key_values, cache, options)
        kept = attention_mask
        if kept is not None:  # copied, as the stride of a view would be another at every token, and so the CUDA graph
            kept = kept[:, -inputs_embeds.shape[1] :].clone(memory_format=torch.contiguous_format)
        if config._attn_implementation == EXACT:
            return kept
        given = Inputs(inputs_embeds, attention_mask, position_ids, past=tokens_in(past_key_values))
        return given.masks(config, self.model.kinds, past_key_values) | {KEPT: kept}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: Any = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        past_key_values = given_cache(past_key_values, cache, kwargs)
        shift_labels = kwargs.pop("shift_labels", None)  # not by name, or the Trainer looks for it in its batches
        trained = labels is not None or shift_labels is not None
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        documents = segment_ids
        begins = trained and (past_key_values is None or not past_key_values.get_seq_length())
        if begins and tokens is not None:  # the loss needs the documents, too
            given = Inputs(tokens, attention_mask, position_ids, segment_ids)
            documents = given.documents()
            if attention_mask is None or given.masks_tokens:  # else the mask says what a token sees
                segment_ids = documents
        use_cache = False if use_cache is None and trained else use_cache
        inputs = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        outputs = self.model(*inputs, segment_ids, **kwargs)
        hidden = outputs.last_hidden_state
        loss = logits = None
        if trained:
            loss = self._loss(hidden, labels, shift_labels, documents, num_items_in_batch)
        if not trained or not self.training or logits_to_keep is not None:
            keep = 0 if logits_to_keep is None else logits_to_keep
            logits = self.lm_head(hidden[:, slice(-keep, None) if isinstance(keep, int) else keep])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
        )

    def _loss(self, hidden: Tensor, labels, shift_labels, segment_ids, num_items) -> Float[Tensor, ""]:
        shape, wanted = (labels if shift_labels is None else shift_labels).shape, hidden.shape[:2]
        if shape != wanted:  # of as many numbers, such as (time, batch), they would train on others
            raise ValueError(f"labels must have shape (batch, time) = {tuple(wanted)}, got {tuple(shape)}.")
        if shift_labels is None and segment_ids is not None:
            opens = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
            labels = labels.masked_fill(opens, IGNORED)
        if hasattr(self, "_loss_function"):  # the user's own
            given = {"shift_labels": shift_labels, "num_items_in_batch": num_items}
            given = {name: value for name, value in given.items() if value is not None}
            return self.loss_function(self.lm_head(hidden), labels, vocab_size=self.config.vocab_size, **given)
        targets = next_tokens(labels) if shift_labels is None else shift_labels
        targets = targets.to(hidden.device, torch.long)
        if not is_one_weight(self.lm_head):
            return cross_entropy_of_logits(self.lm_head(hidden), targets, num_items)
        return cross_entropy(hidden, self.lm_head.weight, targets, num_items)
