"""What callers of transformers' models pass: documents under four names, shifted labels, and names that say nothing."""

from __future__ import annotations

import string

import pytest
import torch
import transformers
from small_models import VOCABULARY, every_kind, lively, small_config, tokens

from fem.models import FEMForCausalLM
from fem.models.cache import CACHE, FEMCache

CUTS = [(0, 5), (5, 6), (6, 12)]
LENGTHS = torch.tensor([end - start for start, end in CUTS])
IDS = torch.arange(len(CUTS)).repeat_interleave(LENGTHS)[None]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
COLLATE = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
SAID_AS = {
    "segments": {"segment_ids": IDS},
    "positions": {"position_ids": POSITIONS},
    "positions_beside_a_whole_mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 12, dtype=torch.long)},
    "flattening_collator": COLLATE([{"input_ids": [0] * (end - start)} for start, end in CUTS]),
}
for of_labels in ("input_ids", "labels"):
    SAID_AS["flattening_collator"].pop(of_labels)


@pytest.mark.parametrize("prior, attention", [("softmax", "exact"), ("softmax", "sdpa"), ("gla", "exact")])
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_either_name_of_transformers(name, prior, attention):
    model, ids = lively(FEMForCausalLM(small_config(prior_type=prior))), tokens(2, 9)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        cache = getattr(model(ids[:, :5], use_cache=True), CACHE)
        later = model(ids[:, 5:], **{name: cache})
        torch.testing.assert_close(later.logits, model(ids).logits[:, 5:])
        with pytest.raises(ValueError, match="given twice"):
            model(ids[:, 5:], past_key_values=cache, cache=cache)


def separate(model, ids):
    return torch.cat([model(ids[:, start:end]).logits for start, end in CUTS], 1)


@every_kind
@pytest.mark.parametrize("name", list(SAID_AS))
def test_documents_said_in_any_way_equal_separate_runs(model, name):
    ids = tokens(1, 12)
    told = model(ids, labels=ids, **SAID_AS[name])
    torch.testing.assert_close(told.logits, separate(model, ids), rtol=1e-5, atol=1e-5)
    losses = [model(ids[:, a:b], labels=ids[:, a:b]).loss * (b - a - 1) for a, b in CUTS if b - a > 1]
    torch.testing.assert_close(told.loss, sum(losses) / sum(b - a - 1 for a, b in CUTS))
    empty = FEMCache(model.config.num_hidden_layers)
    torch.testing.assert_close(model(ids, labels=ids, past_key_values=empty, **SAID_AS[name]).loss, told.loss)
    assert not torch.allclose(told.logits, model(ids).logits, atol=1e-3)


@every_kind
def test_padded_rows_are_single_ones_and_masked_tokens_open_no_document(model):
    """generate() gives padded tokens a position of their own, and gaps in a mask leave gaps in plain positions."""
    ids, mask = tokens(6, 11), torch.ones(6, 11, dtype=torch.long)
    mask[1, :7] = mask[2, :10] = mask[3, 4:] = mask[4, 1:] = mask[5, 3:5] = 0
    batch, kept = model(ids, attention_mask=mask).logits, mask.bool()
    for row in range(5):
        alone = model(ids[row, kept[row]][None]).logits[0]
        torch.testing.assert_close(batch[row, kept[row]], alone, rtol=1e-5, atol=1e-5)
    counted = mask.cumsum(-1) - 1
    for positions in (*(counted.masked_fill(~kept, at) for at in (0, 1)), torch.arange(11)[None]):
        found = model(ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(found[kept], batch[kept])


@every_kind
def test_documents_and_padding_in_one_row(model):
    ids, mask = tokens(1, 14), torch.ones(1, 14, dtype=torch.long)
    mask[0, 12:] = 0
    positions = torch.cat([POSITIONS, torch.zeros(1, 2, dtype=torch.long)], 1)
    found = model(ids, attention_mask=mask, position_ids=positions).logits[:, :12]
    torch.testing.assert_close(found, separate(model, ids[:, :12]), rtol=1e-5, atol=1e-5)


@every_kind
def test_shifted_labels_are_not_shifted_again(model):
    ids = tokens(2, 9)
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    expected = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected)


@every_kind
def test_names_that_say_nothing_are_set_aside(model):
    ids = tokens(2, 9)
    extra = {"cache_position": torch.arange(9), "token_type_ids": ids, "max_length_q": 9, "tokenizer": object()}
    torch.testing.assert_close(model(ids, **extra).logits, model(ids).logits)
    body = model.base_model  # trl's distillation asks it for as many rows as it needs logits of
    torch.testing.assert_close(body(ids, logits_to_keep=3).last_hidden_state, body(ids).last_hidden_state)


@every_kind
def test_generation_stops_at_strings(model):
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: i for i, letter in enumerate((string.ascii_letters + string.digits)[:VOCABULARY])}
    spelling = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    spelling.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=spelling)
    options = {"max_new_tokens": 12, "do_sample": False}
    whole = model.generate(tokens(1, 5), **options)
    stop = tokenizer.decode(whole[0, 7:9])
    stopped = model.generate(tokens(1, 5), stop_strings=[stop], tokenizer=tokenizer, **options)
    assert torch.equal(stopped, whole[:, : stopped.shape[1]])
    assert stopped.shape[1] < whole.shape[1]
