"""Texts to train on: read in pieces with the tokens of the whole text, in little memory; unfit files are refused."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from trainings import tiny

from fem.train import data, documents, hub, packing, pieces, training
from fem.train.tokenizer import END, train_tokenizer

WORDS = ["sun", "moon,", "it's", "42", "äöü", "x", "日本語", "(a)", "e\u0301", "--"]


def made_up(seed, length=3000):
    draw = random.Random(seed)
    gaps = [" ", " ", " ", "\n", "\n\n", "  ", "\t", " \n", "\u3000", "\r"]
    return "".join(draw.choice(WORDS) + draw.choice(gaps) for _ in range(length))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([made_up(0)], 400)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_the_pieces_are_those_of_the_text(tokenizer, monkeypatch, seed):
    monkeypatch.setattr(pieces, "PIECE", 50)
    text = made_up(seed, 400)
    found = list(pieces.pieces(text))
    assert "".join(found) == text
    assert len(found) > 20
    assert [isinstance(piece, pieces.Part) for piece in found] == [True] * (len(found) - 1) + [False]
    tokens = [ids[:-1] for ids in packing.encode(found, tokenizer)]
    (whole,) = packing.encode([text], tokenizer)
    assert np.concatenate(tokens).tolist() == whole[:-1].tolist()


@pytest.mark.parametrize("text", ["", "a", "x" * 500, " " * 500, "\n" * 301 + "y"])
def test_texts_without_a_place_to_cut_lose_nothing(monkeypatch, text):
    monkeypatch.setattr(pieces, "PIECE", 50)
    assert "".join(pieces.pieces(text)) == text


def test_a_file_in_pieces_has_one_end(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(made_up(1))
    files = documents.local_files(str(tmp_path / "a.txt"))
    whole = packing.write_tokens(documents.local_documents(files, "text"), tokenizer, tmp_path / "whole", [])
    monkeypatch.setattr(pieces, "PIECE", 100)
    parted = packing.write_tokens(documents.local_documents(files, "text"), tokenizer, tmp_path / "parted", [])
    assert whole.files[0].tokens.tolist() == parted.files[0].tokens.tolist()
    assert parted.files[0].ends.tolist() == parted.limits


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    assert list(documents.local_documents(documents.local_files(str(tmp_path)), "text")) == ["one", "two"]


def test_special_tokens_in_the_text_are_text(tokenizer):
    (ids,) = packing.encode([f"a{END}b"], tokenizer)
    assert tokenizer.decode(ids[:-1]) == f"a{END}b"
    assert ids.tolist().count(tokenizer.eos_token_id) == 1


def test_truncation_and_padding_of_a_tokenizer_are_left_out(tokenizer):
    texts = ["the sun sees the moon. " * 9, "the"]
    wanted = [ids.tolist() for ids in packing.encode(texts, tokenizer)]
    tokenizer(texts, padding=True, truncation=True, max_length=8)  # which the tokenizer remembers, in its file too
    assert [ids.tolist() for ids in packing.encode(texts, tokenizer)] == wanted
    assert len(wanted[0]) > 8 > len(wanted[1]) == 4


def test_the_case_of_an_ending_says_nothing(tmp_path):
    (tmp_path / "a.TXT").write_text("one")
    (tmp_path / "b.Jsonl").write_text('{"text": "two"}\n')
    assert list(documents.local_documents(documents.local_files(str(tmp_path)), "text")) == ["one", "two"]


def line(value):
    return (json.dumps({"text": value}) + "\n").encode()


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.jsonl", line("fine") + line(None), "a.jsonl, record 2 must have text in 'text', got null"),
        ("a.jsonl", line({"deep": "text"}), "a.jsonl, record 1 must have text in 'text', got a dict"),
        ("a.jsonl", line("x\ud800y"), "a.jsonl, record 1 must be text, got half of a surrogate pair at character 1"),
        ("a.jsonl", line("") * 3 + line(" \n"), "must not be empty, got '.*a.jsonl', whose every text is white space"),
        ("a.jsonl", b"[" * 200_000 + b"\n", "a.jsonl' with a line nested too deeply, 1"),
        ("a.txt", b" \n\t", "must not be empty, got '.*a.txt'"),
        ("a.txt", b"", "must not be empty"),
        ("a.txt", b"\xff\xfe\x00\x81", "must be UTF-8"),
        ("a.txt", b"words \x00", "zero bytes"),
        ("a.jsonl", b'{"text": "whole"}\n{"text": "cut', "another line 2"),
        ("a.jsonl", b'"text"\n', "must have text in 'text', got str"),
        ("a.parquet", b"PAR1 cut off", "must be whole Parquet"),
        ("a.exe", b"MZ", "data must be .txt"),
    ],
)
def test_files_without_usable_text_are_refused_by_name(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        list(documents.local_documents(documents.local_files(str(tmp_path / name)), "text"))


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, inside):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"must be regular files, got '.*a.txt'"):
        documents.local_files(str(tmp_path if inside else tmp_path / "a.txt"))


def test_a_linked_folder_is_refused_and_not_left_out(tmp_path):
    for folder in ("data", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("the sun")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"no linked folders, got '.*more'; name what it links to"):
        documents.local_files(str(tmp_path / "data"))
    assert len(documents.local_files(str(tmp_path / "data" / "more"))) == 1


def test_the_digest_of_data_depends_on_bytes_and_kind_alone(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "one.txt").write_text("same")
    (tmp_path / "b" / "two.md").write_text("same")
    (tmp_path / "b" / "three.jsonl").write_text("same")
    told = lambda *names: documents.content([tmp_path / name for name in names])  # noqa: E731
    assert told("a/one.txt") == told("b/two.md")
    assert told("a/one.txt") != told("b/three.jsonl")
    assert told("a/one.txt", "b/three.jsonl") != told("b/three.jsonl", "a/one.txt")


def test_what_is_not_read_is_said(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.csv", "c.pdf", "d.json", "e.gz"):
        (tmp_path / "in" / name).write_text("sun")
    recipe = tiny(tmp_path / "in", subset="english", tokenizer="somewhere", vocabulary=999)
    data.say_unread(recipe)
    told = capsys.readouterr().err.splitlines()
    assert "'english' is not read" in told[0]
    assert "vocabulary = 999 is not read" in told[1]
    assert told[2].endswith("are not read: b.csv, c.pdf, d.json and 1 more.")
    data.say_unread(tiny(tmp_path / "in" / "a.txt", field="body"))
    assert "field = 'body' is not read" in capsys.readouterr().err
    data.say_unread(tiny(tmp_path / "in" / "a.txt"))
    assert capsys.readouterr().err == ""


def test_a_hub_that_does_not_answer_is_refused_in_one_sentence(monkeypatch, tmp_path):
    class Silent:
        def head(self, *_, **__):
            raise TimeoutError

    monkeypatch.setattr("huggingface_hub.utils.get_session", Silent)
    with pytest.raises(ValueError, match=r"got 'some/where': no way to .* within 6 seconds .TimeoutError"):
        hub.begin(tiny("some/where"), tmp_path / "tokens", [])
    with pytest.raises(ValueError, match=r"tokenizer 'some/where' cannot be read: no way to "):
        training.run(tiny("some/data", tokenizer="some/where"), tmp_path / "run")


# VmHWM, as getrusage's ru_maxrss starts at the size of the process that started this one (Linux carries it over exec).
MEASURE = r"""
import re, sys
from pathlib import Path
from fem.train import documents, packing
from fem.train.pieces import without_endless_words
from fem.train.tokenizer import train_tokenizer
files = [Path(sys.argv[1])]
tokenizer = train_tokenizer(without_endless_words(documents.local_documents(files, "text")), 300)
packing.write_tokens(documents.local_documents(files, "text"), tokenizer, Path(sys.argv[2]), [])
print(1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_text_of_33_mb_takes_less_than_a_gigabyte(tmp_path):
    text = made_up(3, 20_000)
    with open(tmp_path / "a.txt", "w") as file:
        while file.tell() < 33e6:
            file.write(text)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "a.txt"), str(tmp_path / "tokens")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9
