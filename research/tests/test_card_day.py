"""The slices that wait for a card, in miniature: the text's bytes, trainings that stop and go on, cells."""

import csv
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import tarfile
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from typer.testing import CliRunner

from fem.models.presets import count_parameters
from fem.train.signals import Paused
from fem_research.card_day import kernels, layers, linux_text, long, table, table7, training
from fem_research.card_day.__main__ import app
from fem_research.card_day.facts import circumstances_of_card
from fem_research.card_day.recipe import ROWS, TrainingRecipe
from fem_research.common.mixers import canonical
from fem_research.common.names import display
from fem_research.record import append
from fem_research.report import add_runs

MADE = {"hardware": {"processor": "a CPU", "threads": 1, "gpus": []}, "versions": {"python": "3"}, "date": "2026"}
WORDS = ["int", "return", "static", "void", "struct", "device", "if", "(ret)", "goto", "err;", "}", "{\n\t", "0;\n"]


def tarball(path, folders=24, files=6):
    """A small tree of sources: files of random words, one twice, one binary, one too long."""
    draw = np.random.default_rng(0)
    contents = {
        f"linux/drivers/d{folder}/f{number}.c": " ".join(draw.choice(WORDS, 300)).encode()
        for folder in range(folders)
        for number in range(files)
    }
    contents["linux/drivers/d0/again.h"] = contents["linux/drivers/d0/f0.c"]
    contents["linux/drivers/d0/binary.h"] = b"\xff\xfe\x00"
    contents["linux/drivers/d0/long.h"] = b"x " * linux_text.LONGEST
    contents["linux/drivers/d0/Makefile"] = b"obj-y += f0.o"
    with tarfile.open(path, "w:xz") as tree:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tree.addfile(member, io.BytesIO(content))
    return path


SMALL_TEXT = {"megabytes": 1.0, "piece_megabytes": 0.1, "held_out_megabytes": 0.02, "tokenizer_megabytes": 0.1}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    linux_text.pack(tarball(folder / "linux.tar.xz"), folder / "out", vocabulary=300, **SMALL_TEXT)
    return folder / "out"


@pytest.fixture(scope="module")
def tokens(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    linux_text.tokenise(packed, folder)
    return folder


def test_two_packings_and_tokenisings_are_the_same_bytes(packed, tokens, tmp_path):
    linux_text.pack(tarball(tmp_path / "linux.tar.xz"), tmp_path / "out", vocabulary=300, **SMALL_TEXT)
    linux_text.tokenise(tmp_path / "out", tmp_path / "tokens")
    for one, other in ((packed, tmp_path / "out"), (tokens, tmp_path / "tokens")):
        names = sorted(path.name for path in one.iterdir())
        assert names == sorted(path.name for path in other.iterdir())
        assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names if name != "text.json")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="reads a Debian package")
def test_a_package_holds_the_files_of_its_tarball(tmp_path):
    control, source = tmp_path / "root" / "DEBIAN", tmp_path / "root" / "usr" / "src"
    control.mkdir(parents=True)
    source.mkdir(parents=True)
    (control / "control").write_text(
        "Package: linux-source-6.1\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: a test\n"
    )
    inner = tarball(source / "linux-source-6.1.tar.xz")
    package = tmp_path / "package.deb"
    subprocess.run(["dpkg-deb", "--build", tmp_path / "root", package], check=True, capture_output=True)
    assert linux_text.read_sources(package) == linux_text.read_sources(inner)
    inner.unlink()
    subprocess.run(["dpkg-deb", "--build", tmp_path / "root", package], check=True, capture_output=True)
    with pytest.raises(ValueError, match="source must hold"):
        linux_text.read_sources(package)


@pytest.mark.slow
def test_warming_up_trains_a_step_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    training.warm([TINY, replace(TINY, mixer="softmax")], vocabulary=300)
    assert capsys.readouterr().err.count("step 1 of 1") == 2
    assert not list(tmp_path.iterdir())


def test_each_text_is_there_once_and_directories_are_held_out_whole(packed):
    facts = json.loads((packed / linux_text.TEXT).read_text())
    assert facts["left_out"] == {"long": 1, "binary": 1, "duplicate": 1}
    pieces = {
        name: lzma.decompress((packed / f"{name}.xz").read_bytes()).decode().split("\0") for name in facts["pieces"]
    }
    texts = [text for piece in pieces.values() for text in piece]
    assert len(texts) == len(set(texts)) == 24 * 6
    assert len(pieces[linux_text.HELD_OUT]) == 6 * len(facts["held_out_directories"])
    assert all(len(piece) for piece in pieces.values())
    assert len(pieces) > 2


def test_tokens_decode_to_the_texts_of_the_pieces_that_travelled(packed, tmp_path):
    from tokenizers import Tokenizer

    for name in ("held_out.xz", "piece-1.xz", linux_text.TEXT, linux_text.TOKENIZER):
        (tmp_path / name).write_bytes((packed / name).read_bytes())
    facts = linux_text.tokenise(tmp_path, tmp_path / "tokens")
    assert facts["pieces"] == ["held_out", "piece-1"]
    train, _, _ = linux_text.read_tokens(tmp_path / "tokens")
    tokenizer = Tokenizer.from_file(str(packed / linux_text.TOKENIZER))
    end = tokenizer.token_to_id(linux_text.END)
    ends = np.flatnonzero(train == end)
    texts = [tokenizer.decode(part[part != end].tolist()) for part in np.split(np.asarray(train), ends + 1)[:-1]]
    assert texts == lzma.decompress((packed / "piece-1.xz").read_bytes()).decode().split("\0")


def test_a_damaged_piece_is_told(packed, tmp_path):
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "piece-0.xz").write_bytes((packed / "piece-1.xz").read_bytes())
    with pytest.raises(ValueError, match="another text than was packed"):
        linux_text.tokenise(tmp_path, tmp_path / "tokens")
    (tmp_path / "piece-0.xz").write_bytes((packed / "piece-0.xz").read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged or cut off"):
        linux_text.tokenise(tmp_path, tmp_path / "tokens")


def test_every_row_has_the_parameters_of_attention():
    sizes = [count_parameters(training.model_config(TrainingRecipe(mixer=mixer), 16384)) for mixer in ROWS]
    assert all(abs(size / sizes[0] - 1) < 0.005 for size in sizes)
    assert [display(canonical(mixer)) for mixer in ROWS] == list(ROWS)


def test_a_wrong_recipe_is_refused():
    with pytest.raises(ValueError, match="batch must be a multiple of micro"):
        TrainingRecipe(batch=6, micro=4)
    with pytest.raises(ValueError, match="tokens must be at least a step's"):
        TrainingRecipe(tokens=100)


TINY = TrainingRecipe(
    mixer="softmax+CLTG/r4",
    tokens=12 * 4 * 32,
    width=32,
    layers=1,
    heads=2,
    mlp_width=88,
    context=32,
    batch=4,
    micro=2,
    validations=3,
    quick_rows=4,
    compile=False,
)
TIMES = {"seconds", "step_seconds", "first_step_seconds", "compile_seconds", "tokens_per_second", "mfu", "date"}


def without_times(found):
    kept = {name: value for name, value in found.items() if name not in TIMES and name != "peak_memory_bytes"}
    return kept | {"losses": [{**line, "step_seconds": None} for line in found["losses"] if line["step"] % 10 == 0]}


@pytest.mark.slow
def test_a_stopped_training_ends_as_one_that_was_not(tokens, tmp_path, monkeypatch):
    whole = training.train(TINY, tokens, tmp_path / "whole")
    assert whole["finished"]
    assert whole["steps"] == 12
    assert whole["held_out_loss"] > 0
    assert [line["step"] for line in whole["held_out"]] == [4, 8, 12]
    assert training.train(TINY, tokens, tmp_path / "whole") == whole  # not again

    stopped = training.train(TINY, tokens, tmp_path / "parts", deadline=0.0)
    assert not stopped["finished"]
    assert stopped["steps"] == 1
    assert training.train(TINY, tokens, tmp_path / "parts", deadline=0.0)["steps"] == 2
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)  # a save a step
    ended = training.train(TINY, tokens, tmp_path / "parts")
    assert ended["finished"]
    assert ended["held_out_loss"] == whole["held_out_loss"]
    assert [line for line in ended["held_out"] if line["step"] % 4 == 0] == whole["held_out"]
    assert without_times(ended)["recipe"] == without_times(whole)["recipe"]
    assert not (tmp_path / "parts" / "checkpoints" / TINY.key).exists()
    with pytest.raises(ValueError, match="another recipe or text"):
        training.train(replace(TINY, layers=2), tokens, tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ROWS)
def test_every_row_trains_in_miniature_and_says_what_a_card_would(mixer, tokens, tmp_path):
    recipe = replace(TINY, mixer=mixer.replace("r48", "r4"), tokens=8 * 4 * 32, validations=2)
    (found,) = training.run([recipe], tokens, tmp_path)
    assert found["finished"]
    assert found["held_out"][-1]["loss"] < found["losses"][0]["loss"]
    (row,) = table.write(tmp_path)
    assert row["loss"] == found["held_out_loss"]
    kept = json.loads((tmp_path / f"{recipe.key}.json").read_text())
    assert kept == json.loads(json.dumps(found))
    said = {"hardware", "driver", "versions", "date", "flops_formula", "mfu", "peak_memory_bytes", "step_seconds"}
    assert said <= kept.keys()


def test_equal_time_is_read_between_held_out_losses():
    points = [{"step": step, "loss": loss} for step, loss in ((10, 5.0), (20, 4.0))]
    row = {"held_out": points, "step_seconds": 0.2, "finished": True}
    base = {"steps": 20, "step_seconds": 0.15}
    assert table.at_equal_time(row, base) == 4.5
    assert table.at_equal_time(row | {"step_seconds": 0.1}, base) == 4.0
    assert table.at_equal_time(row | {"step_seconds": 0.1, "finished": False}, base) is None


def test_kernels_have_their_groups():
    names = {
        "attention": "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>",
        "products": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "Triton": "triton_poi_fused_mul_silu_8",
        "others": "void at::native::vectorized_elementwise_kernel<4, ...>",
    }
    assert {group: kernels.group_of(name) for group, name in names.items()} == {group: group for group in names}


@pytest.mark.slow
def test_a_row_that_fails_is_told_and_the_next_begins(tokens, tmp_path, monkeypatch, capsys):
    build = training.build_model

    def failing(config, seed):
        if not config.mixer["use_lse"]:
            raise RuntimeError("CUDA out of memory")
        return build(config, seed)

    monkeypatch.setattr(training, "build_model", failing)
    short = replace(TINY, tokens=2 * 128, validations=1)
    found = training.run([replace(short, mixer="softmax"), short], tokens, tmp_path)
    assert [one["recipe"]["mixer"] for one in found] == [short.mixer]
    assert "attention, rate 0.001, seed 0 failed, the next one begins: RuntimeError: CUDA" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_that_diverges_ends_and_says_so(tokens, tmp_path):
    found = training.train(replace(TINY, rate=1e9, warmup=0.0, tokens=40 * 128), tokens, tmp_path)
    assert found["finished"]
    assert "not finite" in found["diverged"] or "the loss is nan" in found["diverged"]
    assert "NaN" not in (tmp_path / f"{replace(TINY, rate=1e9, warmup=0.0, tokens=40 * 128).key}.json").read_text()


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_goes_on(tokens, tmp_path, monkeypatch):
    report = training.CardTrainer.evaluate

    def asked_to_end(trainer, *arguments, **options):
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return report(trainer, *arguments, **options)

    monkeypatch.setattr(training.CardTrainer, "evaluate", asked_to_end)
    with pytest.raises(Paused, match="stopped by SIGTERM; step 5 of 12 is saved"):
        training.train(TINY, tokens, tmp_path)
    kept = json.loads((tmp_path / f"{TINY.key}.json").read_text())
    assert (kept["finished"], kept["steps"]) == (False, 5)
    assert training.train(TINY, tokens, tmp_path)["finished"]


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda: layers.LayersRecipe(modes=("compile",)), "modes must be from eager, .*; got 'compile'"),
        (lambda: long.LongRecipe(parts=("layers",)), "parts must be from layer, model; got 'layers'"),
        (lambda: table7.Table7Recipe(dtypes=("float64",)), "dtypes must be from bfloat16, float32; got 'float64'"),
        (lambda: table7.Table7Recipe(modes=()), "modes must be from compiled, eager; got none"),
        (lambda: table7.Table7Recipe(mixers=("attention", "nix")), "mixer must be a prior .*; got 'nix'"),
        (lambda: long.LongRecipe(mixers=("nix",)), "mixer must be a prior .*; got 'nix'"),
        (lambda: layers.LayersRecipe(mixers=("nix",)), "mixer must be a prior .*; got 'nix'"),
        (lambda: layers.LayersRecipe(lengths=(100,)), "lengths must divide tokens = 16384, got 100"),
    ],
)
def test_what_a_slice_cannot_measure_is_refused(made, said):
    with pytest.raises(ValueError, match=said):
        made()


@pytest.mark.parametrize("options", [["train", "--seeds", "0,1.5"], ["layers", "--lengths", "64.5"]])
def test_a_number_that_is_not_whole_is_refused(options, tmp_path):
    refused = CliRunner().invoke(app, [*options, "--output", str(tmp_path / "out")]).exception
    assert str(refused) == f"{options[1][2:]} must be whole numbers, got {options[2]!r}."
    assert not (tmp_path / "out").exists()


def test_cells_of_another_card_or_commit_do_not_join_those_of_a_folder(tmp_path, monkeypatch):
    recipe = long.LongRecipe(lengths=())
    long.run(recipe, tmp_path)
    long.run(recipe, tmp_path)
    here = circumstances_of_card()
    for changed, said in (
        ({"hardware": here["hardware"] | {"gpus": ["NVIDIA H200"]}}, "machine"),
        ({"code": "54c997fc"}, "commit"),
    ):
        monkeypatch.setattr("fem_research.card_day.cells.circumstances_of_card", lambda changed=changed: here | changed)
        with pytest.raises(ValueError, match=f"output must hold cells of this {said}, got .* choose another"):
            long.run(recipe, tmp_path)


def test_a_damaged_file_of_cells_is_told(tmp_path):
    recipe = long.LongRecipe(lengths=())
    long.run(recipe, tmp_path)
    (tmp_path / "results.json").write_text('{"cells": [')
    with pytest.raises(ValueError, match=r"got a damaged .*results.json"):
        long.run(recipe, tmp_path)


@pytest.mark.slow
def test_long_contexts_and_table7_go_on_where_they_stopped(tmp_path):
    recipe = long.LongRecipe(
        lengths=(32, 64),
        mixers=("attention", "softmax+CLTG/r4", "gla"),
        width=32,
        heads=2,
        layers=1,
        compile=False,
        seconds=0.0,
    )
    first = long.run(recipe, tmp_path, minutes=0.0)
    assert first["cells"] == []
    assert not (tmp_path / "results.json").exists()
    found = long.run(recipe, tmp_path)
    assert found["finished"]
    assert len(found["cells"]) == 12
    assert long.run(recipe, tmp_path) == found
    assert {row["train ms ratio"] for row in long.table(found) if row["mixer"] == "attention"} == {"1.00"}
    with pytest.raises(ValueError, match="output must hold cells of this recipe"):
        long.run(replace(recipe, layers=2), tmp_path)
    with pytest.raises(ValueError, match="output must not hold another experiment"):
        table7.run(table7.Table7Recipe(), tmp_path)

    recipe = table7.Table7Recipe(
        mixers=("attention", "FEM", "RWKV7"),
        modes=("eager",),
        batch=1,
        time=32,
        width=32,
        heads=2,
        layers=1,
        seconds=0.0,
    )
    found = table7.run(recipe, tmp_path / "table7")
    rows = table7.table(found)
    assert [(row["mixer"], row["dtype"]) for row in rows][:2] == [("attention", "bfloat16"), ("FEM", "bfloat16")]
    assert rows[1]["paper's train ratio"] == "1.26"
    assert len(rows) == 4
    assert all(one["train_flop"] > 0 for one in found["cells"])


@pytest.mark.slow
def test_the_slice_of_mad_is_a_sweep_of_its_rows(tmp_path):
    rows = ["--mixers", "attention,FEM", "--tasks", "memorization", "--profile", "laptop", "--workers", "1"]
    result = CliRunner().invoke(app, ["mad", "--output", str(tmp_path), *rows])
    assert result.exception is None
    assert (tmp_path / "results.json").exists()


def record(tmp_path, run, file):
    add_runs([run], tmp_path / "record")
    with open(tmp_path / "record" / f"{file}.csv", newline="") as opened:
        return list(csv.DictReader(opened))


def test_a_slice_of_layers_is_a_run_that_joins_the_record(tmp_path, monkeypatch, capsys):
    run = tmp_path / "card_layers"
    options = ["--mixers", "attention;attention+LTG/r4", "--modes", "eager", "--lengths", "16", "--tokens", "32"]
    options += ["--width", "32", "--heads", "2", "--seconds", "0", "--output", str(run)]
    monkeypatch.setattr("sys.argv", ["card_day", "layers", *options])
    assert CliRunner().invoke(app, ["layers", *options]).exception is None
    cells = json.loads((run / "results.json").read_text())["cells"]
    assert "| train ms ratio |" in (run / "report.md").read_text()  # beside attention, however it is typed
    rows = record(tmp_path, run, "cost")
    assert [row["mixer"] for row in rows] == ["attention", "attention+LTG/r4"]
    assert [float(row["train_ms"]) for row in rows] == [1e3 * cell["train"]["seconds"] for cell in cells]
    said = {"run": "card_layers", "mode": "eager", "device": "cpu", "dtype": "bfloat16", "n_embd": "32", "batch": "2"}
    assert said.items() <= rows[0].items()
    assert all(row["token_ms"] and row["machine"] and row["date"] and not row.get("note") for row in rows)
    assert rows[0]["command"].startswith("make card-day SLICE=layers ARGS='--mixers ")
    assert rows[0]["command"].endswith("--output card_layers'")  # without the folders of the machine


def test_cells_that_fail_say_so_in_the_record(tmp_path):
    recipe = {"width": 8, "heads": 2, "batch": 1, "time": 4, "layers": 1, "device": "cuda"}
    cell = {"mixer": "attention", "dtype": "float32", "mode": "eager", "parameters": 9, "tokens": 4}
    cell |= {"forward": {"seconds": 0.5}, "train": {"failed": "OutOfMemoryError: too little"}}
    config = {"experiment": "card_table7", "recipe": recipe, "driver": "1.2", "code": "abc"} | MADE
    append(tmp_path, "run", "make card-day SLICE=table7", config, {"cells": [cell]})
    with open(tmp_path / "cost.csv", newline="") as opened:
        (row,) = csv.DictReader(opened)
    assert (row["forward_ms"], row["note"]) == ("500.0", "train failed: OutOfMemoryError: too little")
    assert (row["machine"], row["code"]) == ("a CPU, threads: 1, driver 1.2", "abc")


@pytest.mark.slow
def test_trainings_that_have_ended_join_the_record_with_their_losses(tokens, tmp_path, monkeypatch):
    short = replace(TINY, tokens=2 * 128, validations=1)
    run = tmp_path / "train"
    training.run([replace(short, mixer="softmax"), short], tokens, run)
    training.train(replace(short, seed=1), tokens, run, deadline=0.0)  # stopped after a step: no row
    assert CliRunner().invoke(app, ["table", "--output", str(run)]).exception is None
    losses = [
        one["held_out_loss"] for one in json.loads((run / "results.json").read_text())["trainings"] if one["finished"]
    ]
    rows = record(tmp_path, run, "language")
    assert sorted(float(row["score"]) for row in rows) == sorted(losses)
    assert {row["mixer"] for row in rows} == {"attention", "FEM/r4"}
    assert {(row["task"], row["seed"], row["tokens"]) for row in rows} == {("linux sources", "0", "256")}
    curves = record(tmp_path, run, "language_curves")
    assert {(row["mixer"], row["step"]) for row in curves} >= {("attention", "2"), ("FEM/r4", "2")}
