"""`fem generate`: a prompt continued token by token."""

import math
from types import SimpleNamespace

import pytest
import torch
from command_line import fem
from trainings import argmax_continuation, save_random_model

from fem.train.checkpoints import load_language_model
from fem.train.generate import continue_prompt

CONTEXT = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = ["the sun sees the moon.", "the bird sees the leaf and nobody sees it"] * 3
    return save_random_model(tmp_path_factory.mktemp("model"), texts, CONTEXT)


@pytest.fixture(scope="module")
def model(folder):
    return load_language_model(folder)


def keeping(pieces):
    """A streamer that puts what it is given into a list."""
    return SimpleNamespace(put=lambda value: pieces.extend(value.flatten().tolist()), end=lambda: None)


@pytest.mark.parametrize("temperature", [0, 1e-320])
def test_without_temperature_the_likeliest_tokens_come_one_by_one(model, temperature):
    network, tokenizer = model
    ids, pieces = tokenizer("the sun")["input_ids"], []
    given = {"max_new_tokens": 7, "temperature": temperature, "streamer": keeping(pieces)}
    text = continue_prompt(network, tokenizer, "the sun", **given)
    wanted = argmax_continuation(network, ids, 7)
    assert tokenizer.eos_token_id not in wanted
    assert pieces == wanted
    assert text == tokenizer.decode(wanted[len(ids) :])


def test_a_seed_is_a_text_and_leaves_the_random_state_alone(model):
    before = torch.random.get_rng_state()
    texts = [continue_prompt(*model, "the", max_new_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_empty_prompt_begins_a_document(model):
    network, tokenizer = model
    text = continue_prompt(network, tokenizer, "", max_new_tokens=3, temperature=0)
    assert text == tokenizer.decode(argmax_continuation(network, [tokenizer.eos_token_id], 3)[1:])


def test_a_prompt_of_its_own_fills_the_context(model):
    (network, tokenizer), pieces = model, []
    continue_prompt(network, tokenizer, "the sun", temperature=3.0, streamer=keeping(pieces))
    assert len(pieces) == CONTEXT or pieces[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"prompt": "the " * 80}, r"must fit into the context of 48 tokens, got \d+ and 1\."),
        ({"prompt": "the", "max_new_tokens": 48}, "must fit into the context of 48 tokens, got 1 and 48"),
        ({"prompt": "the \udcff"}, "prompt must be text in UTF-8, got 'the "),
        ({"prompt": "the", "max_new_tokens": 0}, "max_new_tokens.* must be greater than 0"),
        ({"prompt": "the", "temperature": -1.0}, "temperature.* has to be a strictly positive float"),
        ({"prompt": "the", "temperature": math.nan}, "temperature.* has to be a strictly positive float"),
        ({"prompt": "the", "top_k": -1}, "top_k.* has to be a strictly positive integer"),
    ],
)
def test_what_cannot_be_generated_is_one_sentence(as_users_run, model, given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        continue_prompt(*model, **given)


def test_an_empty_prompt_needs_a_token_that_begins_it(folder):
    network, tokenizer = load_language_model(folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="prompt must hold text"):
        continue_prompt(network, tokenizer, "")


def test_the_command_prints_prompt_and_continuation(folder, model, monkeypatch, capsys):
    options = ["--model", str(folder), "--prompt", "the sun", "--max-new-tokens", "5", "--temperature", "0"]
    assert not fem(monkeypatch, "generate", *options)
    assert capsys.readouterr().out.startswith("the sun")
