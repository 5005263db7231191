"""Originals trained on real text, then replaced: the same model at first, and one that goes on learning."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="originals of transformers need the extra 'lm'")
pytest.importorskip("datasets", reason="training on text needs the extra 'lm'")

from fem import replace_attention
from fem.models import load_replaced
from fem_research.lm.finetune import FinetuneRecipe, finetune, train_original, validate
from fem_research.lm.text import build_corpus

pytestmark = pytest.mark.slow
RECIPE = FinetuneRecipe(layers=2, width=64, vocabulary=512, context=64, steps=250, further_steps=120, runs=1)


@pytest.fixture(scope="module")
def corpus():
    data = Path(os.environ.get("FEM_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    text = data / "text" / "state_union_train.txt"
    if not text.exists():
        pytest.skip(f"no text at {text}; set FEM_DATA to the folder that holds text/state_union_train.txt")
    return build_corpus(text, RECIPE.vocabulary, RECIPE.context)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def original(request, corpus):
    torch.set_num_threads(1)
    return train_original(replace(RECIPE, architecture=request.param), corpus)


def test_replaced_original_keeps_logits_and_loss(original, corpus):
    assert validate(original, corpus) < 5.0  # it has learnt: a uniform guess costs 6.2
    model = replace_attention(copy.deepcopy(original))
    ids = corpus.validation["input_ids"][:64]
    torch.testing.assert_close(model(ids).logits, original(ids).logits, atol=1e-3, rtol=0)
    assert validate(model, corpus) == pytest.approx(validate(original, corpus), rel=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_replaced_original_generates_as_the_original_does_cached_and_uncached(original, corpus, beams):
    model = replace_attention(copy.deepcopy(original))
    prompt = corpus.validation["input_ids"][:3][:, :16]
    options = {"max_new_tokens": 32, "do_sample": False, "num_beams": beams}
    cached = model.generate(prompt, **options)
    torch.testing.assert_close(cached, model.generate(prompt, use_cache=False, **options))
    torch.testing.assert_close(cached, original.generate(prompt, **options))


def test_replaced_original_comes_back_from_its_folder(original, corpus, tmp_path):
    model = replace_attention(copy.deepcopy(original), lambda_init=-1.0)
    model.save_pretrained(tmp_path)
    ids = corpus.validation["input_ids"][:8]
    torch.testing.assert_close(load_replaced(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fem_learns_at_least_as_well_as_the_continued_original(name, corpus):
    found = finetune(replace(RECIPE, architecture=name, mixers="attention,attention+LTG"), corpus)
    original, fem = found["attention"], found["attention+LTG"]
    assert fem["before"] == pytest.approx(original["before"], rel=1e-3)
    assert original["after"][0] < original["before"]
    assert fem["after"][0] < original["after"][0] + 0.01
