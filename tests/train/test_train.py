"""`fem train`: recipes, data, packing, checkpoints, resuming, and error messages."""

import errno
import functools
import json
import math
import shutil
from dataclasses import asdict, replace
from itertools import islice

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from trainings import assert_same_run, losses, tiny, weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from fem.models import FEMForCausalLM, preset
from fem.train import checkpoints, documents, hub, integrity, metrics, packing, trainer, training
from fem.train import data as lm_data
from fem.train.checkpoints import load_language_model, newest
from fem.train.recipe import RECIPES, differences
from fem.train.tokenizer import entries, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(data):
    return train_tokenizer(list(documents.local_documents([data], "text")), 300)


def test_a_run_writes_what_it_promises(whole, data):
    results = json.loads((whole / "results.json").read_text())
    found = results["train"]
    assert found["step"] == found["validated_at"] == 12
    assert found["val_loss"] < math.log(300)
    assert {"tokens_per_second", "peak_memory_bytes", "beta_mean", "lambda_mean", "recomputed_share"} <= found.keys()
    assert {"versions", "seed", "seconds"} <= results.keys()
    assert json.loads((whole / "config.json").read_text())["recipe"] == asdict(tiny(data))
    assert [line["step"] for line in losses(whole) if "train_loss" in line] == [3, 5, 6, 9, 10, 12]
    assert [path.name for path in checkpoints.checkpoints(whole)] == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    assert not any(map(integrity.damage, checkpoints.checkpoints(whole)))
    assert not (whole / training.STAGING / "checkpoint-12").exists()


def test_the_model_of_a_run_loads_with_its_tokenizer(whole):
    model, tokenizer = load_language_model(whole)
    assert model.config.use_cache
    assert model.config.max_position_embeddings == 24
    assert torch.equal(model.model.embed_tokens.weight.cpu(), weights(whole, 12)["model.embed_tokens.weight"])
    assert tokenizer.decode(tokenizer("the sun")["input_ids"]) == "the sun"


def test_the_folder_of_a_run_says_which_folder_in_it_to_open(whole):
    for opener in (AutoConfig, AutoModelForCausalLM, FEMForCausalLM):
        with pytest.raises(ValueError, match="open one of its checkpoints, checkpoint-N in it"):
            opener.from_pretrained(whole)


@pytest.mark.parametrize("name", ["", "checkpoint-12"])
def test_weights_are_read_once_to_check_them(whole, monkeypatch, name):
    read, digest = [], integrity.digest
    monkeypatch.setattr(integrity, "digest", lambda path: (read.append(path.name), digest(path))[1])
    load_language_model(whole / name)
    assert read.count("model.safetensors") == 1


class Stopped(Exception):
    pass


@pytest.mark.parametrize("place", ["in a save", pytest.param("in a step", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(whole, data, tmp_path, monkeypatch, place):
    def stop(self, *args, **given):
        state = args[1] if place == "in a step" else self.state
        if state.global_step == (7 if place == "in a step" else 10):
            raise Stopped

    owner, name = (
        (metrics.MetricsCallback, "on_step_begin") if place == "in a step" else (trainer.TextTrainer, "_save_scaler")
    )
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda self, *a, **k: (stop(self, *a, **k), original(self, *a, **k))[1])
        with pytest.raises(Stopped):
            training.run(tiny(data), tmp_path)
    assert newest(tmp_path).name == "checkpoint-5"
    training.run(tiny(data), tmp_path, resume=True)
    assert_same_run(tmp_path, whole, 12)


def test_dropout_and_accumulation_resume_bit_for_bit(data, tmp_path):
    model = json.loads(tiny(data).model) | {"mixer": {"dropout": 0.2}}
    recipe = tiny(data, model=json.dumps(model), micro_batch=2, max_steps=4, save_steps=2)
    training.run(recipe, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoint-4")
    training.run(recipe, tmp_path / "other", resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "other", 4)


def test_accumulated_steps_equal_whole_ones(whole, data, tmp_path):
    """Validation losses too: rows hold different numbers of tokens that are predicted."""
    training.run(tiny(data, micro_batch=1), tmp_path)
    for a, b in zip(losses(whole), losses(tmp_path), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_validation_makes_few_logits_and_changes_no_training(data, tmp_path, monkeypatch):
    """Under dropout, which draws from the random state; and with a tokenizer that has no token for padding."""
    shapes, forward = set(), FEMForCausalLM.forward

    @functools.wraps(forward)  # the Trainer looks for labels in its signature
    def watch(self, *args, **given):
        output = forward(self, *args, **given)
        if output.loss is not None and not self.training:
            shapes.add(tuple(output.logits.shape[1:]))
        return output

    training.run(tiny(data, max_steps=2), tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer" / "tokenizer", pad_token=None)
    tokenizer.save_pretrained(tmp_path / "unpadded")
    monkeypatch.setattr(FEMForCausalLM, "forward", watch)
    model = json.dumps(json.loads(tiny(data).model) | {"mixer": {"dropout": 0.2}})
    recipe = tiny(data, model=model, max_steps=4, tokenizer=str(tmp_path / "unpadded"))
    for steps in (1, 3):
        training.run(replace(recipe, eval_steps=steps), tmp_path / str(steps))
    assert shapes == {(1, len(tokenizer))}
    one, other = (weights(tmp_path / steps, 4) for steps in "13")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_full_disk_is_one_sentence_and_loses_no_checkpoint(data, tmp_path, monkeypatch):
    save, full = torch.save, OSError(errno.ENOSPC, "No space left on device")

    def fails_late(state, path, *args, **given):
        if "checkpoint-10" in str(path) and "optimizer" in str(path):
            raise full
        return save(state, path, *args, **given)

    monkeypatch.setattr(torch, "save", fails_late)
    with pytest.raises(OSError, match=r"checkpoint-10 could not be saved .*No space left.*checkpoint-5 is whole"):
        training.run(tiny(data), tmp_path)
    assert newest(tmp_path).name == "checkpoint-5"
    assert not (tmp_path / training.STAGING).exists()


def test_a_run_ends_with_a_validation_and_keeps_its_newest_checkpoints(data, tmp_path):
    training.run(tiny(data, max_steps=4, eval_steps=3, save_steps=1, keep=2), tmp_path)
    assert [line["step"] for line in losses(tmp_path) if "val_loss" in line] == [3, 4]
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]


def test_a_saved_tokenizer_adds_no_token_that_the_training_did_not_show(data, tokenizer, tmp_path):
    folder = tmp_path / "given"
    tokenizer.save_pretrained(folder)
    given = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="the")
    given.backend_tokenizer.post_processor = TemplateProcessing("the $A", special_tokens=[("the", given.bos_token_id)])
    given.save_pretrained(folder)
    training.run(tiny(data, max_steps=3, tokenizer=str(folder)), tmp_path / "run")
    _, saved = load_language_model(tmp_path / "run")
    ids = PreTrainedTokenizerFast.from_pretrained(folder)("sun")["input_ids"]
    assert ids == [given.bos_token_id, *saved("sun")["input_ids"]]
    assert saved.bos_token == "the"


def test_of_little_data_a_tenth_is_held_out(data, tokenizer, tmp_path):
    recipe, share = tiny(data, validation_rows=1000), packing.Share(4, 4)
    packing.write_tokens(documents.local_documents([data], "text"), tokenizer, tmp_path / "tokens", "source")
    found = lm_data.load_data(recipe, tmp_path, share)
    rows = packing.Tokens.open(tmp_path / "tokens").rows(24)
    assert len(found.validation) == rows // 10
    assert found.train.stretches == (range(rows - rows // 10),)


@pytest.mark.parametrize(
    "changes, resume, sentence",
    [
        ({}, False, "output holds checkpoint-12 already; add --resume auto"),
        ({"learning_rate": 0.5}, True, r"another recipe: learning_rate \(0.001 there, 0.5 here\)"),
    ],
)
def test_a_run_is_not_overwritten(whole, data, changes, resume, sentence):
    before = sorted(path.name for path in whole.iterdir())
    with pytest.raises(ValueError, match=sentence):
        training.run(tiny(data, **changes), whole, resume)
    assert sorted(path.name for path in whole.iterdir()) == before


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"data": ""}, "data must be given"),
        ({"data": "no/such/file.txt"}, "data must be a file or a folder that exists, .*got 'no/such/file.txt'"),
        ({"batch_size": 6, "micro_batch": 4}, "batch_size must be a multiple of micro_batch"),
        ({"context": 50000}, "data are too short"),
        ({"model": '{"max_position_embeddings": 8}'}, "context must be at most max_position_embeddings = 8"),
        ({"model": '{"vocab_size": 8}'}, "vocab_size must cover"),
        ({"tokenizer": "no/such/tokenizer"}, "tokenizer 'no/such/tokenizer' cannot be read"),
        ({"field": "content"}, "must have text in 'content', got the fields text"),
        ({"preset": "nothing"}, "preset must be one of"),
    ],
)
def test_mistakes_are_one_sentence(data, tmp_path, as_users_run, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        training.run(tiny(data, **changes), tmp_path / "run")
    assert not checkpoints.checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    "field, value", [("dtype", "float8"), ("max_steps", 0), ("seed", 2**32), ("model", "[1]"), ("model", "{")]
)
def test_a_recipe_refuses_values_that_no_run_can_have(data, field, value):
    with pytest.raises(ValueError, match=field):
        tiny(data, **{field: value})


def test_a_refusal_says_why_where_another_run_has_come_into_the_folder(data, tmp_path, monkeypatch):
    def refuse(*_):
        (tmp_path / "new" / "other").mkdir()
        raise ValueError("too short")

    monkeypatch.setattr(training, "take_data", refuse)
    with pytest.raises(ValueError, match="too short"):
        training.run(tiny(data), tmp_path / "new" / "run")


def test_an_output_in_the_folder_of_the_data_is_refused(data, tmp_path):
    shutil.copy(data, tmp_path)
    with pytest.raises(ValueError, match="output must lie outside the folder of the data"):
        training.run(tiny(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_gives_the_documents_of_its_files_in_order(tmp_path):
    Dataset.from_dict({"text": ["three", "four"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two", "id": 1}\n\n')
    (tmp_path / "notes.csv").write_text("no document")
    files = documents.local_files(str(tmp_path))
    assert list(documents.local_documents(files, "text")) == ["one", "two", "three", "four"]


def expected_rows(texts, tokenizer, context):
    """Rows by the definition, token by token."""
    ids, opens = [], []
    for text in texts:
        document = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        ids += document
        opens += [True] + [False] * (len(document) - 1)
    rows = []
    for start in range(0, len(ids) - context + 1, context):
        segment, row = 0, []
        for place in range(context):
            begins = opens[start + place] or place == 0
            segment += begins
            row.append((ids[start + place], -100 if begins else ids[start + place], segment))
        rows.append(row)
    return rows


def triples(row):
    return list(zip(*(row[name].tolist() for name in ("input_ids", "labels", "segment_ids"))))


@pytest.mark.parametrize("context", [1, 7, 24])
def test_rows_are_the_documents_one_behind_the_other(data, tokenizer, tmp_path, context):
    texts = list(documents.local_documents([data], "text"))
    file = packing.write_tokens(iter(texts), tokenizer, tmp_path / "tokens", ["a"])
    wanted = expected_rows(texts, tokenizer, context)
    assert file.rows(context) == len(wanted)
    assert [triples(file.row(index, context)) for index in range(len(wanted))] == wanted


def test_tokens_of_other_data_are_not_taken_for_these(data, tokenizer, tmp_path):
    for source in (["a"], ["a"]):
        packing.write_tokens(iter(["text"]), tokenizer, tmp_path / "tokens", source)
    with pytest.raises(ValueError, match="data have changed"):
        packing.write_tokens(iter(["text"]), tokenizer, tmp_path / "tokens", ["b"])


def batches(file, share, steps, step=0, rows=11):
    source = packing.ShuffledRows(file, 8, [range(rows)], share, seed=3)
    source.step = step
    loader = DataLoader(source, batch_size=share.micro)
    return [batch["input_ids"] for batch in islice(loader, steps * share.accumulation)]


def test_processes_and_accumulation_share_the_same_batches(tokenizer, data, tmp_path):
    file = packing.write_tokens(documents.local_documents([data], "text"), tokenizer, tmp_path / "tokens", [])
    whole = torch.stack(batches(file, packing.Share(4, 4), 6))
    parts = [batches(file, packing.Share(4, 1, rank, 2), 6) for rank in range(2)]
    for step in range(6):
        together = [row for micro in range(2) for part in parts for row in part[2 * step + micro]]
        assert torch.equal(torch.stack(together), whole[step])
    later = torch.stack(batches(file, packing.Share(4, 4), 2, step=4))
    assert torch.equal(later, whole[4:])


def test_every_row_is_read_once_an_epoch(tokenizer, data, tmp_path):
    file = packing.write_tokens(documents.local_documents([data], "text"), tokenizer, tmp_path / "tokens", [])
    rows = torch.cat(batches(file, packing.Share(11, 11), 2))
    all_rows = torch.stack([file.row(index, 8)["input_ids"] for index in range(11)])
    for epoch in rows.split(11):
        assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, all_rows.tolist()))
    assert not torch.equal(rows[:11], rows[11:])


@pytest.mark.parametrize(
    "error, told",
    [(ConnectionError("Couldn't reach the Hub\nand more"), "Couldn't reach the Hub"), (TimeoutError(), "TimeoutError")],
)
def test_a_dataset_that_does_not_exist_is_one_sentence(monkeypatch, tmp_path, error, told):
    def offline(*args, **given):
        raise error

    monkeypatch.setattr(hub, "load_dataset", offline)
    monkeypatch.setattr(hub, "newest_revision", lambda name: "a" * 40)
    with pytest.raises(ValueError, match=r"dataset of the hub, got 'no/where': " + told + "$"):
        hub.begin(tiny("no/where"), tmp_path / "tokens", [])
    assert not list(tmp_path.iterdir())


def test_checkpoints_none_of_which_is_whole_are_left_alone(whole, data, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for checkpoint in checkpoints.checkpoints(tmp_path):
        (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole; remove them to begin again"):
        training.run(tiny(data), tmp_path, resume=True)
    assert len(checkpoints.checkpoints(tmp_path)) == 3


def test_a_loss_of_nan_stops_the_run(data, tmp_path):
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step"):
        training.run(tiny(data, learning_rate=1e12, clip=1e12, warmup_steps=0, log_steps=1), tmp_path)


def test_the_paper_recipes_are_the_papers():
    for name, tokens, model in (("paper-340m", 15e9, "fem-sm-340m"), ("paper-1.3b", 100e9, "fem-sm-1.3b")):
        recipe = RECIPES[name]
        a_step = recipe.batch_size * recipe.context
        assert a_step == pytest.approx(0.5e6, rel=0.05)
        assert recipe.max_steps * a_step == pytest.approx(tokens, rel=1e-3)
        assert recipe.warmup_steps * a_step == pytest.approx(1e9, rel=1e-3)
        assert (recipe.preset, recipe.learning_rate, recipe.weight_decay, recipe.clip) == (model, 4e-4, 0.1, 1.0)
        assert (recipe.context, recipe.dtype, recipe.seed) == (4096, "bfloat16", 42)
        assert recipe.documents == "visible"
        for processes in (1, 8, 64):
            assert packing.Share(recipe.batch_size, 2, 0, processes).accumulation == 64 // processes


def test_a_kept_swiglu_is_the_transformers_and_earlier_runs_go_on(data):
    recipe = replace(tiny(data), mlp="kept")
    assert training.model_config(recipe, 300).intermediate_size == 88
    earlier = {name: value for name, value in asdict(recipe).items() if name != "mlp"}
    assert differences(earlier, replace(recipe, mlp="narrowed")) == []
    assert differences(earlier, recipe) == ["mlp (narrowed there, kept here)"]


def test_logged_beta_and_lambda_are_those_of_the_layers(whole, data):
    model, _ = load_language_model(whole)
    row = packing.Tokens.open(whole / "tokens").row(3, 24)
    layers = [block.mixer for block in model.model.layers]
    found = metrics.read_statistics(model, row)
    betas = torch.cat([layer.inspect(torch.zeros(1, 2, 32)).beta.flatten() for layer in layers])
    assert found["beta_mean"] == pytest.approx(betas.mean().item())
    assert found["beta_max"] == pytest.approx(betas.max().item())
    seen, hooks = [], [layer.register_forward_pre_hook(lambda layer, args: seen.append(args)) for layer in layers]
    with torch.no_grad():
        model(row["input_ids"][None], segment_ids=row["segment_ids"][None])
    lambdas = [layer.inspect(*args[:3]).lambda_.mean() for layer, args in zip(layers, seen)]
    for hook in hooks:
        hook.remove()
    assert found["lambda_mean"] == pytest.approx(np.mean(lambdas), rel=1e-5)


def test_flops_of_a_transformer_are_counted_by_hand():
    from fem.train.throughput import flops_per_token

    config = preset("transformer-tiny", vocab_size=100)
    model = AutoModelForCausalLM.from_config(config)
    d, layers, width = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    products = layers * (4 * d * d + 3 * d * width) + 100 * d
    scores = layers * 3 * 64 * 2 * d
    assert flops_per_token(model, 64) == pytest.approx(6 * products + scores, rel=0.02)
    seen = sum(min(t + 1, 16) for t in range(64)) / 64
    config.mixer = config.mixer | {"window": 16}
    windowed = AutoModelForCausalLM.from_config(config)
    assert flops_per_token(windowed, 64) == pytest.approx(6 * products + scores * seen / 32, rel=0.02)


def test_a_tokenizer_without_an_end_is_refused(tmp_path, data, tokenizer):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match="must have an end-of-text token"):
        lm_data.load_tokenizer(tiny(data, tokenizer=str(tmp_path / "tokenizer")), tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path / "python")
    with pytest.raises(ValueError, match=r"must have a tokenizer\.json, got .* a ByT5Tokenizer in Python"):
        lm_data.load_tokenizer(tiny(data, tokenizer=str(tmp_path / "python")), tmp_path)


def test_entries_of_a_tokenizer_with_holes_reach_its_largest_id(tokenizer, monkeypatch):
    assert entries(tokenizer) == len(tokenizer)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"a": 0, "b": 500})
    assert entries(tokenizer) == 501


KINDS = ("missing", "pickle", "folder of pickles", "nothing", "cut off", "corrupt", "other")


@pytest.mark.parametrize("kind", [*KINDS, "config", "tokenizer", "part of the tokenizer", "no tokenizer"])
def test_models_that_cannot_be_read_are_refused_in_one_sentence(whole, tmp_path, kind):
    folder = tmp_path / "model"
    if kind not in ("missing", "pickle", "nothing"):
        shutil.copytree(newest(whole), folder)
    sentence = {
        "missing": "got no such folder",
        "pickle": "got the file .*may run code",
        "folder of pickles": "must hold its weights as safetensors, .*pytorch_model.bin, which may run code",
        "nothing": "must hold config.json and safetensors",
        "cut off": "corrupt or cut off",
        "corrupt": "corrupt or cut off",
        "other": "do not belong together",
        "config": "config.json in .* names no model_type, it may be corrupt or cut off",
        "tokenizer": "the tokenizer in .* cannot be read, it may be missing, corrupt or cut off: ",
        "part of the tokenizer": "the tokenizer in .* cannot be read, it may be missing, corrupt or cut off: ",
        "no tokenizer": "the tokenizer in .* may be missing",
    }[kind]
    weights = folder / "model.safetensors"
    if kind == "pickle":
        folder = tmp_path / "model.pt"
        folder.write_bytes(b"pickle")
    elif kind == "nothing":
        folder.mkdir()
    elif kind == "folder of pickles":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "cut off":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif kind == "corrupt":
        weights.write_bytes(b"\x00" * 64)
    elif kind == "config":
        (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[:100])
    elif kind == "tokenizer":
        (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:200])
    elif kind == "part of the tokenizer":
        (folder / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "BPE"}}')
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "other":
        train_tokenizer(["another text entirely, with other letters: äöüß"] * 3, 400).save_pretrained(folder)
        tokens = json.loads((folder / "tokenizer.json").read_text())
        tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": 900, "content": "<|more|>"})
        for index in range(300, 310):
            tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": index, "content": f"<|{index}|>"})
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=sentence) as told:
        load_language_model(folder)
    assert "\n" not in str(told.value)


def test_a_tokenizer_of_no_file_is_none(tmp_path):
    """Some classes of tokenizers are made of nothing, and then read every text as nothing."""
    config = GPT2Config(vocab_size=50, n_embd=8, n_head=2, n_layer=1, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no tokenizer beside the model"):
        load_language_model(tmp_path)


def altered(folder, change):
    """The model in `folder`, its weights saved anew as another program would, without a list of digests."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "complete.json").unlink()


def test_weights_that_are_not_those_that_were_saved_are_never_read_in_silence(whole, tmp_path):
    changed, short, spoilt, sparse = (shutil.copytree(newest(whole), tmp_path / name) for name in "abcd")
    weights = changed / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(ValueError, match=r"model.safetensors has other bytes than were saved; .* delete complete.json"):
        load_language_model(changed)
    (changed / "complete.json").unlink()
    load_language_model(changed)
    altered(short, lambda weights: weights.pop("model.layers.0.mixer.output.weight"))
    with pytest.raises(ValueError, match=r"must be all .*; 'model.layers.0.mixer.output.weight' is missing"):
        load_language_model(short)
    altered(spoilt, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity in 'model.norm.weight'"):
        load_language_model(spoilt)
    tokens = json.loads((sparse / "tokenizer.json").read_text())
    tokens["model"]["vocab"][max(tokens["model"]["vocab"])] = 10**6
    (sparse / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match="token ids up to 1000000, but vocab_size"):
        load_language_model(sparse)


def test_a_run_of_another_recipe_names_what_differs(data):
    stored = asdict(tiny(data))
    assert differences(stored, tiny(data, keep=1, log_steps=1)) == []
    assert differences(stored, replace(tiny(data), seed=7)) == ["seed (42 there, 7 here)"]


def test_visible_documents_are_read_as_one_text(data, tmp_path):
    training.run(tiny(data, documents="visible", max_steps=2), tmp_path / "run")
    file = packing.Tokens.open(tmp_path / "run" / "tokens")
    row = lm_data.load_data(tiny(data, documents="visible"), tmp_path / "run", packing.Share(1, 1)).probe
    assert row.keys() == {"input_ids", "labels"}
    assert row["labels"].tolist() == [-100, *row["input_ids"].tolist()[1:]]
    model, _ = load_language_model(tmp_path / "run")
    apart = next(row for row in (file.row(i, 24) for i in range(file.rows(24))) if row["segment_ids"][-1] > 1)
    ids, segments = apart["input_ids"][None], apart["segment_ids"][None]
    with torch.no_grad():
        seen, hidden = model(ids).logits, model(ids, segment_ids=segments).logits
    assert not torch.allclose(seen[0, -1], hidden[0, -1])


def test_a_run_begun_before_a_field_was_there_goes_on_with_its_default(data):
    stored = asdict(tiny(data))
    del stored["documents"]
    assert differences(stored, tiny(data)) == []
    assert differences(stored, tiny(data, documents="visible")) == ["documents (hidden there, visible here)"]
