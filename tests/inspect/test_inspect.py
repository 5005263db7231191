"""`fem inspect`: its tables against loops over the definitions, its files, and its refusals."""

import base64
import json
import math
import re
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import fem
from layers import ABLATIONS, FAMILIES, make_layer
from layers import tokens as make_tokens
from matplotlib.text import Text

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from small_models import lively, small_config
from transformers import GPT2Config, GPT2LMHeadModel

from fem import PRIORS, plots
from fem.inspect import experiment as inspect
from fem.inspect import page as inspection_page
from fem.inspect.experiment import encode
from fem.inspect.layers import LayerTables, by_division, effective_tokens, layer_tables, readers, readings
from fem.models import FEMForCausalLM, replace_attention
from fem.tables import show_table
from fem.train.tokenizer import train_tokenizer

TEXT = "the sun sees the moon.\n\tthe moon | sees </script><b> the INSPECTION"
TIME = 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the sun sees the moon. the moon sees the river. " * 20], 280)


def saved(model, tokenizer, folder):
    """The model, away from its start, so that its channels differ, beside its tokenizer: their folder."""
    lively(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    config = small_config(vocab_size=len(tokenizer), max_position_embeddings=96)
    return saved(FEMForCausalLM(config), tokenizer, tmp_path_factory.mktemp("model"))


def tables(layer, time=TIME) -> LayerTables:
    return layer_tables(1, layer.prior.name, layer.inspect(make_tokens(batch=1, time=time)))


# --- the tables


SPLIT = [({"prior_type": name}, share) for name in PRIORS if PRIORS[name].takes_pairs for share in (0.25, 0.5)]


@pytest.mark.parametrize(
    "fields", [*FAMILIES.values(), *(prior | {"free_share": share, "gate_rank": 2} for prior, share in SPLIT)], ids=str
)
def test_gap_and_read_follow_from_prior_and_posterior(fields):
    """Of split values those of the channels that read a free energy, alone."""
    layer = make_layer(**fields)
    found = tables(layer)
    p, q = np.broadcast_arrays(found.prior, found.posterior)
    np.testing.assert_allclose((p.sum(-1), q.sum(-1)), 1, atol=1e-9)
    divergence = np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0).sum(-1)
    assert found.gap.shape == found.beta.shape + found.gap.shape[-1:] == divergence.shape
    if layer.config.prior_type == "mamba_interactive":  # selects pairs of token and channel: tokens alone show less
        assert (found.gap > divergence - 1e-9).all()
    else:
        np.testing.assert_allclose(found.gap, divergence, atol=1e-7)
    lam = 1 if found.lambda_ is None else found.lambda_[..., None]
    np.testing.assert_allclose(found.read, (1 - lam) * p + lam * q, atol=1e-12)
    reading, config = layer.inspect(make_tokens(batch=1, time=TIME)), layer.config
    assert reading.mean.shape[-1] == config.value_width - (0 if config.free_share is None else config.free_width)
    assert found.gap.shape[1] == found.hidden_beta.shape[1] == found.posterior.shape[1] == config.free_width
    assert (found.lambda_ is None) == (config.free_share is not None)
    np.testing.assert_array_equal(found.gate, reading.gate[0].permute(1, 2, 0)[:, -found.gap.shape[1] :])


def test_effective_tokens_are_the_exponential_of_the_entropy():
    rows = np.array([[0.25] * 4, [0, 1, 0, 0], [0] * 4, [0.1, 0.2, 0.7, 0]])
    entropy = -sum(w * math.log(w) for w in (0.1, 0.2, 0.7))
    np.testing.assert_allclose(effective_tokens(rows), [4, 1, 0, math.exp(entropy)], rtol=1e-12)
    found = tables(make_layer(prior_type="mamba"))
    np.testing.assert_array_equal(found.prior_tokens, effective_tokens(found.prior))
    np.testing.assert_array_equal(found.posterior_tokens, effective_tokens(found.posterior))


@pytest.mark.parametrize("name", ABLATIONS)
def test_parts_that_a_layer_lacks_are_none(name):
    layer = make_layer(**ABLATIONS[name])
    found = tables(layer)
    config = layer.config
    for part in (found.posterior, found.posterior_tokens, found.gap, found.beta, found.hidden_beta):
        assert (part is None) == (not config.use_lse)
    assert (found.lambda_ is None) == (not config.use_temperature)
    assert (found.gate is None) == (not config.use_outer_gate)
    if not config.use_lse:
        np.testing.assert_array_equal(found.read, np.broadcast_to(found.prior, found.read.shape))
    elif not config.use_temperature:
        np.testing.assert_array_equal(found.read, found.posterior)
    assert len(inspect.head_rows([found])) == config.n_head


def test_the_table_of_heads_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    rows = inspect.head_rows([tables(make_layer())])
    show_table("heads", rows)
    lines = capsys.readouterr().out.splitlines()
    *table, left_out = lines
    assert len(table) == len(rows) + 5  # a title and four borders or headings: no cell is broken
    assert left_out.startswith("Also in ")
    assert "…" not in "".join(lines)


def test_the_most_divided_head_is_the_one_whose_channels_part():
    even = tables(make_layer())
    read = np.full_like(even.read, 1 / TIME)
    read[2, 0, -1] = np.eye(TIME)[1]
    divided = LayerTables(**{**vars(even), "read": read})
    flat = LayerTables(**{**vars(even), "read": np.full_like(read, 1 / TIME)})
    assert by_division([flat, divided, flat])[0] == (1, 2)
    assert [row["tokens at the end"] for row in inspect.head_rows([divided])] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    "part, change, sentence",
    [
        ("mean", lambda x: x * math.nan, "layer 3 reads NaN"),
        ("prior", lambda x: torch.nn.functional.pad(x, (1, 0)), "layer 3 also reads an attention sink"),
    ],
)
def test_a_layer_that_reads_nan_or_a_sink_is_refused(part, change, sentence):
    reading = make_layer().inspect(make_tokens(batch=1, time=2))
    changed = type(reading)(**vars(reading) | {part: change(getattr(reading, part))})
    with pytest.raises(ValueError, match=sentence):
        layer_tables(3, "softmax", changed)


# --- the text


@pytest.mark.parametrize("text", [TEXT, " two  spaces ", "one"])
def test_tokens_are_named_by_their_pieces_of_the_text(tokenizer, text):
    ids, names = encode(tokenizer, text)
    assert len(ids) == len(names)
    assert "".join(names) == text


def test_a_token_inside_a_character_has_a_name_too(tokenizer):
    ids, names = encode(tokenizer, "é")
    assert len(ids) == 2
    assert names[0] == "é"
    assert names[1]


# --- what the command writes


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    inspect.run(model, TEXT, None, output)
    return output


def page_of(output) -> dict:
    page = (output / "inspect.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_command_writes_page_picture_and_tables(written, tokenizer):
    names = {path.name for path in written.iterdir()}
    assert names == {"config.json", "results.json", "inspect.html", "inspect.png", "heads.csv"}
    assert (written / "inspect.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((written / "results.json").read_text())
    assert "".join(results["tokens"]) == TEXT
    assert [(row["layer"], row["head"]) for row in results["heads"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_no_title_is_cut_above_a_few_tokens(monkeypatch, tmp_path):
    drawn, canvas = [], plots.FigureCanvasAgg
    monkeypatch.setattr(plots, "FigureCanvasAgg", lambda figure: drawn.append(figure) or canvas(figure))
    title = "What each channel reads at the end of the sentence"
    name = "layer 12, head 10: the head whose channels differ most"
    plots.channel_readings(tmp_path / "a.png", title, ["$^$", "<|end|>"], [(name, np.full(2, 0.5), np.eye(2))])
    (figure,) = drawn
    texts = [text for text in figure.findobj(Text) if text.get_text() in (title, name)]
    assert len(texts) == 2
    assert all(text.get_window_extent().x1 < figure.bbox.x1 for text in texts)


def test_a_full_disk_leaves_the_page_that_was_there(written, model, monkeypatch, tmp_path):
    def stops_half_way(path, text, **how):
        whole(path, text[: len(text) // 2] if "inspect.html" in path.name else text, **how)
        if "inspect.html" in path.name:
            raise OSError("No space left on device")

    output, whole = Path(shutil.copytree(written, tmp_path / "run")), Path.write_text
    monkeypatch.setattr(Path, "write_text", stops_half_way)
    with pytest.raises(OSError, match="No space"):
        inspect.run(model, "another text", None, output)
    assert page_of(output) == page_of(written)


def test_named_layers_alone_are_shown(model, tmp_path):
    inspect.run(model, "the sun", "2", tmp_path / "run")
    assert [layer["layer"] for layer in page_of(tmp_path / "run")["layers"]] == [2]


# --- the page


@pytest.mark.parametrize("family", ["softmax", "mamba"])
def test_a_page_holds_the_weights_to_four_thousandths(family):
    found = tables(make_layer(**FAMILIES[family]), time=7)
    rows, columns = np.tril_indices(7)
    for head, stored in enumerate(inspection_page.page_data(found)["heads"]):
        for name, wanted in {"prior": found.prior[head], "posterior": found.posterior[head]}.items():
            packed = np.frombuffer(base64.b64decode(stored[name]), dtype=np.uint8).reshape(len(wanted), -1)
            unpacked = np.zeros_like(wanted)
            unpacked[:, rows, columns] = (packed / 255) ** 2
            np.testing.assert_allclose(unpacked, wanted, atol=0.004)
            np.testing.assert_allclose(unpacked[wanted < 0.01], wanted[wanted < 0.01], atol=0.0004)
        np.testing.assert_allclose(np.array(stored["gap"]) / 1000, found.gap[head].ravel(), atol=0.0006)
        np.testing.assert_allclose(np.array(stored["lambda"]) / 1000, found.lambda_[head].ravel(), atol=0.0006)


def test_no_token_breaks_out_of_the_data(tmp_path):
    names = ["</script>", "<!--", "INSPECTION", "\u2028", '"']
    page = inspection_page.page("</script>", names, [tables(make_layer())], (0, 0))
    (tmp_path / "inspect.html").write_text(page, encoding="utf-8")
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    template = files("fem.inspect").joinpath("page.html").read_text(encoding="utf-8")
    assert page.count("</script") == template.count("</script") == 2
    assert "<!--" not in page
    assert page_of(tmp_path)["tokens"] == names


def test_the_page_needs_no_network(written):
    page = (written / "inspect.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert "".join(page_of(written)["tokens"]) == TEXT


def test_a_page_too_large_for_a_browser_is_refused(monkeypatch, model, tmp_path):
    monkeypatch.setattr(inspection_page, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"page must stay under 0 MB, got .* name fewer --layers"):
        inspect.run(model, "the sun", None, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# --- refusals


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model": "nowhere"}, "model must be a folder"),
        ({"text": "sun \udcff"}, "text must be text in UTF-8, got .sun "),
        ({"text": ""}, "text must have 1 to 64 tokens, got 0; give a longer one"),
        ({"text": "sun " * 90}, r"text must have 1 to 64 tokens, got \d+; shorten it"),
        ({"layers": "3"}, "layers must be from 1, 2; got '3'"),
        ({"layers": "all"}, "layers must be from 1, 2; got 'all'"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(monkeypatch, capsys, tmp_path, model, changes, sentence):
    monkeypatch.chdir(tmp_path)
    given = {"model": model, "text": "the sun"} | changes
    options = [word for name in ("text", "layers") if name in given for word in (f"--{name}", given[name])]
    assert fem(monkeypatch, "inspect", "--model", given["model"], *options) == 2
    answer = capsys.readouterr().err.strip()
    assert re.match(f"error: {sentence}", answer)
    assert answer.count("\n") == 0
    assert not (tmp_path / "runs" / "inspect").exists()


def test_a_model_without_fem_is_refused(monkeypatch, capsys, tmp_path, tokenizer):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1))
    folder = saved(gpt2, tokenizer, tmp_path / "gpt2")
    assert fem(monkeypatch, "inspect", "--model", folder, "--text", "the", "--output", str(tmp_path / "run")) == 2
    assert "model must have Free Energy Mixer layers, got a GPT2LMHeadModel without any." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preserve", [True, False])
def test_a_model_whose_attention_was_replaced_is_read_as_it_computes(tmp_path, tokenizer, preserve):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2))
    model = replace_attention(gpt2, preserve=preserve)
    found = inspect.run(saved(model, tokenizer, tmp_path / "model"), "the sun sees the moon", None, tmp_path / "out")
    ids = torch.tensor([tokenizer("the sun sees the moon")["input_ids"]])
    parts = list(readers(model))
    assert len(parts) == 2
    factors = {}
    keep = lambda gate, given: factors.update({gate: gate.factors(given[0])})  # noqa: E731
    hooks = [part.gate.register_forward_pre_hook(keep) for part in parts]
    first, second = readings(model, ids)
    for hook in hooks:
        hook.remove()
    for part, reading in zip(parts, (first, second)):
        torch.testing.assert_close((reading.lambda_, reading.gate), factors[part.gate], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(reading.prior.sum(-1), torch.ones_like(reading.prior[..., 0]))
        assert not reading.prior.triu(1).any()
    shown = [row["lambda"] for row in found["heads"]]
    expected = [reading.lambda_[0, :, head].mean().item() for reading in (first, second) for head in range(2)]
    assert shown == pytest.approx(expected, rel=1e-4)
