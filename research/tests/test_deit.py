"""DeiT's recipe by timm, and pictures of the hub that are read as they are used."""

import io
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")
pytest.importorskip("PIL", reason="needs free-energy-mixer[vision]")

import datasets
import pyarrow.parquet as pq
from command_line import fem
from PIL import Image
from rich.progress import Progress
from trainings import interrupted, same

from fem.models import FEMForImageClassification
from fem_research.vision import images, training, views
from fem_research.vision.settings import COPIES, PROFILES, VisionRecipe

TINY = {"mixers": "softmax+CLTG", "seeds": 1, "image_size": 8, "patch_size": 4, "channels": 3, "width": 16, "layers": 1}
TINY |= {"heads": 2, "epochs": 3, "batch": 4, "validations": 3}
PLAIN = VisionRecipe(**TINY)
DEIT = replace(PLAIN, recipe="deit", flip=True, min_area=0.3, drop_path=0.2, mixup=0.8, cutmix=1.0)
CLASSES = ["red", "blue", "green"]
NAME = "somebody/colours"


@pytest.fixture(scope="module")
def deit():
    pytest.importorskip("timm", reason="needs free-energy-mixer[deit]: make test-deit")
    from fem_research.vision import deit

    return deit


def noisy(seed):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(256, size=(12, 10, 3), dtype=np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def table(first, count):
    kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=CLASSES))
    files = [noisy(seed) for seed in range(first, first + count)]
    return datasets.Dataset.from_dict({"image": files, "label": [seed % 3 for seed in range(count)]}, kinds)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder of Parquet files, read by the library as a dataset of the hub is; returns the files opened so far."""
    folder = tmp_path / "hub"
    folder.mkdir()
    sizes = {"train": 14, "validation": 6}
    for split, count in sizes.items():
        for part in range(2):
            table(100 * part + len(split), count // 2).to_parquet(folder / f"{split}-{part}.parquet")
    splits = "".join(
        f"\n  - name: {split}\n    num_examples: {count}\n    num_bytes: 1" for split, count in sizes.items()
    )
    names = "".join(f"\n            '{number}': {name}" for number, name in enumerate(CLASSES))
    (folder / "README.md").write_text(
        f"---\ndataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n"
        f"      class_label:\n        names:{names}\n  splits:{splits}\n---\n"
    )
    load = datasets.load_dataset
    monkeypatch.setattr(images, "way_to_the_hub", lambda: None)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)  # datasets 4.0 has none
    monkeypatch.setattr(
        images, "load_dataset", lambda _, **given: load(str(folder), cache_dir=str(tmp_path / "cache"), **given)
    )
    opened, read = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: opened.append(1) or read(*a, **k))
    return opened


def ends(job, pictures, path):
    record = training.train(job, pictures, path / "run", path / "model", Progress(disable=True))
    return record, list(FEMForImageClassification.from_pretrained(path / "model").parameters())


def pictures(count=14):
    return images.Pictures(table(0, count).cast_column("image", datasets.Image(decode=False)),
                           table(50, 6).cast_column("image", datasets.Image(decode=False)), CLASSES)  # fmt: skip


def test_a_stream_has_the_pictures_of_the_whole_dataset(hub):
    stream, whole = images.load_pictures(NAME, stream=True), images.load_pictures(NAME)
    assert stream.counts == whole.counts == (14, 6)
    assert stream.classes == whole.classes == CLASSES
    named = lambda row: (row["image"]["bytes"], row["label"])  # noqa: E731
    assert [named(row) for row in stream.train] == [named(row) for row in whole.train]
    assert len(images.to_check(stream)) == 0


@pytest.mark.parametrize("part", [r"\n  splits:.*(?=\n---\n)", r"dataset_info:.*(?=\n---\n)"])
def test_a_stream_that_does_not_tell_what_it_holds_is_refused(hub, tmp_path, part):
    page = tmp_path / "hub" / "README.md"
    page.write_text(re.sub(part, "", page.read_text(), flags=re.DOTALL))
    with pytest.raises(ValueError, match=f"stream needs data that tell .*, got '{NAME}', which do not"):
        images.load_pictures(NAME, stream=True)


def test_a_stream_gives_every_picture_once_a_turn_in_new_orders_and_crops(hub):
    files = images.load_pictures(NAME, stream=True).train
    stream = views.Stream(files, PLAIN, training=True)
    found = [next_ for next_, _ in zip(stream, range(28))]
    turns = [[example["labels"] for example in part] for part in (found[:14], found[14:])]
    assert sorted(turns[0]) == sorted(turns[1])
    assert turns[0] != turns[1]
    assert len({tuple(example["pixel_values"].flatten().tolist()) for example in found}) == 28
    again = [next_ for next_, _ in zip(views.Stream(files, PLAIN, training=True), range(28))]
    assert same([x["pixel_values"] for x in found], [x["pixel_values"] for x in again])
    thrice = [x["labels"] for x, _ in zip(views.Stream(files, PLAIN, training=True, copies=COPIES), range(42))]
    assert thrice == [label for label in turns[0] for _ in range(COPIES)]


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_stream_trains_and_goes_on(hub, tmp_path, monkeypatch, workers):
    """Three workers for two files: one has nothing to read."""
    job = replace(PLAIN, data=NAME, stream=True, workers=workers)

    with interrupted(monkeypatch, training.ImageWatch, 9):
        ends(job, images.load_pictures(NAME, stream=True), tmp_path)
    record, _ = ends(job, images.load_pictures(NAME, stream=True), tmp_path)
    assert [point["step"] for point in record["curve"]] == [4, 8, 12]


def test_what_is_not_installed_is_said_before_any_picture_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "fem_research.vision.deit", raising=False)
    monkeypatch.setattr("fem.extras.requires", lambda _: ["timm>=1.0; extra == 'deit'"])
    monkeypatch.chdir(tmp_path)
    assert fem(monkeypatch, "vision", "--profile", "deit-tiny", "--data", "nowhere/at-all") == 2
    assert capsys.readouterr().err.startswith("error: this needs timm, which is not installed: pip install '.[deit]'")


def test_the_profiles_have_deits_rates_and_no_clipping(tmp_path):
    """main.py of DeiT: lr 5e-4 x 1024 / 512, warm-up from 1e-6 for 5 of 300 epochs, cosine to 1e-5, no clipping."""
    from transformers import get_scheduler

    job = VisionRecipe(**PROFILES["deit-tiny"] | {"dtype": "float32", "workers": 0})
    args = training.training_arguments(job, 1_281_167, tmp_path)
    assert args.max_steps == 300 * 1251
    assert args.max_grad_norm == 0
    optimiser = torch.optim.SGD([torch.zeros(1)], args.learning_rate)
    given = {"scheduler_specific_kwargs": args.lr_scheduler_kwargs, "num_warmup_steps": args.warmup_steps}
    schedule = get_scheduler(args.lr_scheduler_type, optimiser, num_training_steps=args.max_steps, **given)
    rate = lambda step: args.learning_rate * schedule.lr_lambdas[0](step)  # noqa: E731
    assert rate(0) == pytest.approx(1e-6)
    assert rate(5 * 1251) == pytest.approx(1e-3, rel=1e-3)
    assert rate(args.max_steps - 1) == pytest.approx(1e-5, rel=1e-3)


def test_training_pictures_are_augmented_by_timm(deit):
    job = VisionRecipe(**PROFILES["deit-tiny"])
    said = str(deit.augmentation(job).args[0])
    for part in ("scale=(0.08, 1.0)", "bicubic", "RandomHorizontalFlip(p=0.5)", "RandAugment(n=2", "m=9, mstd=0.5"):
        assert part in said
    assert "RandomErasing(p=0.25, mode=pixel, count=(1, 1))" in said
    assert "ColorJitter" not in said


def test_every_copy_of_a_picture_has_its_own_crop_and_the_same_again(deit):
    view = views.View(pictures().train, DEIT, training=True)
    torch.manual_seed(3)
    after = torch.rand(1)
    torch.manual_seed(3)
    found = [view[place]["pixel_values"] for place in (0, 14, 28, 0)]
    assert torch.equal(torch.rand(1), after), "what others draw goes on as if none had been drawn here"
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_third_of_the_pictures_stands_three_times_in_an_epoch_of_whole_batches(deit):
    view = views.View(pictures().train, DEIT, training=True)
    orders = []
    for view.epoch in (0, 1):
        orders.append(list(deit.Copies(view)))
        assert len(orders[-1]) == 12
        assert [place // 14 for place in orders[-1]] == 4 * [0, 1, 2]
        assert all(len({place % 14 for place in orders[-1][i : i + 3]}) == 1 for i in range(0, 12, 3))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_labels_of_a_mixture_tell_what_is_in_it(deit, mixup, cutmix):
    """Pictures of one colour, the number of their class: the mean pixel is the mean class."""
    batches = views.Batches(4, replace(DEIT, mixup=mixup, cutmix=cutmix, smoothing=0.0))
    classes = torch.tensor([0, 3, 1, 2])
    shares = set()
    for seed in range(20):
        x = classes[:, None, None, None].repeat(1, 1, 8, 8).float()
        draws = {"draw": np.random.default_rng(seed)}
        found = batches([{"pixel_values": image, "labels": int(k)} | draws for image, k in zip(x, classes)])
        y = found["labels"].double()
        torch.testing.assert_close(y.sum(-1), torch.ones(4, dtype=torch.float64))
        torch.testing.assert_close(found["pixel_values"].double().mean((1, 2, 3)), y @ torch.arange(4.0).double())
        shares.add(round(y.max().item(), 6))
    assert len(shares) > 10


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_run_of_deits_goes_on_as_if_it_had_not_been_stopped(deit, tmp_path, monkeypatch, workers):
    job = replace(DEIT, workers=workers)
    whole = ends(job, pictures(), tmp_path / "whole")

    with interrupted(monkeypatch, training.ImageWatch, 5):
        ends(job, pictures(), tmp_path / "stopped")
    resumed = ends(job, pictures(), tmp_path / "stopped")
    assert same(resumed[1], whole[1])
    assert [point["step"] for point in whole[0]["curve"]] == [3, 6, 9]


def test_deits_recipe_of_a_stream(deit, hub, tmp_path):
    job = replace(DEIT, data=NAME, stream=True)
    record, _ = ends(job, images.load_pictures(NAME, stream=True), tmp_path)
    assert [point["step"] for point in record["curve"]] == [3, 6, 9]
