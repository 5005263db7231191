"""A dataset of the hub: no more of it than the recipe needs, and the same tokens however often the reading stopped."""

import os
import random
import signal
from functools import partial

import hub_server
import numpy as np
import pytest
from forked import Training
from trainings import WORDS, losses, tiny

from fem.train import data
from fem.train.tokenizer import train_tokenizer

FILES = 5


def texts(index):
    draw = random.Random(index)
    return [" ".join(draw.choices(WORDS, k=draw.randint(20, 180))) for _ in range(23)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts(0), 300).save_pretrained(folder)
    return folder


@pytest.fixture
def server():
    with hub_server.Hub([texts(index) for index in range(FILES)]) as running:
        yield running


def recipe(tokenizer, **changes):
    """Reads 4,704 tokens of the 12,000 or so."""
    given = {"subset": hub_server.SUBSET, "tokenizer": str(tokenizer), "batch_size": 16, "save_steps": 12}
    return tiny(hub_server.NAME, **given | changes)


def prepared(address, cache, kill_at):
    """In the process that trains: the hub, a note after every few documents, and when to be killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    hub_server.use(address, cache)
    data.SECONDS_A_NOTE, data.AT_ONCE = 0.0, 2_000
    notes, note = iter(range(1, 1_000)), data.note

    def killed(sentence):
        if "tokenising" in sentence and next(notes) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        note(sentence)

    data.note = killed


def trained(server, recipe, output, kill_at=None, resume=False, processes=None, code=0):
    """What a training says that ends with this status."""
    before = partial(prepared, server.address, output.parent / "cache", kill_at)
    ended = Training(recipe, output, processes, resume, before).end(240)
    assert ended.code == code, ended.said
    return ended.said


def assert_tokens(output, recipe, tokenizer):
    from transformers import AutoTokenizer

    documents = [text for index in range(FILES) for text in texts(index)]
    expected = np.concatenate(list(data.encoded(documents, AutoTokenizer.from_pretrained(tokenizer))))
    rows = data.Rows(output / "tokens", 24)
    assert recipe.tokens <= len(rows.tokens) < recipe.tokens + 1_500
    assert np.array_equal(rows.tokens, expected[: len(rows.tokens)])
    assert np.array_equal(rows.ends, np.flatnonzero(rows.tokens == expected[-1]) + 1)


@pytest.mark.parametrize("kill_at", [None, 1, 9])
def test_no_more_is_read_than_the_recipe_needs_and_a_killed_reading_goes_on(server, tokenizer, tmp_path, kill_at):
    wanted = recipe(tokenizer)
    if kill_at is not None:
        trained(server, wanted, tmp_path / "run", kill_at, code=-signal.SIGKILL)
        assert (tmp_path / "run" / ".tokens" / "done.json").exists()
    said = trained(server, wanted, tmp_path / "run")
    assert_tokens(tmp_path / "run", wanted, tokenizer)
    assert f"of {wanted.tokens:,} so far" in said
    assert server.asked[hub_server.file_name(4)] == 0


@pytest.mark.slow
def test_two_processes_train_on_the_same_tokens_which_one_of_them_reads(server, tokenizer, tmp_path):
    """The connection is dropped once, the reading killed in the middle, and the same command goes on."""
    wanted = recipe(tokenizer)
    server.cuts[hub_server.file_name(0)] = 1
    trained(server, wanted, tmp_path / "run", kill_at=5, processes=2, code=1)
    assert (tmp_path / "run" / ".tokens" / "done.json").exists()
    said = trained(server, wanted, tmp_path / "run", processes=2)
    assert_tokens(tmp_path / "run", wanted, tokenizer)
    assert said.count(f"of {wanted.tokens:,} so far") < 30, "one process says how far it is"
    assert server.asked[hub_server.file_name(4)] == 0
    trained(server, wanted, tmp_path / "alone")
    found = [[x["train_loss"] for x in losses(tmp_path / name) if "train_loss" in x] for name in ("alone", "run")]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_hub_that_is_gone_is_said_and_the_same_command_goes_on(server, tokenizer, tmp_path):
    server.cuts[hub_server.file_name(1)] = 1_000
    wanted = recipe(tokenizer)
    said = trained(server, wanted, tmp_path / "run", code=75)
    assert "'made/up' can no longer be read" in said
    assert "to go on: fem train" in said
    server.cuts.clear()
    trained(server, wanted, tmp_path / "run", resume=True)
    assert_tokens(tmp_path / "run", wanted, tokenizer)


def test_more_steps_read_the_same_tokens_again(server, tokenizer, tmp_path):
    trained(server, recipe(tokenizer, max_steps=6), tmp_path / "run")
    before = (tmp_path / "run" / "tokens" / "tokens.bin").read_bytes()
    server.gone = True
    trained(server, recipe(tokenizer, max_steps=12), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "tokens" / "tokens.bin").read_bytes() == before


def test_what_the_hub_lacks_is_said_before_anything_is_written(server, tokenizer, tmp_path):
    said = trained(server, recipe(tokenizer, field="body"), tmp_path / "run", code=2)
    assert "must have text in 'body', got the fields text, id; name the field with --field." in said
    server.gone = True
    said = trained(server, recipe(tokenizer), tmp_path / "run", code=2)
    assert "error: --data must be a file, a folder or a dataset of the hub, got 'made/up': no way to" in said
    assert not (tmp_path / "run").exists()
