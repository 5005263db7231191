"""Generation: with the cache as without, padded as alone, and whatever transformers does to a cache in between."""

from __future__ import annotations

import copy
from functools import partial
from itertools import cycle, product

import pytest
import torch
from processes import printed
from small_models import MODELS, every_kind, left_padded, small_model, tokens
from transformers import DynamicCache, StaticCache

from fem import PRIORS

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
CACHED_MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "beam": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "sampled beam": {"do_sample": True, "num_beams": 4},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
}


def generate(model, ids, **options):
    torch.manual_seed(3)
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options})


SCANS = [prior for prior in PRIORS if prior != "softmax"]
SERVED = {"full": {"use_conv": False}, "split": {"use_conv": False, "free_share": 0.5}, "conditioner": {}}
WAYS = {  # fields of a model, the mode in which it generates, and how
    f"{name}, {mode}, without a cache": (MODELS[name], mode, {"use_cache": False})
    for name, mode in zip(MODELS, cycle(CACHED_MODES))
}
WAYS |= {
    f"{name}, its prompt in chunks of {size}": (MODELS[name], "greedy", {"prefill_chunk_size": size})
    for name, size in zip(MODELS, cycle([4, 1, 20]))
}
WAYS |= {
    f"{name}, {mode}, over a static cache": (MODELS[name], mode, {"cache_implementation": "static"})
    for name, mode in zip(SCANS, cycle(CACHED_MODES))
}
WAYS |= {
    f"{name}, {mode}, by sdpa over a {cache} cache": ({"mixer": SERVED[name]}, mode, {"cache_implementation": cache})
    for (name, cache), mode in zip(product(SERVED, ["static", "dynamic"]), cycle(CACHED_MODES))
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_writes_the_same_text_in_whatever_way_it_is_called(way):
    fields, mode, how = WAYS[way]
    model, ids = small_model(**fields), tokens(2, 9)
    given = {"attention_mask": left_padded(9, 9, 6), **CACHED_MODES[mode]}
    expected = generate(model, ids, **given)
    assert expected.shape[1] == 15
    model.set_attn_implementation("sdpa" if "sdpa" in way else "exact")
    assert torch.equal(generate(model, ids, **given, **how), expected)


@every_kind
def test_returned_cache_continues_the_text(model):
    ids = tokens(2, 5)
    whole = generate(model, ids)
    first = generate(model, ids, max_new_tokens=2, return_dict_in_generate=True)
    second = generate(model, first.sequences, max_new_tokens=4, past_key_values=first.past_key_values)
    assert torch.equal(second, whole)


@every_kind
def test_copied_cache_continues_a_prompt_twice(model):
    prompt, endings = tokens(1, 6), [tokens(1, 3, seed) for seed in (5, 6)]
    cache = model(prompt, use_cache=True).past_key_values
    for ending in endings:
        continued = model(ending, past_key_values=copy.deepcopy(cache)).logits
        close(continued, model(torch.cat([prompt, ending], 1)).logits[:, 6:])


@every_kind
def test_left_padded_batch_generates_as_single_rows(model):
    ids, lengths = tokens(3, 8), (8, 5, 1)
    padded = generate(model, ids, attention_mask=left_padded(8, *lengths))
    for row, length in enumerate(lengths):
        single = generate(model, ids[row : row + 1, 8 - length :])
        assert torch.equal(padded[row, 8 - length :], single[0])


def test_rows_longer_than_the_config_says_are_read_and_written(softmax_model):
    """As by other models with rotary positions, in the exact form and by an engine."""
    ids = tokens(2, 70)
    exact = generate(softmax_model, ids)
    assert exact.shape == (2, 76)
    embeddings = softmax_model.get_input_embeddings()(ids)
    assert torch.equal(generate(softmax_model, None, inputs_embeds=embeddings), exact[:, 70:])
    softmax_model.set_attn_implementation("eager")
    assert softmax_model(ids, use_cache=False).logits.isfinite().all()


@every_kind
def test_packed_documents_continue_across_calls(model):
    ids, segments = tokens(1, 10), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2]])
    whole = model(ids, segment_ids=segments).logits
    first = model(ids[:, :5], segment_ids=segments[:, :5], use_cache=True)
    second = model(ids[:, 5:], segment_ids=segments[:, 5:], past_key_values=first.past_key_values)
    close(torch.cat([first.logits, second.logits], 1), whole)


reads_each_way = pytest.mark.parametrize(
    "model, reads",
    [*((kind, "exact") for kind in ("softmax", "mamba", "hybrid")), ("softmax", "sdpa")],
    indirect=["model"],
)


@reads_each_way
def test_rows_of_a_cache_can_be_reordered_selected_and_repeated(model, reads):
    model.set_attn_implementation(reads)
    ids, more = tokens(3, 6), tokens(4, 2, seed=7)
    rows = torch.tensor([2, 0, 0, 1])
    for change in (lambda cache: cache.reorder_cache(rows), lambda cache: cache.batch_select_indices(rows)):
        cache = model(ids, use_cache=True).past_key_values
        change(cache)
        close(model(more, past_key_values=cache).logits, model(torch.cat([ids[rows], more], 1)).logits[:, 6:])
    cache = model(ids[:2], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    repeated = torch.cat([ids[:2].repeat_interleave(2, 0), more], 1)
    close(model(more, past_key_values=cache).logits, model(repeated).logits[:, 6:])


@reads_each_way
def test_a_cache_of_padded_rows_goes_on_without_position_ids(model, reads):
    model.set_attn_implementation(reads)
    ids, mask = tokens(2, 9), left_padded(9, 9, 6)
    cache = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    found = model(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits
    close(found, model(ids, attention_mask=mask).logits[:, 6:])


@every_kind
def test_reset_cache_has_seen_nothing(model):
    cache = model(tokens(2, 6), use_cache=True).past_key_values
    assert cache.nbytes > 0
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    close(model(tokens(2, 3), past_key_values=cache).logits, model(tokens(2, 3)).logits)


@every_kind
def test_state_of_a_recurrent_model_has_a_fixed_size(model):
    config = model.config.mixer_configs()
    sizes = [model(tokens(1, time), use_cache=True).past_key_values.nbytes for time in (7, 29)]
    grows = any(mixer.prior_type == "softmax" and mixer.window is None for mixer in config)
    assert (sizes[1] > sizes[0]) == grows


def test_no_cache_is_built_unless_it_can_be_of_use(softmax_model):
    ids = tokens(1, 5)
    assert softmax_model(ids).past_key_values is not None
    assert softmax_model(ids, labels=ids).past_key_values is None
    assert softmax_model(ids, use_cache=False).past_key_values is None
    assert softmax_model.train()(ids).past_key_values is None


@pytest.mark.parametrize("draft", [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}])
def test_an_engine_generates_by_drafts(draft):
    model = small_model(mixer={"use_conv": False})
    expected = generate(model, tokens(1, 6))
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model, tokens(1, 6), **draft), expected)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("prior", SCANS)
def test_a_static_cache_keeps_its_addresses_and_counts_on_the_device(prior, early):
    scan_model, ids = small_model(prior_type=prior), tokens(2, 9)
    cache = StaticCache(config=scan_model.config, max_cache_len=9)
    if early:
        cache.early_initialization(2, 2, 8, torch.float32, "cpu")
    scan_model(ids[:, :5], past_key_values=cache)
    addresses = [[x.data_ptr() for x in layer.state.tensors()] for layer in cache.layers]
    copied = copy.deepcopy(cache)
    for at, width in ((5, 6), (6, 9)):  # a mask of what was read, and one as long as the cache
        mask = (torch.arange(width) <= at).long().expand(2, -1)
        scan_model(ids[:, at : at + 1], past_key_values=cache, attention_mask=mask)
    assert [[x.data_ptr() for x in layer.state.tensors()] for layer in cache.layers] == addresses
    assert cache.is_compileable
    assert cache.get_seq_length().item() == 7
    assert copied.get_seq_length().item() == 5
    whole = scan_model(ids).logits
    close(scan_model(ids[:, 7:], past_key_values=cache).logits, whole[:, 7:])
    close(scan_model(ids[:, 5:], past_key_values=copied).logits, whole[:, 5:])
    cache.reset()
    close(scan_model(ids, past_key_values=cache).logits, whole)


@pytest.mark.parametrize("mixer", SERVED.values(), ids=SERVED)
def test_the_mask_of_an_engine_may_be_as_long_as_the_static_cache(mixer):
    model, ids = small_model(mixer=mixer), tokens(2, 6)
    model.set_attn_implementation("sdpa")
    cache, mask = StaticCache(config=model.config, max_cache_len=9), (torch.arange(9) <= 5).long().expand(2, -1)
    model(ids[:, :5], past_key_values=cache)
    close(model(ids[:, 5:], past_key_values=cache, attention_mask=mask).logits, model(ids).logits[:, 5:])


ONE_GRAPH = """
import torch
from transformers import CompileConfig
from fem import PRIORS
from fem.models import FEMForCausalLM
from small_models import left_padded, lively, small_config, tokens

for prior in PRIORS:
    torch._dynamo.reset()
    model = lively(FEMForCausalLM(small_config(prior_type=prior)))
    if prior == "softmax":
        model.set_attn_implementation("sdpa")
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    for length in (9, 7):
        mask = left_padded(length, length, length - 3)
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        wanted = model.generate(tokens(2, length), **how)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = model.generate(
                tokens(2, length), cache_implementation="static", compile_config=compiled, **how
            )
        assert torch.equal(found, wanted), (prior, length)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, prior
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)  # the prompt, too
    assert torch.equal(model.generate(tokens(2, length), cache_implementation="static", **how), wanted), prior
    torch._dynamo.utils.counters.clear()
"""


@pytest.mark.slow
def test_a_step_over_a_static_cache_compiles_once():
    """For prompts of any length; on a GPU transformers captures it as a CUDA graph."""
    printed("-c", ONE_GRAPH)


def test_an_empty_cache_of_transformers_takes_the_states_of_any_layer(model):
    ids = tokens(2, 9)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        model(ids[:, :5], past_key_values=cache)
        assert cache.get_seq_length() == 5
        close(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:])
