"""Text, training, comparison and inspection of small language models, and the demo that joins them."""

import functools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from rich.progress import Progress

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_utils

from fem.train.model import build_model
from fem.train.saving import SavingTrainer
from fem.train.tokenizer import END, train_tokenizer
from fem_research.common.trainer import training_arguments
from fem_research.demo import experiment as demo
from fem_research.lm import finetune
from fem_research.lm import small as lm
from fem_research.lm.settings import FinetuneRecipe
from fem_research.lm.text import build_corpus, python_documents, read_text

TINY = lm.LanguageRecipe(
    layers=2,
    width=32,
    heads=2,
    mlp_width=88,
    vocabulary=300,
    context=24,
    batch=4,
    steps=6,
    validations=2,
    validation_blocks=5,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Made-up sentences: whatever word comes, the next two follow from it."""
    words = ["sun", "moon", "river", "stone", "bird", "leaf"]
    draw = random.Random(0)
    lines = [f"the {w} sees the {words[(words.index(w) + 1) % 6]}." for w in draw.choices(words, k=1500)]
    path = tmp_path_factory.mktemp("text") / "made_up.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def corpus(text):
    return build_corpus(text, TINY.vocabulary, TINY.context)


def trained(corpus, recipe, mixer=None, folder=None):
    model = build_model(lm.model_config(recipe, mixer or {}, len(corpus.tokenizer)), recipe.seed)
    result = lm.train(model, corpus, recipe, Progress(disable=True), "", folder)
    return model, result, result.pop("curve")


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "text must be a file that exists"),
        (b"", "text must not be empty"),
        (b" \n\t ", "text must not be empty"),
        (b"\xff\xfe\x00\x81", "text must be UTF-8"),
        (b"words and \x00 zeros", "zero bytes"),
        (b"too short a text", "text is too short.*needs 24"),
    ],
)
def test_text_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        build_corpus(path, 300, 24)


def test_a_long_text_is_read_whole_without_its_byte_order_mark(tmp_path):
    content = "ein Satz.\n" * 20_000
    (tmp_path / "text.txt").write_bytes(("\ufeff" + content).encode())
    assert read_text(tmp_path / "text.txt") == content


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="text must be a file"):
        build_corpus(tmp_path, 300, 24)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["def one(x):\n    return x + 1\n"] * 3, 300)


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text or END in text


def test_blocks_are_the_text_in_order_and_the_held_out_part_is_its_end(text, corpus):
    decode = lambda blocks: corpus.tokenizer.decode(blocks["input_ids"][:].flatten())  # noqa: E731
    train, held_out = decode(corpus.train), decode(corpus.validation)
    content = text.read_text()
    assert content.startswith(train[: len(content) // 2])
    assert held_out[:200] in content[round(0.94 * len(content)) :]
    assert 0.04 < len(corpus.validation) / len(corpus.train) < 0.06
    assert all(
        torch.equal(block["input_ids"], block["labels"]) and len(block["labels"]) == 24 for block in corpus.train
    )


def test_bytes_per_token_is_that_of_the_held_out_text(text, corpus):
    content = text.read_text()[round(0.95 * len(text.read_text())) :]
    tokens = len(corpus.tokenizer(content + END)["input_ids"])
    assert corpus.bytes_per_token == pytest.approx(len(content.encode()) / tokens)


def test_every_python_ships_enough_text():
    documents = list(python_documents())
    assert sum(map(len, documents)) > 4e6
    assert not any("import unittest\n\n\nclass Test" in document for document in documents)


def test_weight_decay_spares_beta_norms_and_biases(corpus, tmp_path):
    model = build_model(lm.model_config(TINY, {}, 300), 0)
    args = training_arguments(TINY, TINY.learning_rate, tmp_path)
    trainer = SavingTrainer(output=tmp_path, keep=1, model=model, args=args, eval_dataset=corpus.validation)
    decayed = set(trainer.get_decay_parameter_names(model))
    spared = {name for name, _ in model.named_parameters()} - decayed
    assert decayed
    assert spared
    assert all("theta" in name or "norm" in name or name.endswith("bias") for name in spared)
    assert not any("theta" in name or "norm" in name or name.endswith("bias") for name in decayed)
    groups = {group["weight_decay"] for group in trainer.create_optimizer().param_groups}
    assert groups == {0.0, 0.1}


def test_the_same_seed_trains_the_same_model(corpus):
    runs = [trained(corpus, TINY) for _ in range(2)]
    assert [point["val_loss"] for point in runs[0][2] if "val_loss" in point] == [
        point["val_loss"] for point in runs[1][2] if "val_loss" in point
    ]
    for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert trained(corpus, replace(TINY, seed=1))[1]["val_loss"] != runs[0][1]["val_loss"]


def test_the_speed_of_a_training_that_diverged_is_that_of_the_steps_it_took(corpus, tmp_path):
    _, result, log = trained(corpus, replace(TINY, learning_rate=1e30), folder=tmp_path)
    assert (result["val_loss"], log[-1]["step"]) == (math.inf, 3)
    assert result["tokens_per_second"] == pytest.approx(3 * TINY.batch * TINY.context / log[-1]["seconds"])


def test_data_come_in_the_same_order_for_every_mixer(corpus, monkeypatch):
    orders = []
    for mixer in lm.MIXERS.values():
        seen = []
        forward = lm.FEMForCausalLM.forward

        @functools.wraps(forward)
        def watch(self, input_ids, *args, seen=seen, forward=forward, **kwargs):
            if self.training:
                seen.append(input_ids.clone())
            return forward(self, input_ids, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(lm.FEMForCausalLM, "forward", watch)
            trained(corpus, TINY, mixer)
        orders.append(torch.stack(seen))
    assert orders[0].shape == (6, 4, 24)
    assert torch.equal(*orders)


def test_validation_loss_is_the_mean_over_the_chosen_blocks(corpus):
    model, result, log = trained(corpus, replace(TINY, steps=7))
    chosen = [round(index) for index in torch.linspace(0, len(corpus.validation) - 1, 5).floor().tolist()]
    losses = []
    for index in chosen:
        ids = corpus.validation[index]["input_ids"][None]
        logits = model(ids).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    assert result["val_loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert result["parameters"] == model.num_parameters()
    assert result["tokens_per_second"] > 0
    assert [point["step"] for point in log] == [3, 6, 7]


def test_the_demo_writes_everything_it_promises(text, tmp_path):
    recipe = demo.DemoRecipe(
        text=text,
        seeds=2,
        argmax_steps=2,
        steps=4,
        layers=1,
        width=32,
        heads=2,
        mlp_width=88,
        vocabulary=300,
        context=32,
        batch_size=4,
    )
    folder = tmp_path / "runs" / "demo"
    demo.run(recipe, folder)
    results = json.loads((folder / "results.json").read_text())
    drawn_from = {"curves", "lm_curves", "reading"}
    assert {"argmax", "lm", "versions", "seed"} | drawn_from == results.keys()
    for name in ("fem", "softmax"):
        assert {"index_accuracy", "mse"} <= results["argmax"][name].keys()
        language = results["lm"][name]
        assert {"val_loss", "parameters", "tokens_per_second"} <= language.keys()
        assert language["val_loss"] == pytest.approx(sum(language["val_losses"]) / 2)
        assert math.isfinite(language["val_loss"])
        assert isinstance(language["parameters"], int)
    report = (folder / "report.md").read_text()
    for name in ("argmax.png", "lm.png", "reading.png"):
        assert f"({name})" in report
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert ">>>" in report
    assert "\nBlocks: 1, of width 32" in report
    assert "made_up.txt" in report
    assert str(tmp_path) not in report
    for name in ("config.json", "metrics.jsonl", "argmax.csv", "lm.csv"):
        assert (folder / name).exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = AutoTokenizer.from_pretrained(folder / "model")("the sun sees", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(tokens).logits).all()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["demo"]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_model_is_trained_further_with_every_mixer(architecture, text, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 300, "context": 24, "batch": 4}
    recipe = FinetuneRecipe(text=text, architecture=architecture, steps=2, further_steps=2, runs=1, **sizes)
    found = finetune.run(recipe, tmp_path / "run")["finetune"]
    assert found.keys() == set(recipe.mixer_names)
    assert all(math.isfinite(row["after"][0]) for row in found.values())
    assert not said
    assert "\nBlocks: 1, of width 16" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.slow
def test_training_learns_what_the_text_repeats(corpus):
    _, result, log = trained(corpus, replace(TINY, steps=150, learning_rate=5e-3))
    losses = [point["val_loss"] for point in log]
    assert result["val_loss"] == losses[-1] < 0.5 * math.log(len(corpus.tokenizer))
