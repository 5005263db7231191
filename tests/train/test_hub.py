"""A dataset of the hub: no more of it than the recipe needs, and the same tokens however often the reading stopped."""

import os
import random
import signal
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

import hub_server
from forked import Training
from trainings import WORDS, tiny

from fem.train import data, hub, packing
from fem.train.recipe import TrainRecipe
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


@pytest.fixture(scope="module")
def expected(tokenizer):
    """All tokens of the dataset."""
    from transformers import AutoTokenizer

    documents = [text for index in range(FILES) for text in texts(index)]
    return np.concatenate(list(packing.encode(documents, AutoTokenizer.from_pretrained(tokenizer))))


def recipe(tokenizer, **changes):
    """Reads 4,704 tokens of the 12,000 or so."""
    given = {"subset": hub_server.SUBSET, "tokenizer": str(tokenizer), "batch_size": 16, "save_steps": 12}
    return tiny(hub_server.NAME, **given | changes)


def prepared(address, cache, fault=None):
    """In the process that trains: the hub, notes and batches of a few documents, and what is to go wrong."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    hub_server.use(address, cache)
    hub.SECONDS_A_NOTE, packing.AT_ONCE = 0.0, 2_000
    if fault is not None:
        fault()


def killed_in_save(number, rank="0"):
    """kill -9 when tokens are on the disk and not yet counted."""
    if os.environ.get("RANK", "0") != rank:
        return
    write, saves = hub.write_json, iter(range(1, 1_000))

    def cut_off(path, content):
        if content.keys() == hub.NOTHING.keys() and next(saves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    hub.write_json = cut_off


def trained(server, recipe, output, processes=None, fault=None, resume=False):
    before = partial(prepared, server.address, output.parent / "cache", fault)
    return Training(recipe, output, processes, resume, before).end(120)


def read(output):
    found = packing.Tokens.open(output / "tokens")
    return np.concatenate([file.tokens for file in found.files]), found


def contents(rows):
    return [tuple(row["input_ids"].tolist()) for row in rows]


def assert_tokens(output, recipe, expected, beyond=1_500):
    tokens, found = read(output)
    assert found.limits == [recipe.tokens]
    assert recipe.tokens <= len(tokens) < recipe.tokens + beyond
    assert np.array_equal(tokens, expected[: len(tokens)])
    for file in found.files:
        assert np.array_equal(file.ends, np.flatnonzero(file.tokens == expected[-1]) + 1)
    assert not hub.staging(output / "tokens").exists()


def test_no_more_is_read_than_the_recipe_needs(server, tokenizer, expected, tmp_path):
    wanted = recipe(tokenizer)
    ended = trained(server, wanted, tmp_path / "run")
    assert ended.code == 0, ended.said
    assert_tokens(tmp_path / "run", wanted, expected)
    assert f"of {wanted.tokens:,} tokens" in ended.said
    assert server.asked[hub_server.file_name(1)] > 0
    assert server.asked[hub_server.file_name(3)] == 0


@pytest.mark.parametrize("save", [1, 3, 9])
def test_a_reading_that_was_killed_goes_on_to_the_same_tokens(server, tokenizer, expected, tmp_path, save):
    wanted = recipe(tokenizer, max_steps=12)
    ended = trained(server, wanted, tmp_path / "run", fault=partial(killed_in_save, save))
    assert ended.code == -signal.SIGKILL
    saved = sum(hub._counts(hub.staging(tmp_path / "run" / "tokens"), index)["tokens"] for index in range(FILES))
    assert (saved > 0) == (save > 1)
    ended = trained(server, wanted, tmp_path / "run")
    assert ended.code == 0, ended.said
    assert_tokens(tmp_path / "run", wanted, expected)


def test_a_broken_connection_is_made_again(server, tokenizer, expected, tmp_path):
    server.cuts[hub_server.file_name(1)] = 1
    wanted = recipe(tokenizer)
    assert trained(server, wanted, tmp_path / "run").code == 0
    assert server.cuts[hub_server.file_name(1)] == 0
    assert_tokens(tmp_path / "run", wanted, expected)


@pytest.mark.slow
def test_a_hub_that_another_process_lost_is_said_by_the_first(server, tokenizer, tmp_path):
    server.cuts[hub_server.file_name(1)] = 1_000
    ended = trained(server, recipe(tokenizer, micro_batch=8), tmp_path / "run", 2)
    assert ended.code == 1  # torchrun's
    assert ended.said.count("'made/up' can no longer be read") == 1


def test_a_field_that_the_dataset_lacks_is_said_before_anything_is_written(server, tokenizer, tmp_path):
    ended = trained(server, recipe(tokenizer, field="body"), tmp_path / "run")
    assert ended.code == 2
    assert "must have text in 'body', got the fields text, id; name the field with --field." in ended.said
    assert not (tmp_path / "run").exists()


def test_a_hub_that_is_gone_is_said_and_the_same_command_goes_on(server, tokenizer, expected, tmp_path):
    server.cuts[hub_server.file_name(1)] = 1_000
    wanted = recipe(tokenizer)
    ended = trained(server, wanted, tmp_path / "run")
    assert ended.code == 75
    assert "'made/up' can no longer be read" in ended.said
    assert "tokens are saved; to go on: fem train" in ended.said
    server.gone = True
    ended = trained(server, wanted, tmp_path / "run", resume=True)
    assert ended.code == 75, ended.said
    server.gone = False
    server.cuts.clear()
    assert trained(server, wanted, tmp_path / "run", resume=True).code == 0
    assert_tokens(tmp_path / "run", wanted, expected)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_read_the_same_tokens(server, tokenizer, expected, tmp_path, killed):
    wanted = recipe(tokenizer, micro_batch=8)
    if killed:
        ended = trained(server, wanted, tmp_path / "run", 2, partial(killed_in_save, 4, "1"))
        assert ended.code == 1
    ended = trained(server, wanted, tmp_path / "run", 2)
    assert ended.code == 0, ended.said
    a_file = len(expected) / FILES  # of which the second process may have read the rest
    assert_tokens(tmp_path / "run", wanted, expected, 2 * a_file)


def test_more_steps_add_tokens_and_leave_rows_as_they_were(server, tokenizer, expected, tmp_path):
    short, long = recipe(tokenizer, max_steps=6), recipe(tokenizer, max_steps=12)
    assert trained(server, short, tmp_path / "run").code == 0
    share = packing.Share(16, 16)
    few = data.load_data(short, tmp_path / "run", share)
    assert trained(server, long, tmp_path / "run", resume=True).code == 0
    tokens, found = read(tmp_path / "run")
    assert found.limits == [short.tokens, long.tokens]
    assert np.array_equal(tokens, expected[: len(tokens)])
    many = data.load_data(long, tmp_path / "run", share)
    assert contents(many.validation) == contents(few.validation)
    first = len(few.train.stretches[0])
    rows = contents(islice(many.train, 12 * 16))
    assert rows[:first] == contents(islice(few.train, first))
    assert len(set(rows)) == 12 * 16
    assert not set(rows) & set(contents(few.validation))


def test_a_dataset_smaller_than_the_recipe_is_read_whole_once(server, tokenizer, expected, tmp_path):
    assert trained(server, recipe(tokenizer, batch_size=64), tmp_path / "run").code == 0
    tokens, found = read(tmp_path / "run")
    assert np.array_equal(tokens, expected)
    assert found.limits == [len(expected)]
    asked = server.asked.total()
    assert trained(server, recipe(tokenizer, batch_size=64, max_steps=13), tmp_path / "run", resume=True).code == 0
    assert server.asked.total() == asked


def test_the_paper_reads_no_more_than_its_tokens():
    from fem.train.recipe import RECIPES

    assert RECIPES["paper-340m"].tokens == pytest.approx(15e9, rel=1e-3)
    assert TrainRecipe(max_steps=10, batch_size=4, context=8, validation_rows=3).tokens == 43 * 8


def test_rows_cross_files_as_if_there_were_one(tmp_path):
    ids, ends = np.arange(40, dtype=np.uint32), np.array([3, 10, 11, 25, 40])
    one = packing.Tokens([packing.TokenFile(ids, ends)], [40])
    cuts = [0, 10, 11, 25, 40]
    parts = [packing.TokenFile(ids[a:b], ends[(ends > a) & (ends <= b)] - a) for a, b in pairwise(cuts)]
    many = packing.Tokens(parts, [40])
    for context in (1, 7, 16, 40):
        for index in range(one.rows(context)):
            row, same = one.row(index, context), many.row(index, context)
            assert all(row[name].tolist() == same[name].tolist() for name in row)
