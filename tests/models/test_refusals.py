"""A wrong configuration, call or replacement of a model gets one sentence: one table of them all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from clients.survey import build
from originals import GROUPED, PADDED, Attention, decoder
from small_models import VOCABULARY, small_config, small_model, tokens
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from fem import replace_attention
from fem.models import preset

pytestmark = pytest.mark.usefixtures("as_users_run")

config = small_config
IDS, ONES, ROW = tokens(2, 5), torch.ones(2, 5, dtype=torch.long), torch.zeros(1, 3, 32)
PAIRS = torch.ones(2, 1, 5, 5)
TUPLES = ((torch.zeros(1, 2, 3, 4),) * 2,)
SLIDING = Cache(layers=[DynamicSlidingWindowLayer(4)])
YARN = {"rope_type": "yarn", "factor": 4.0}
PLAIN = {"engine": "sdpa", "conv": False}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY}


def call(body=False, engine="exact", conv=True, **given):
    """A call of a model, or of its body, that an attention of transformers reads or none."""
    model = small_model(mixer={"use_conv": conv})
    model.set_attn_implementation(engine)
    return (model.model if body else model)(**{"input_ids": IDS} | given)


def continued(use):
    """A use of a model and of its cache of six tokens."""
    model = small_model()
    return use(model, model(tokens(2, 6), use_cache=True).past_key_values)


def served(use):
    """A use of a model with the conditioner whose keys and values an engine holds."""
    model = small_model()
    model.set_attn_implementation("sdpa")
    return use(model)


def cropped(kind, model):
    """A cache of keys beside states, from which tokens are to be taken."""
    cache = kind(config=model.config, **({"max_cache_len": 8} if kind is StaticCache else {}))
    model(IDS, past_key_values=cache)
    cache.crop(-2)


def replaced(model, **how):
    return replace_attention(model(), **how)


fresh = partial(replaced, preserve=False)


def with_an_indexer():
    """It might choose among more tokens than are run for a comparison."""
    model = decoder("llama")
    model.model.layers[0].self_attn.indexer = nn.Linear(32, 32)
    return model


def cross_attention_alone():
    sizes = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, add_cross_attention=True)
    return transformers.GPT2Model(sizes).h[0].crossattention


def with_a_head_beside_it():
    return nn.ModuleDict({"model": decoder("llama"), "head": nn.Linear(32, 1)})


def in_chunks():
    """The mask of one token does not show where its chunk begins."""
    sizes = GROUPED | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


def asks_its_cache_for_keys():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 59, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "cross_attention_layers": [1]}
    return transformers.MllamaForCausalLM(transformers.MllamaTextConfig(**sizes, **heads))


def multihead(x, memory=None, **masks):
    memory = x if memory is None else memory
    replace_attention(nn.MultiheadAttention(32, 4, batch_first=True))(x, memory, memory, **masks)


def with_a_mask_of_tokens():
    attention, angle = replace_attention(decoder("llama")).model.layers[0].self_attn, torch.zeros(1, 11, 8)
    attention(torch.randn(2, 11, 32), position_embeddings=(angle.cos(), angle.sin()), attention_mask=PADDED)


def by_a_function_of_its_own():
    model = replace_attention(decoder("llama"))
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    model(tokens(2, 11))


def generated_by_fresh_mixers(**options):
    fresh(lambda: decoder("llama"), prior_type="gla").generate(tokens(2, 11), max_new_tokens=2, **options)


UNKNOWN = {  # what no mixer takes the place of, kept as it was or not
    "Linear": lambda: nn.Linear(3, 3),
    "FEMForCausalLM, which is built of Free Energy Mixers": small_model,
    "MultiheadAttention.*kdim": lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=16),
    "add_bias_kv": lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True),
    "FalconAttention.*attention functions": lambda: transformers.FalconModel(transformers.FalconConfig(**SMALL)),
    "DiffLlamaAttention.*groupnorm": lambda: transformers.DiffLlamaModel(transformers.DiffLlamaConfig(**SMALL)),
    "LlamaAttention.*parts that are not known to leave a plain softmax .*indexer": with_an_indexer,
    "cross-attention": cross_attention_alone,
    "gate": lambda: nn.Sequential(Attention(gated=True)),
    "model must be a torch module, got 'gpt2'": lambda: "gpt2",
}
CALLED_OTHERWISE = (
    lambda: nn.MultiheadAttention(32, 4),
    lambda: nn.Sequential(Attention()),
    lambda: build("mobilebert"),  # of queries, keys and values
    in_chunks,
    lambda: build("falcon_h1"),  # with a cache that holds a Mamba's state too
    asks_its_cache_for_keys,
    lambda: build("t5"),  # with biases of positions
)
CANNOT_TAKE = "Attention is called in a way that a fresh mixer cannot take; pass preserve=True"
ANY = (TypeError, ValueError)
TABLE = [
    # The configuration.
    (config, {"layer_priors": ["softmax"]}, ValueError, "layer_priors must have one entry per layer, .* got 1 entries"),
    (config, {"layer_priors": ["softmax", "sofmax"]}, ValueError, "prior_type must be one of"),
    (config, {"layer_priors": ["softmax", {"windw": 5}]}, TypeError, "did you mean 'window'"),
    (config, {"layer_priors": ["softmax", 5]}, TypeError, "layer_priors"),
    (config, {"layer_priors": 2}, TypeError, "layer_priors must be a list of one entry per layer, got 2"),
    (config, {"rope_parameters": "yarn"}, TypeError, "rope_parameters must be a dict, .* got 'yarn'"),
    (config, {"layer_priors": ["softmax", {"n_embd": 5}]}, ValueError, "n_embd"),
    (config, {"prior_type": "attention"}, ValueError, "prior_type must be one of"),
    (config, {"prior_type": 5}, ValueError, "prior_type must be one of .*; got 5"),
    (config, {"use_cache": "no"}, TypeError, "use_cache must be True or False, got 'no'"),
    (config, {"tie_word_embeddings": "false"}, TypeError, "tie_word_embeddings must be True or False, got 'false'"),
    (config, {"mixer": {"use_convv": True}}, TypeError, "did you mean 'use_conv'"),
    (config, {"mixer": {"n_head": 4}}, ValueError, "num_attention_heads"),
    (config, {"mixer": {"causal": False}}, ValueError, "causal"),
    (config, {"mixer": {"prior_type": "gla"}}, ValueError, "mixer must leave prior_type to the model's prior_type"),
    (config, {"use_conv": False}, ValueError, r"mixer=\{'use_conv': False\}"),
    (config, {"n_embd": 8}, ValueError, "hidden_size"),
    (config, {"num_heads": 4}, TypeError, "no field 'num_heads' .* did you mean .* or 'num_attention_heads'"),
    (config, {"max_seq_len": 64}, TypeError, "no field 'max_seq_len' .* known fields: vocab_size"),
    (config, {"head_dim": 8}, TypeError, "no field 'head_dim'"),
    (config, {"num_attention_heads": 3}, ValueError, "must divide hidden_size = 16, got 3"),
    (config, {"num_key_value_heads": 3}, ValueError, "n_kv_head must divide"),
    (config, {"hidden_size": "a"}, ValueError, "hidden_size must be a positive integer, got 'a'"),
    (config, {"num_hidden_layers": 2.0}, ValueError, "num_hidden_layers must be a positive integer, got 2.0"),
    (config, {"intermediate_size": 24.5}, ValueError, "intermediate_size must be a positive integer or None, got 24.5"),
    (config, {"num_key_value_heads": "a"}, ValueError, "num_key_value_heads must be a positive .* or None, got 'a'"),
    (config, {"rms_norm_eps": "a"}, ValueError, "rms_norm_eps must be a finite number, got 'a'"),
    (config, {"rms_norm_eps": -1.0}, ValueError, r"rms_norm_eps must be 0 or more, got -1.0"),
    (config, {"initializer_range": "a"}, ValueError, "initializer_range must be a finite number, got 'a'"),
    (config, {"mixer": "x"}, TypeError, "mixer must be a dict of mixer fields, got 'x'"),
    (config, {"vocab_size": 0}, ValueError, "vocab_size must be a positive integer, got 0"),
    (config, {"max_position_embeddings": 0}, ValueError, "max_position_embeddings must be .* got 0"),
    (config, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ValueError, "llama3.*; got 'dynamic'"),
    (config, {"rope_parameters": {"rope_type": "yran", "factor": 4.0}}, ValueError, "llama3.*; got 'yran'"),
    (config, {"rope_parameters": {"rope_type": "linear"}}, ValueError, "cannot be read by transformers.*factor"),
    (config, {"rope_parameters": {"rope_theta": 5.0}, "mixer": {"rope_theta": 6.0}}, ValueError, "rope_theta is given"),
    (config, {"mixer": {"rope_factor": 2.0}}, ValueError, "rope_parameters"),
    (config, {"rope_theta": 6.0}, ValueError, r"which belongs to the mixers; pass mixer=\{'rope_theta': 6.0\}"),
    (config, {"sliding_window": 4}, ValueError, r"which belongs to the mixers; pass mixer=\{'window': 4\}"),
    (config, {"rope_scaling": YARN}, TypeError, "no field 'rope_scaling'; pass rope_parameters"),
    (config, {"rope_parameters": YARN, "prior_type": "mamba"}, ValueError, "needs a layer with rotary positions"),
    (config, {"rope_parameters": YARN, "mixer": {"use_rope": False}}, ValueError, "needs a layer with rotary"),
    (config, {"num_key_value_heads": 1, "prior_type": "gla"}, ValueError, "num_key_value_heads needs a softmax layer"),
    (config, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ValueError, "got partial_rotary_factor = 0.5, which"),
    # A call of a model.
    (call, {"input_ids": None}, ValueError, "input_ids or inputs_embeds, got neither"),
    (call, {"inputs_embeds": torch.zeros(2, 5, 16)}, ValueError, "got both"),
    (call, {"attention_mask": ONES[:, :4]}, ValueError, r"attention_mask.*\(2, 5\), got \(2, 4\)"),
    (call, {"attention_mask": ONES[None]}, ValueError, "attention_mask must have shape"),
    (call, {"attention_mask": ONES * -1e9}, TypeError, "attention_mask must be bool or integers"),
    (call, {"attention_mask": ONES * 2}, ValueError, "attention_mask must hold 0 and 1"),
    (call, {"segment_ids": ONES[0]}, ValueError, "segment_ids must have shape"),
    (call, {"labels": ONES.mT}, ValueError, r"labels must have shape .*\(2, 5\), got \(5, 2\)"),
    (call, {"segment_ids": ONES.float()}, TypeError, "segment_ids must be integers"),
    (call, {"position_ids": ONES[:, :4]}, ValueError, "position_ids must .* cover the 5 tokens"),
    (call, {"position_ids": ONES * 1.0}, ValueError, "position_ids must be integers .*float32"),
    (call, {"segment_id": ONES}, TypeError, "segment_id"),
    (call, {"output_attentions": True}, ValueError, "inspect"),
    (call, {"documents": False}, TypeError, "no argument 'documents'; documents are segment_ids or position_ids"),
    (call, {"cu_seq_lens_q": ONES[0]}, TypeError, "takes no argument 'cu_seq_lens_q'"),
    (call, {"engine": "sdpa", "cu_seq_lens_q": ONES[0]}, TypeError, "takes no argument 'cu_seq_lens_q'"),
    (call, {"engine": "sdpa", "seq_idx": ONES}, TypeError, "takes no argument 'seq_idx'"),
    (call, {"is_causal": False}, TypeError, "no argument 'is_causal'; documents are segment_ids or position_ids"),
    (call, {"body": True, "documents": False}, TypeError, "no argument 'documents'; documents are segment_ids or"),
    # Its cache; older releases of transformers took tuples of keys and values, whose numbers belong into no error.
    *((call, {name: TUPLES}, TypeError, "got a tuple; leave it out") for name in ("past_key_values", "cache")),
    (call, {"engine": "sdpa", "past_key_values": TUPLES}, TypeError, "got a tuple; leave it out"),
    (call, {"engine": "sdpa", "cache": TUPLES}, TypeError, "got a tuple; leave it out"),
    (continued, {"use": lambda m, c: m(tokens(3, 1), past_key_values=c)}, ValueError, "it has 2, this call has 3"),
    (continued, {"use": lambda m, c: m(IDS, past_key_values=c, attention_mask=ONES)}, ValueError, r"\(2, 11\), got"),
    (continued, {"use": lambda m, c: c.crop(-2)}, ValueError, "cannot forget tokens, as assisted decoding asks"),
    (continued, {"use": lambda m, c: m.generate(IDS[:1], prompt_lookup_num_tokens=2)}, ValueError, "assisted gener"),
    (continued, {"use": lambda m, c: m.generate(IDS, cache_implementation="static")}, ValueError, "got StaticLayer"),
    (continued, {"use": lambda m, c: c.update(ONES, ONES, 0)}, TypeError, "states of FEM layers"),
    (continued, {"use": lambda m, c: small_model(prior_type="gla")(IDS, past_key_values=c)}, ValueError, "another"),
    (call, {"attention_mask": PAIRS}, ValueError, "attn_implementation='sdpa'"),
    (call, PLAIN | {"attention_mask": ONES * 2}, ValueError, "attention_mask must hold 0 and 1"),
    (call, PLAIN | {"attention_mask": ONES[:, :4]}, ValueError, r"mask.*\(2, 5\), got \(2, 4\)"),
    *(  # which transformers would cut, fill up or turn round
        (call, PLAIN | {"attention_mask": mask, "position_ids": torch.arange(5)[None]}, error, words)
        for mask, error, words in (
            (ONES[:, :4], ValueError, r"\(2, 5\), got \(2, 4\)"),
            (ONES[:1], ValueError, r"\(2, 5\), got \(1, 5\)"),
            (ONES[:, None], ValueError, r"\(2, 5\), got \(2, 1, 5\)"),
            (torch.zeros(2, 5), TypeError, "attention_mask must be bool or integers"),
        )
    ),
    *(
        (call, PLAIN | {"engine": name, "attention_mask": PAIRS.bool()}, TypeError, f"{name}.* torch.bool")
        for name in ("eager", "flex_attention")
    ),
    # What cannot hold the conditioner's state.
    (served, {"use": lambda m: m.set_attn_implementation("vllm")}, ValueError, "conditioner"),
    (served, {"use": lambda m: m.generate_batch([[5, 3]], GenerationConfig(max_new_tokens=2))}, ValueError, "conditio"),
    (call, {"engine": "sdpa", "attention_mask": ONES[0].outer(ONES[0])[None, None]}, ValueError, "conditioner"),
    (call, {"engine": "sdpa", "past_key_values": SLIDING}, ValueError, "conditioner"),
    *(
        (served, {"use": partial(cropped, kind)}, ValueError, "cannot forget tokens")
        for kind in (DynamicCache, StaticCache)
    ),
    # Presets.
    (lambda: preset("fem-sm-7b"), {}, ValueError, "preset must be one of"),
    (lambda: preset("fem-sm-tiny", mlp="wide"), {}, ValueError, "mlp must be one of narrowed, kept; got 'wide'"),
    (lambda: preset("fem-sm-tiny", mixer=3), {}, TypeError, "mixer must be a dict of mixer fields, got 3"),
    (lambda: preset("fem-sm-tiny", intermediate_size=8), {}, ValueError, "the mixers leave no room for an MLP"),
    # A replacement, and calls of replaced models.
    *((made, {"model": model}, ANY, words) for words, model in UNKNOWN.items() for made in (replaced, fresh)),
    *((fresh, {"model": model, "prior_type": "linear"}, ValueError, CANNOT_TAKE) for model in CALLED_OTHERWISE),
    (replaced, {"model": with_a_head_beside_it, "layers": [0]}, ValueError, "call replace_attention on its LlamaForC"),
    (fresh, {"model": lambda: decoder("gpt2"), "causal": False}, ValueError, "causal is set by the original to True"),
    (fresh, {"model": lambda: decoder("gpt2"), "n_embd": 64}, ValueError, "n_embd is set by the original"),
    *((multihead, {"x": ROW, "memory": other}, ValueError, "one tensor") for other in (ROW[:, 1:], ROW.double())),
    (multihead, {"x": ROW.detach().requires_grad_(), "memory": ROW}, ValueError, "one tensor"),
    (multihead, {"x": ROW, "attn_mask": ROW[0]}, ValueError, r"attn_mask .* \(3, 3\) or \(4, 3, 3\), got \(3, 32\)"),
    (multihead, {"x": ROW, "key_padding_mask": ROW}, ValueError, r"key_padding_mask .* shape \(1, 3\), got \(1, 3, 32"),
    (multihead, {"x": torch.nested.nested_tensor([ROW[0]])}, TypeError, "dense tensor, got a nested tensor"),
    (multihead, {"x": ROW, "key_padding_mask": ONES[:1, :3]}, TypeError, "mask must be bool, or float.*torch.int64"),
    (with_a_mask_of_tokens, {}, ValueError, "set_attn_implementation"),
    (by_a_function_of_its_own, {}, ValueError, "LlamaAttention does not call transformers' attention functions"),
    (generated_by_fresh_mixers, {"cache_implementation": "static", "disable_compile": True}, ValueError, "DynamicCach"),
]


@pytest.mark.parametrize("function, fields, error, words", TABLE, ids=[f"{n} {row[3]}" for n, row in enumerate(TABLE)])
def test_what_is_impossible_is_refused_in_one_sentence(function, fields, error, words):
    with pytest.raises(error, match=words):
        function(**fields)
