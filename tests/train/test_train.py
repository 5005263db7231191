"""`fem train`: what a run writes, its data and rows, its recipe, and what it refuses in a sentence."""

import json
import math
import os
import shutil
from dataclasses import asdict, replace
from functools import partial, wraps

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from trainings import WORDS, assert_same_weights, losses, tiny, weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from fem.models import FEMForCausalLM, preset
from fem.train import data as lm_data
from fem.train import metrics, train
from fem.train.checkpoints import checkpoints, load_language_model, newest
from fem.train.recipe import RECIPES, differences
from fem.train.tokenizer import END, entries, train_tokenizer


def texts_of(recipe):
    return [text for part in lm_data.documents(recipe) for text in lm_data.texts_of(recipe, *part)]


@pytest.fixture(scope="module")
def tokenizer(data):
    return train_tokenizer(texts_of(tiny(data)), 300)


# What a run writes


def test_a_run_writes_what_it_promises(whole, data):
    results = json.loads((whole / "results.json").read_text())
    found = results["train"]
    assert found["step"] == found["validated_at"] == 12
    assert found["val_loss"] < math.log(300)
    assert {"tokens_per_second", "peak_memory_bytes", "beta_mean", "lambda_mean", "recomputed_share"} <= found.keys()
    assert {"versions", "seed"} <= results.keys()
    config = json.loads((whole / "config.json").read_text())
    assert (config["recipe"], config["format"]) == (asdict(tiny(data)), 2)
    assert [line["step"] for line in losses(whole) if "train_loss" in line] == [3, 5, 6, 9, 10, 12]
    assert [line["step"] for line in losses(whole) if "val_loss" in line] == [6, 12]
    assert [path.name for path in checkpoints(whole)] == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    assert not (whole / train.STAGING).exists()


def test_the_model_of_a_run_loads_with_its_tokenizer(whole):
    model, tokenizer = load_language_model(whole)
    assert model.config.use_cache
    assert model.config.max_position_embeddings == 24
    assert torch.equal(model.model.embed_tokens.weight.cpu(), weights(whole, 12)["model.embed_tokens.weight"])
    assert tokenizer.decode(tokenizer("the sun")["input_ids"]) == "the sun"


def test_the_folder_of_a_run_says_which_folder_in_it_to_open(whole):
    for opener in (AutoConfig, AutoModelForCausalLM, FEMForCausalLM):
        with pytest.raises(ValueError, match="open one of the folders checkpoint-N in it"):
            opener.from_pretrained(whole)


def test_lines_say_step_loss_speed_and_time_left():
    line = {"step": 3, "train_loss": 5.5, "grad_norm": 1.25, "tokens_per_second": 8432.4, "seconds_left": 61.2}
    assert metrics.in_words(line, 6) == "step 3/6, loss 5.5, grad norm 1.25, 8,432 tokens/s, 0:01:01 left"


def test_accumulated_steps_equal_whole_ones(whole, data, tmp_path):
    """Validation losses too: rows hold different numbers of tokens that are predicted."""
    train.run(tiny(data, micro_batch=1), tmp_path)
    torch.testing.assert_close(losses(whole), losses(tmp_path), rtol=1e-4, atol=0)


def test_a_validation_makes_few_logits_and_changes_no_training(data, tmp_path, monkeypatch):
    """Under dropout, which draws from the random state; and with a tokenizer that has no token for padding."""
    shapes, forward = set(), FEMForCausalLM.forward

    @wraps(forward)  # the Trainer looks for labels in its signature
    def watch(self, *args, **given):
        output = forward(self, *args, **given)
        if output.loss is not None and not self.training:
            shapes.add(tuple(output.logits.shape[1:]))
        return output

    train.run(tiny(data, max_steps=2), tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer" / "tokenizer", pad_token=None)
    tokenizer.save_pretrained(tmp_path / "unpadded")
    monkeypatch.setattr(FEMForCausalLM, "forward", watch)
    model = json.dumps(json.loads(tiny(data).model) | {"mixer": {"dropout": 0.2}})
    recipe = tiny(data, model=model, max_steps=4, tokenizer=str(tmp_path / "unpadded"))
    for steps in (1, 3):
        train.run(replace(recipe, eval_steps=steps), tmp_path / str(steps))
    assert shapes == {(1, len(tokenizer))}
    assert_same_weights(tmp_path / "1", tmp_path / "3", 4)


def test_a_run_ends_with_a_validation_and_keeps_its_newest_checkpoints(data, tmp_path):
    train.run(tiny(data, max_steps=4, eval_steps=3, save_steps=1, keep=2), tmp_path)
    assert [line["step"] for line in losses(tmp_path) if "val_loss" in line] == [3, 4]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]


def test_a_saved_tokenizer_adds_no_token_that_the_training_did_not_show(data, tokenizer, tmp_path):
    folder = tmp_path / "given"
    tokenizer.save_pretrained(folder)
    given = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="the")
    given.backend_tokenizer.post_processor = TemplateProcessing("the $A", special_tokens=[("the", given.bos_token_id)])
    given.save_pretrained(folder)
    train.run(tiny(data, max_steps=3, tokenizer=str(folder)), tmp_path / "run")
    _, saved = load_language_model(tmp_path / "run")
    ids = PreTrainedTokenizerFast.from_pretrained(folder)("sun")["input_ids"]
    assert ids == [given.bos_token_id, *saved("sun")["input_ids"]]
    assert saved.bos_token == "the"


def test_logged_beta_and_lambda_are_those_of_the_layers(whole, data):
    model, _ = load_language_model(whole)
    row = lm_data.Rows(whole / "tokens", 24)[3]
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


# Its data


def test_a_folder_gives_the_documents_of_its_files_in_order(tmp_path, capsys):
    Dataset.from_dict({"text": ["three", "four"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "a[1].txt").write_text("\ufeffone\n\ntwo", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "two", "id": 1}\n')
    (tmp_path / "notes.csv").write_text("no document")
    (tmp_path / "more").symlink_to(tmp_path, target_is_directory=True)
    assert texts_of(tiny(tmp_path)) == ["one\n\ntwo", "two", "three", "four"]
    lm_data.say_unread(tiny(tmp_path))
    assert "are not read: more, notes.csv" in capsys.readouterr().err


def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def closed(where):
        if os.path.basename(where) == "closed":
            raise PermissionError(13, "Permission denied", str(where))
        return scan(where)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ValueError, match=r"^data must be readable, got '.*closed': Permission denied\.$"):
        lm_data.local_files(str(tmp_path))


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


@pytest.mark.parametrize("context", [1, 7, 24])
def test_rows_are_the_documents_one_behind_the_other(data, tokenizer, tmp_path, context):
    source = lm_data.identity(tiny(data), tokenizer)
    lm_data.write_tokens(tiny(data), tokenizer, source, tmp_path / "tokens")
    rows = lm_data.Rows(tmp_path / "tokens", context)
    names, expected = ("input_ids", "labels", "segment_ids"), expected_rows(texts_of(tiny(data)), tokenizer, context)
    assert [list(zip(*(rows[n][name].tolist() for name in names))) for n in range(len(rows))] == expected


def test_a_long_text_has_the_tokens_of_the_whole(monkeypatch):
    text = " ".join(WORDS * 40) + "\n\n  x" + "日本 " * 50
    tokenizer = train_tokenizer([text], 300)
    monkeypatch.setattr(lm_data, "PIECE", 64)
    assert max(map(len, lm_data.pieces(text))) <= 64
    assert "".join(lm_data.pieces(text)) == text
    (found,) = lm_data.encoded([text], tokenizer)
    assert found.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert list(map(len, lm_data.pieces("x" * 150))) == [64, 64, 22]


def test_special_tokens_that_a_text_spells_out_are_text(tokenizer):
    (found,) = lm_data.encoded([f"a{END}b"], tokenizer)
    assert found.tolist().count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(found[:-1]) == f"a{END}b"


def test_every_row_is_read_once_an_epoch_in_an_order_of_the_seed(whole):
    rows = lm_data.Rows(whole / "tokens", 24)
    read = lm_data.Shuffled(rows, 11, 22, seed=3)
    found = [tuple(read[index]["input_ids"].tolist()) for index in range(len(read))]
    assert sorted(found[:11]) == sorted(found[11:]) == sorted(tuple(rows[i]["input_ids"].tolist()) for i in range(11))
    assert found[:11] != found[11:]
    assert found != [tuple(lm_data.Shuffled(rows, 11, 22, seed=4)[index]["input_ids"].tolist()) for index in range(22)]


def test_of_little_data_a_tenth_is_held_out(whole, data):
    read, held_out, _ = lm_data.load_rows(tiny(data, validation_rows=1000), whole)
    rows = len(lm_data.Rows(whole / "tokens", 24))
    assert (len(held_out), read.count) == (rows // 10, rows - rows // 10)


def test_visible_documents_are_read_as_one_text(data, tmp_path):
    train.run(tiny(data, documents="visible", max_steps=2), tmp_path / "run")
    row = lm_data.load_rows(tiny(data, documents="visible"), tmp_path / "run")[2]
    assert row.keys() == {"input_ids", "labels"}
    assert row["labels"].tolist() == [-100, *row["input_ids"].tolist()[1:]]
    model, _ = load_language_model(tmp_path / "run")
    rows = lm_data.Rows(tmp_path / "run" / "tokens", 24)
    apart = next(row for row in map(rows.__getitem__, range(len(rows))) if row["segment_ids"][-1] > 1)
    ids, segments = apart["input_ids"][None], apart["segment_ids"][None]
    with torch.no_grad():
        seen, hidden = model(ids).logits, model(ids, segment_ids=segments).logits
    assert not torch.allclose(seen[0, -1], hidden[0, -1])


UNFIT = {
    "empty.txt": b"",
    "white.jsonl": b'{"text": ""}\n',
    "binary.txt": b"a\0b",
    "latin.txt": "ä".encode("latin-1"),
    "cut.jsonl": b'{"text": "one"}\n{"text": "tw',
    "null.jsonl": b'{"text": "one"}\n{"text": null}\n',
    "nested.jsonl": b'{"text": {"a": 1}}\n',
    "other.jsonl": b'{"body": "one"}\n',
    "cut.parquet": b"PAR1 and no more",
}


@pytest.mark.parametrize("name", UNFIT)
def test_files_that_hold_no_text_are_refused_in_a_sentence_and_leave_nothing(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(UNFIT[name])
    (tmp_path / "mine").mkdir()
    for output in ("run", "mine"):
        with pytest.raises(ValueError, match=r"^(data|text|every record) ") as told:
            train.run(tiny(path), tmp_path / output)
        assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "mine").exists()


def test_files_of_other_fields_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "other.jsonl").write_bytes(UNFIT["other.jsonl"])
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    with pytest.raises(ValueError, match=r"^data must be files of the same fields, got '\S+' with a file of others.$"):
        list(lm_data.texts_of(recipe := tiny(tmp_path), *lm_data.documents(recipe)[0]))


@pytest.mark.parametrize("name", ["binary.txt", "latin.txt"])
@pytest.mark.parametrize("place", ["a", "z"])  # before the other file and behind it
def test_of_a_folder_the_file_that_is_no_text_is_named(tmp_path, name, place):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("one")
    (folder / f"{place}-{name}").write_bytes(UNFIT[name])
    with pytest.raises(ValueError, match=rf"^data must be .*{place}-{name}' with "):
        train.run(tiny(folder), tmp_path / "run")


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


# Its recipe


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"data": ""}, "data must be given"),
        ({"data": "no/such/file.txt"}, "data must be a file or a folder that exists, .*got 'no/such/file.txt'"),
        ({"batch_size": 6, "micro_batch": 4}, "batch_size must be a multiple of micro_batch"),
        ({"context": 50000}, "data are too short"),
        ({"model": '{"max_position_embeddings": 8}'}, "context must be at most max_position_embeddings = 8"),
        ({"model": '{"vocab_size": 8}'}, "vocab_size must cover"),
        ({"model": '{"hiden_size": 32}'}, "model_fields must be .*got 'hiden_size'; did you mean hidden_size"),
        ({"model": '{"dtype": "bfloat16"}'}, "model_fields must leave the dtype to --dtype, got 'bfloat16'"),
        ({"model": '{"temperature": 0.5}'}, "model_fields must be .*got 'temperature'"),  # transformers would drop it
        ({"tokenizer": "no/such/tokenizer"}, "tokenizer 'no/such/tokenizer' cannot be read"),
        ({"tokenizer": os.path.dirname(__file__)}, "tokenizer must be a folder with a tokenizer.json, .*got '.*train'"),
        ({"field": "content"}, "must have text in 'content', got the fields text"),
        ({"preset": "fem-sm-tny"}, r"preset must be one of .*got 'fem-sm-tny'; did you mean fem-sm-tiny\?"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing_behind(data, tmp_path, as_users_run, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        train.run(tiny(data, **changes), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "field, value",
    [
        *(("dtype", "float8"), ("max_steps", 0), ("seed", 2**32), ("model", "[1]"), ("model", "{"), ("clip", -1.0)),
        *(("clip", 0.0), ("warmup_steps", 13), ("warmup_steps", -1), ("learning_rate", 0.0), ("beta2", 1.0)),
        *(("weight_decay", -0.1), ("seed", -1), ("vocabulary", 10), ("context", 1)),
    ],
)
def test_a_recipe_refuses_values_that_no_run_can_have(data, field, value):
    with pytest.raises(ValueError, match=f"{field}.* must"):
        tiny(data, **{field: value})


def test_the_paper_recipes_are_the_papers():
    for name, tokens, model in (("paper-340m", 15e9, "fem-sm-340m"), ("paper-1.3b", 100e9, "fem-sm-1.3b")):
        recipe = RECIPES[name]
        a_step = recipe.batch_size * recipe.context
        assert a_step == pytest.approx(0.5e6, rel=0.05)
        assert recipe.max_steps * a_step == pytest.approx(tokens, rel=1e-3)
        assert recipe.tokens == pytest.approx(tokens, rel=1e-3)
        assert recipe.warmup_steps * a_step == pytest.approx(1e9, rel=1e-3)
        assert (recipe.preset, recipe.learning_rate, recipe.weight_decay, recipe.clip) == (model, 4e-4, 0.1, 1.0)
        assert (recipe.context, recipe.dtype, recipe.seed) == (4096, "bfloat16", 42)
        assert recipe.documents == "visible"


def test_a_recipe_s_changes_are_named_and_a_field_that_is_new_has_its_default(data):
    stored = asdict(tiny(data))
    assert differences(stored, tiny(data, keep=1, log_steps=1)) == []
    assert differences(stored, replace(tiny(data), seed=7)) == ["seed (42 there, 7 here)"]
    earlier = {name: value for name, value in stored.items() if name != "mlp"}
    assert differences(earlier, replace(tiny(data), mlp="kept")) == ["mlp (narrowed there, kept here)"]


def test_a_recipe_s_fields_reach_the_model(data):
    assert train.model_config(tiny(data, mlp="kept"), 300).intermediate_size == 88
    scaled = '{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}'
    assert train.model_config(tiny(data, model=scaled), 499).rope_parameters["factor"] == 2.0


def test_a_precision_from_the_environment_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION=bf16 would change the arithmetic"):
        train.run(tiny(data), tmp_path / "run")


# What is not finite


def test_a_loss_of_nan_stops_the_run(data, tmp_path):
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step"):
        train.run(tiny(data, learning_rate=1e12, clip=1e12, warmup_steps=0, log_steps=1), tmp_path)


NOT_FINITE = [  # what is spoilt in step 10, and what notices it
    ("gradient", 6, r"the gradient is nan at step 10; .*checkpoint-5 is whole"),
    ("weights", 50, "is not finite at step 10"),
    ("weights", 10, "the validation loss is nan at step 10"),
]


@pytest.mark.parametrize("what, eval_steps, sentence", NOT_FINITE)
def test_what_is_not_finite_never_becomes_a_checkpoint(data, tmp_path, monkeypatch, what, eval_steps, sentence):
    step, end_of_step = train.TextTrainer.training_step, metrics.Metrics.on_step_end

    def spoil_gradient(self, model, *args):
        loss = step(self, model, *args)
        if what == "gradient" and self.state.global_step + 1 == 10:
            next(model.parameters()).grad.view(-1)[0] = math.nan
        return loss

    def spoil_weights(self, args, state, control, model=None, **given):
        end_of_step(self, args, state, control, **given)
        if what == "weights" and state.global_step == 10:
            next(model.parameters()).data.view(-1)[0] = math.inf

    monkeypatch.setattr(train.TextTrainer, "training_step", spoil_gradient)
    monkeypatch.setattr(metrics.Metrics, "on_step_end", spoil_weights)
    with pytest.raises(ValueError, match=sentence):
        train.run(tiny(data, eval_steps=eval_steps), tmp_path / "run")
    assert newest(tmp_path / "run").name == "checkpoint-5"


# Models that are read


def cut_off(name, end, folder):
    (folder / name).write_bytes((folder / name).read_bytes()[:end])


def change_weights(change, folder):
    """Save the weights anew, as another program would, after a change."""
    weights = load_file(folder / MODEL)
    change(weights)
    save_file(weights, folder / MODEL, {"format": "pt"})


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def named_by_an_index(folder):
    """A pickle that would run code, in the place of a part of the weights."""
    (folder / MODEL).unlink()
    torch.save(Evil(), folder / "part.bin")
    (folder / f"{MODEL}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {OUTPUT: "part.bin"}}))


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def made_a_file(folder):
    shutil.rmtree(folder)
    folder.write_bytes(b"pickle")


def of_nothing(folder):
    """Some classes of tokenizers are made of no file, and then read every text as nothing."""
    emptied(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_head=2, n_layer=1, n_positions=8)).save_pretrained(folder)


def made_sparse(folder):
    tokens = json.loads((folder / TOKENIZER).read_text())
    tokens["model"]["vocab"][max(tokens["model"]["vocab"])] = 10**6
    (folder / TOKENIZER).write_text(json.dumps(tokens))


MODEL, TOKENIZER, OUTPUT = "model.safetensors", "tokenizer.json", "model.layers.0.mixer.output.weight"
NO_TOKENIZER = "the tokenizer in .* cannot be read, it may be missing, corrupt or cut off: "
UNREADABLE = {  # what happened to a good model, and what is said
    "is missing": (shutil.rmtree, "got no such folder"),
    "is a pickle": (made_a_file, "got the file"),
    "is empty": (emptied, "must hold a config.json with a model_type"),
    "is a folder of pickles": (
        lambda folder: (folder / MODEL).rename(folder / "pytorch_model.bin"),
        "the model in .* cannot be read, .* no file named model.safetensors",
    ),
    "weights are cut off": (partial(cut_off, MODEL, -1000), "corrupt or cut off"),
    "a weight is missing": (partial(change_weights, lambda x: x.pop(OUTPUT)), f"must be all .*; '{OUTPUT}' is missing"),
    "a weight is NaN": (
        partial(change_weights, lambda x: x["model.norm.weight"].fill_(torch.nan)),
        "must be finite, got NaN or infinity in 'model.norm.weight'",
    ),
    "config is cut off": (partial(cut_off, "config.json", 100), "must hold a config.json with a model_type"),
    "tokenizer is cut off": (partial(cut_off, TOKENIZER, 200), NO_TOKENIZER),
    "tokenizer is removed": (lambda folder: (folder / TOKENIZER).unlink(), "the tokenizer in .* may be missing"),
    "tokenizer is of no file": (of_nothing, "holds no tokenizer beside the model"),
    "tokenizer is sparse": (made_sparse, "do not belong together: token ids up to 1000000, but vocab_size"),
    "index names a pickle": (named_by_an_index, "the model in .* cannot be read"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_model_that_cannot_be_read_is_refused_in_one_sentence(whole, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(newest(whole), tmp_path / "model.pt")
    happened, sentence = UNREADABLE[what]
    happened(folder)
    with pytest.raises(ValueError, match=sentence) as told:
        load_language_model(folder)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_in_a_model_s_folder_is_never_run(whole, data, tmp_path, monkeypatch, what):
    folder = shutil.copytree(newest(whole), tmp_path / "model")
    names = {"model": "config.json", "tokenizer": "tokenizer_config.json"}
    told = json.loads((folder / names[what]).read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
    told["auto_map"] = classes
    told |= {"model_type": "evil"} if what == "model" else {"tokenizer_class": "Evil"}
    (folder / names[what]).write_text(json.dumps(told))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match=r"(model|tokenizer) .*brings code of its own: fem runs none"):
        load_language_model(folder)
    if what == "tokenizer":
        with pytest.raises(ValueError, match="brings code of its own: fem runs none"):
            train.run(tiny(data, tokenizer=str(folder)), tmp_path / "run")
    assert not (tmp_path / "ran").exists()
