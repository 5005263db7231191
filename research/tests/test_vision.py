"""`fem vision`: the image classifier, its data and augmentations, training, and the experiment."""

import io
import json
import os
import zipfile
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")
pytest.importorskip("PIL", reason="needs free-energy-mixer[vision]")
pytest.importorskip("sklearn", reason="needs free-energy-mixer[vision]")

import datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import stirred
from PIL import Image
from rich.progress import Progress
from trainings import interrupted, same
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from fem import PRIORS
from fem.models import FEMForImageClassification, FEMImageConfig
from fem_research.vision import experiment, images, training, views
from fem_research.vision.experiment import VisionRecipe, run
from fem_research.vision.settings import PROFILES

TINY = {
    "image_size": 9,
    "patch_size": 3,
    "num_channels": 2,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 5,
}
ATTENTION = {"use_conv": False, "use_lse": False, "use_temperature": False, "use_outer_gate": False}
RECIPE = VisionRecipe(
    seeds=1,
    image_size=4,
    patch_size=2,
    channels=3,
    width=16,
    layers=1,
    heads=2,
    epochs=3,
    batch=4,
    drop_path=0.2,
    flip=True,
    validations=3,
)


def classifier(**fields):
    torch.manual_seed(0)
    return FEMForImageClassification(FEMImageConfig(**TINY | fields))


def randomised(model):
    """Every weight away from 0, where the conditioner, biases and the class token start and would hide errors."""
    return stirred(model, 0.1).eval()


# the model


def test_a_kept_mlp_gives_the_papers_parameters():
    """Table 3: FEM in DeiT-Tiny has 5.8M parameters, in DeiT-Small 22.3M, beside DeiT's 5.7M and 22.0M."""
    for profile, millions in (("deit-tiny", 5.84), ("deit-small", 22.42)):
        job = VisionRecipe(**PROFILES[profile] | {"mixers": "softmax+CLTG", "mlp": "kept"})
        config = training.model_config(job, [str(number) for number in range(1000)])
        assert config.intermediate_size == 4 * job.width
        with torch.device("meta"):
            assert round(FEMForImageClassification(config).num_parameters() / 1e6, 2) == millions


def test_without_its_parts_the_model_is_transformers_vit():
    ours = randomised(classifier(mixer=ATTENTION))
    theirs = ViTForImageClassification(
        ViTConfig(
            image_size=9,
            patch_size=3,
            num_channels=2,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=ours.config.intermediate_size,
            num_labels=5,
            layer_norm_eps=1e-6,
        )
    ).eval()
    copies = [
        (theirs.vit.embeddings.patch_embeddings.projection, ours.model.tokens.project),
        (theirs.vit.layernorm, ours.model.norm),
        (theirs.classifier, ours.classifier),
    ]
    for there, here in zip(theirs.vit.layers, ours.model.layers):
        attention = there.attention
        copies += [
            (there.layernorm_before, here.mixer_norm),
            (there.layernorm_after, here.mlp_norm),
            (attention.q_proj, here.mixer.prior.query),
            (attention.k_proj, here.mixer.prior.key),
            (attention.v_proj, here.mixer.value),
            (attention.o_proj, here.mixer.output),
            (there.mlp.fc1, here.mlp[0]),
            (there.mlp.fc2, here.mlp[2]),
        ]
    with torch.no_grad():
        theirs.vit.embeddings.cls_token.copy_(ours.model.tokens.class_token)
        theirs.vit.embeddings.position_embeddings.copy_(ours.model.tokens.positions)
        for there, here in copies:
            there.weight.copy_(here.weight)
            there.bias.copy_(here.bias)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    x = torch.randn(3, 2, 9, 9)
    torch.testing.assert_close(ours(x).logits, theirs(x).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("profile", "prior"), [("deit-tiny", "softmax"), ("deit-small", "gla")])
def test_models_have_deits_parameters(profile, prior):
    width, heads = PROFILES[profile]["width"], PROFILES[profile]["heads"]
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 12, "num_labels": 1000}
    with torch.device("meta"):
        deit = ViTForImageClassification(ViTConfig(intermediate_size=4 * width, **sizes)).num_parameters()
        ours = FEMForImageClassification(FEMImageConfig(prior_type=prior, **sizes)).num_parameters()
    assert deit / 1e6 == pytest.approx(experiment.TABLE_3[profile]["DeiT"][1], abs=0.06)
    assert ours == pytest.approx(deit, rel=0.004)


def test_a_head_fits_what_problem_type_names():
    x = torch.randn(2, 2, 9, 9)
    several, numbers = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[0.3], [2.0]])
    model = randomised(classifier(num_labels=3, problem_type="multi_label_classification"))
    found = model(x, labels=several)
    torch.testing.assert_close(found.loss, nn.functional.binary_cross_entropy_with_logits(found.logits, several))
    model = randomised(classifier(num_labels=1, problem_type="regression"))
    found = model(x, labels=numbers)
    torch.testing.assert_close(found.loss, (found.logits - numbers).square().mean())
    model.loss_function = lambda labels, logits, config: (logits - labels).abs().sum()
    model.config.problem_type = None
    torch.testing.assert_close(model(x, labels=numbers).loss, (found.logits - numbers).abs().sum())
    with pytest.raises(ValueError, match="num_labels must be at least 2 to classify, got 1"):
        classifier(num_labels=1)(x, labels=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 2\), got \(2,\)"):
        classifier(num_labels=2, problem_type="regression")(x, labels=torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize(("prior", "pooling"), list(zip(PRIORS, cycle(["cls", "mean"]))))
def test_every_pixel_counts_and_every_weight_learns(prior, pooling):
    model = randomised(classifier(prior_type=prior, pooling=pooling)).train()
    x = torch.randn(2, 2, 9, 9, requires_grad=True)
    model(x, labels=torch.tensor([1, 4])).loss.backward()
    assert (x.grad != 0).all()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        shifts_whole_rows = name.endswith("key.bias")
        assert shifts_whole_rows or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_without_positions_the_order_of_patches_says_nothing(pooling):
    model = randomised(classifier(mixer={"use_conv": False}, pooling=pooling)).double()
    with torch.no_grad():
        model.model.tokens.positions.zero_()
    x = torch.randn(1, 2, 9, 9, dtype=torch.float64)
    patches = x.reshape(2, 3, 3, 3, 3).permute(1, 3, 0, 2, 4).flatten(0, 1)
    shuffled = patches[torch.randperm(9)].unflatten(0, (3, 3)).permute(2, 0, 3, 1, 4).reshape(1, 2, 9, 9)
    assert not torch.equal(x, shuffled)
    torch.testing.assert_close(model(x).logits, model(shuffled).logits, rtol=1e-9, atol=1e-9)


def test_a_saved_model_comes_back_through_the_auto_class(tmp_path):
    model = randomised(classifier(prior_type="gla", mixer={"use_conv": False, "decay": "channel"}, pooling="mean"))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    x = torch.randn(2, 2, 9, 9)
    torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=0, atol=0)
    assert loaded.config.intermediate_size == model.config.intermediate_size


def test_weights_that_were_not_loaded_start_as_in_a_new_model(tmp_path):
    model = classifier()
    model.save_pretrained(tmp_path)
    other = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    assert other.classifier.weight.shape == (7, 16)
    torch.testing.assert_close(other.model.tokens.positions, model.model.tokens.positions, rtol=0, atol=0)


def test_the_loss_is_the_cross_entropy_of_classes_and_of_probabilities():
    model = randomised(classifier())
    x, classes = torch.randn(3, 2, 9, 9), torch.tensor([0, 4, 2])
    probabilities = torch.rand(3, 5).softmax(-1)
    log_p = model(x).logits.double().log_softmax(-1)
    hard = -sum(log_p[i, c] for i, c in enumerate(classes)) / 3
    soft = -sum(probabilities[i, c] * log_p[i, c] for i in range(3) for c in range(5)) / 3
    assert model(x, classes).loss.item() == pytest.approx(hard.item(), rel=1e-5)
    assert model(x, probabilities).loss.item() == pytest.approx(soft.item(), rel=1e-5)


def test_gradient_checkpointing_changes_no_gradient():
    model = randomised(classifier()).train()
    x, labels = torch.randn(2, 2, 9, 9), torch.tensor([3, 1])
    model(x, labels).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(x, labels).loss.backward()
    for a, b in zip(plain, model.parameters()):
        torch.testing.assert_close(a, b.grad)


def test_a_dropped_branch_is_gone_for_a_whole_sample_and_right_on_average():
    block = classifier(num_hidden_layers=1).model.layers[0]
    block.mixer_norm = block.mixer = block.mlp_norm = nn.Identity()
    block.mlp, block.drop_path.p = nn.Linear(2, 2, bias=False), 0.3
    nn.init.zeros_(block.mlp.weight)
    x = torch.ones(4000, 1, 2)
    values = block.train()(x) - x
    assert torch.equal(values[..., 0], values[..., 1])
    assert values.unique().tolist() == [0, pytest.approx(1 / 0.7)]
    assert values.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(block.eval()(x), 2 * x)


def test_later_blocks_drop_more_often():
    rates = [block.drop_path.p for block in classifier(num_hidden_layers=3, drop_path_rate=0.2).model.layers]
    assert rates == [0, pytest.approx(0.1), pytest.approx(0.2)]


def test_hidden_states_are_those_between_the_blocks():
    model = randomised(classifier())
    outputs = model(torch.randn(2, 2, 9, 9), output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    last = model.classifier(model.model.norm(outputs.hidden_states[-1])[:, 0])
    torch.testing.assert_close(outputs.logits, last, rtol=0, atol=0)


@pytest.mark.parametrize(
    "fields, error, sentence",
    [
        ({"patch_size": 4}, ValueError, "patch_size must divide image_size = 9, got 4"),
        ({"num_attention_heads": 3}, ValueError, "num_attention_heads must divide hidden_size = 16, got 3"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size must be a positive integer or None, got 0"),
        ({"pooling": "max"}, ValueError, "pooling must be cls or mean, got 'max'"),
        ({"drop_path_rate": 1.0}, ValueError, "drop_path_rate must be below 1, got 1.0"),
        ({"mixer": {"n_head": 2}}, ValueError, "mixer must leave n_head to the model's num_attention_heads"),
        ({"mixer": {"causal": True}}, ValueError, "mixer must leave causal False"),
        ({"mixer": {"use_cnov": True}}, TypeError, "did you mean 'use_conv'"),
        ({"num_layers": 2}, TypeError, "no field 'num_layers' .* did you mean 'num_hidden_layers'"),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(fields, error, sentence):
    with pytest.raises(error, match=sentence):
        FEMImageConfig(**TINY | fields)


@pytest.mark.parametrize(
    "fields, sentence",
    [({"mixer": {"causal": True}}, "leave causal False"), ({"drop_path_rate": 2.0}, "drop_path_rate")],
)
def test_fields_beside_a_folder_are_read_as_the_constructors(fields, sentence, tmp_path):
    FEMImageConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises((ValueError, TypeError), match=sentence):
        FEMImageConfig.from_pretrained(tmp_path, **fields)
    assert FEMImageConfig.from_pretrained(tmp_path, drop_path_rate=0.25).drop_path_rate == 0.25


def test_images_of_another_size_and_labels_of_another_shape_are_refused(as_users_run):
    model = classifier()
    with pytest.raises(ValueError, match=r"pixel_values must have shape \(batch, 2, 9, 9\), got \(1, 2, 12, 12\)"):
        model(torch.randn(1, 2, 12, 12))
    x = torch.randn(1, 2, 9, 9)
    for labels in (torch.zeros(1, 3), torch.zeros(1), torch.ones(1, 5, dtype=torch.int64)):
        with pytest.raises(RuntimeError):  # torch's own
            model(x, labels=labels)
    short, long = (model(x, labels=torch.tensor([3], dtype=dtype)).loss for dtype in (torch.int32, torch.int64))
    assert short == long


# pictures


def png_of(picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def png(colour, size=(5, 4)):
    return png_of(Image.new("RGB", size, colour))


COLOURS = {"blue": (0, 0, 200), "red": (200, 0, 0), "green": (0, 200, 0)}
LAID_OUT = {
    f"{split}/{name}/{index}.png": png(tuple(min(255, value + 8 * index) for value in colour))
    for split, count in (("train", 4), ("test", 2))
    for name, colour in COLOURS.items()
    for index in range(count)
}


def folder(path, files=LAID_OUT):
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return str(path)


def zipped(path, files=LAID_OUT):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return str(path)


def seen(pictures):
    return [
        (np.array(images.open_picture(row["image"], 3)).tolist(), pictures.classes[row["label"]])
        for part in (pictures.train, pictures.test)
        for row in part
    ]


def test_a_folder_and_a_zip_file_hold_the_same_pictures(tmp_path):
    found = [images.load_pictures(make(tmp_path / "data")) for make in (folder,)]
    found.append(images.load_pictures(zipped(tmp_path / "data.zip")))
    assert seen(found[0]) == seen(found[1])
    assert found[1].train[0]["image"]["bytes"] is None, "an archive is read when its pictures are"
    assert found[0].classes == ["blue", "green", "red"]
    assert (len(found[0].train), len(found[0].test)) == (12, 6)
    for colour, name in seen(found[0]):
        assert max(colour[0][0]) == colour[0][0][["red", "green", "blue"].index(name)]


def test_the_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    pictures, theirs = images.load_pictures("digits"), load_digits()
    assert (len(pictures.train), len(pictures.test)) == (1437, 360)
    for index in (0, 3, 359):
        row = pictures.test[index]
        shown = np.array(images.open_picture(row["image"], 1)) / 255 * 16
        np.testing.assert_allclose(shown, theirs.images[1437 + index], atol=0.04)
        assert row["label"] == theirs.target[1437 + index]


def test_a_dataset_of_the_hub_may_name_its_columns_as_it_likes(tmp_path, monkeypatch):
    kinds = datasets.Features(
        number=datasets.Value("int64"), img=datasets.Image(), kind=datasets.ClassLabel(names=["red", "blue"])
    )
    rows = {
        "number": [0, 1],
        "img": [{"bytes": png(COLOURS[c]), "path": None} for c in ("red", "blue")],
        "kind": [0, 1],
    }
    parts = {split: datasets.Dataset.from_dict(rows, kinds) for split in ("train", "val", "test")}
    monkeypatch.setattr(images, "way_to_the_hub", lambda: None)
    monkeypatch.setattr(images, "load_dataset", lambda name, streaming: datasets.DatasetDict(parts))
    pictures = images.load_pictures("somebody/colours")
    assert pictures.classes == ["red", "blue"]
    assert [name for _, name in seen(pictures)] == ["red", "blue"] * 2
    assert seen(pictures)[0][0][0][0] == list(COLOURS["red"])


def without(part):
    return {name: content for name, content in LAID_OUT.items() if part not in name}


@pytest.mark.parametrize("make", [folder, zipped])
@pytest.mark.parametrize(
    "files, sentence",
    [
        ({}, "must hold pictures as <split>/<class>/<picture>, got .* without any"),
        ({"train/cat.png": b"", "notes.txt": b""}, "must hold pictures as"),
        (without("test/"), "a split train and one of validation, val, test, got .* with train"),
        (without("train/"), "a split train and one of validation, val, test, got .* with test"),
        (without("train/red"), "every class must be in train, got 'test/red' .* without 'train/red'"),
        ({n: c for n, c in LAID_OUT.items() if "red" in n}, "two classes or more, got 'red' alone"),
    ],
)
def test_data_that_are_not_laid_out_are_refused(tmp_path, make, files, sentence):
    with pytest.raises(ValueError, match=sentence):
        images.load_pictures(make(tmp_path / "data", files))


def test_a_source_that_is_no_data_set_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(ValueError, match="must be digits, a folder, a zip file or a dataset of the hub, got the file"):
        images.load_pictures(str(tmp_path / "file.txt"))

    def nowhere(name, streaming):
        raise FileNotFoundError(f"no {name} here\nnor there")

    monkeypatch.setattr(images, "way_to_the_hub", lambda: None)
    monkeypatch.setattr(images, "load_dataset", nowhere)
    with pytest.raises(ValueError, match=r"dataset of the hub, got 'no/such': no no/such here$"):
        images.load_pictures("no/such")


def test_a_dataset_without_a_column_of_images_is_refused(monkeypatch):
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    monkeypatch.setattr(images, "way_to_the_hub", lambda: None)
    monkeypatch.setattr(images, "load_dataset", lambda name, streaming: datasets.DatasetDict(train=table, test=table))
    with pytest.raises(ValueError, match="a column of images and one of classes, got 'some/text' with text, label"):
        images.load_pictures("some/text")


@pytest.mark.parametrize("content", [b"", b"no picture", LAID_OUT["train/red/0.png"][:40]])
def test_pictures_that_cannot_be_read_are_counted_and_the_first_is_named(tmp_path, content):
    files = LAID_OUT | {"train/green/2.png": content, "test/red/1.png": content}
    pictures = images.load_pictures(folder(tmp_path / "data", files))
    with pytest.raises(ValueError, match=r"^2 of 18 pictures cannot be used; the first: .*green/2.png' is no picture"):
        images.check(images.to_check(pictures), channels=3, smallest=2)


def test_of_a_large_set_some_pictures_are_read_first_and_the_others_when_they_are_met(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "CHECKED", 6)
    pictures = images.load_pictures(folder(tmp_path / "data", LAID_OUT | {"train/blue/1.png": b"none"}))
    files = images.to_check(pictures)
    assert [Path(row["image"]["path"]).parts[-3] for row in files] == 4 * ["train"] + 2 * ["test"]
    images.check(files, channels=3, smallest=2)
    with pytest.raises(ValueError, match=r"blue/1.png' is no picture that can be read"):
        views.View(pictures.train, PLAIN, training=True)[1]


def test_pictures_smaller_than_a_patch_are_refused(tmp_path):
    pictures = images.load_pictures(folder(tmp_path / "data"))
    read = []
    images.check(images.to_check(pictures), 3, 4, lambda: read.append(1))
    assert len(read) == 18
    with pytest.raises(ValueError, match=r"18 of 18 .* has 5 x 4 pixels, less than a patch of 5"):
        images.check(images.to_check(pictures), channels=3, smallest=5)


# from pictures to tensors

PLAIN = VisionRecipe(image_size=4, channels=3, min_area=0.3, flip=True, smoothing=0.0)


def noise(width, height, mode="RGB"):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8))


@pytest.mark.parametrize(
    "mode, mean, std", [("RGB", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ("L", (0.5,), (0.5,))]
)
def test_pixels_are_normalised_by_channel(mode, mean, std):
    picture = noise(5, 3, mode)
    values = np.array(picture).reshape(3, 5, -1)
    found = views.pixels(picture)
    assert found.shape == (len(mean), 3, 5)
    for c in range(len(mean)):
        for y in range(3):
            for x in range(5):
                assert found[c, y, x].item() == pytest.approx((values[y, x, c] / 255 - mean[c]) / std[c], abs=1e-5)


def test_the_central_crop_is_the_middle_of_the_picture():
    picture = noise(12, 8)
    middle = np.array(picture)[1:7, 3:9]
    np.testing.assert_array_equal(np.array(views.central_crop(picture, 6, 0.75)), middle)


class Sheet(Image.Image):
    """A picture that keeps the box that is cut out of it."""

    def __init__(self, width, height):
        super().__init__()
        self._size = (width, height)

    def resize(self, size, resampling, box):
        self.box = box
        return self


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.floats(0.05, 1), st.integers(0, 99))
def test_random_crops_lie_in_the_picture_and_show_enough_of_it(width, height, min_area, seed):
    sheet = Sheet(width, height)
    views.random_crop(sheet, 4, min_area, np.random.default_rng(seed))
    left, top, right, bottom = sheet.box
    assert -1e-9 <= left < right <= width + 1e-9
    assert -1e-9 <= top < bottom <= height + 1e-9
    w, h = right - left, bottom - top
    assert 3 / 4 - 1e-9 <= w / h <= 4 / 3 + 1e-9
    whole_square = w == pytest.approx(h) == pytest.approx(min(width, height))
    assert whole_square or w * h >= min_area * width * height - 1e-9


def test_a_crop_depends_on_seed_epoch_and_index_alone(tmp_path):
    files = {f"{s}/{c}/{i}.png": png_of(noise(9, 9)) for s in ("train", "test") for c in ("a", "b") for i in range(2)}
    train = images.load_pictures(folder(tmp_path / "data", files)).train

    def look(seed, epoch, index, before=()):
        view = views.View(train, replace(PLAIN, seed=seed), training=True)
        view.epoch = epoch
        for other in before:
            view[other]
        return view[index]["pixel_values"]

    assert torch.equal(look(1, 2, 3), look(1, 2, 3, before=(0, 1, 2)))
    other = [look(5, 2, 3), look(1, 5, 3), look(1, 2, 0)]
    assert not any(torch.equal(look(1, 2, 3), x) for x in other)


def test_labels_are_smoothed_in_training_and_plain_in_tests():
    examples = [{"pixel_values": torch.zeros(1, 2, 2), "labels": label} for label in (2, 0)]
    batches = views.Batches(4, replace(PLAIN, smoothing=0.2))
    assert batches(examples)["labels"].tolist() == [2, 0]
    trained = [example | {"draw": np.random.default_rng(0)} for example in examples]
    expected = torch.tensor([[0.05, 0.05, 0.85, 0.05], [0.85, 0.05, 0.05, 0.05]])
    torch.testing.assert_close(batches(trained)["labels"], expected)


# training


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    path = folder(tmp_path_factory.mktemp("pictures") / "data", {name: png_of(noise(9, 7)) for name in LAID_OUT})
    return images.load_pictures(path)


def trained(job, pictures, path):
    record = training.train(job, pictures, path / "run", path / "model", Progress(disable=True))
    model = FEMForImageClassification.from_pretrained(path / "model")
    untimed = [{name: value for name, value in point.items() if name != "seconds"} for point in record["curve"]]
    return untimed, record, list(model.parameters())


JOB = replace(RECIPE, mixers="softmax+CLTG")


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(pictures, tmp_path, monkeypatch):
    whole = trained(JOB, pictures, tmp_path / "whole")

    with interrupted(monkeypatch, training.ImageWatch, 5):
        trained(JOB, pictures, tmp_path / "stopped")
    assert len(list((tmp_path / "stopped" / "run").glob("checkpoint-*"))) == 1
    resumed = trained(JOB, pictures, tmp_path / "stopped")
    assert resumed[0] == whole[0]
    assert same(resumed[2], whole[2])
    ended = trained(JOB, pictures, tmp_path / "stopped")  # stopped between its last checkpoint and its record
    assert ended[0] == whole[0]
    assert same(ended[2], whole[2])
    assert not same(trained(replace(JOB, seed=1), pictures, tmp_path / "other")[2], whole[2])


def test_every_mixer_sees_the_same_pictures_in_the_same_order_and_new_crops_in_every_epoch(
    pictures, tmp_path, monkeypatch
):
    forward, orders = FEMForImageClassification.forward, []

    def watch(self, pixel_values, labels=None, **given):
        if self.training:
            orders[-1].append(pixel_values.clone())
        return forward(self, pixel_values, labels, **given)

    monkeypatch.setattr(FEMForImageClassification, "forward", watch)
    for mixer in ("softmax+CLTG", "softmax", "gla"):
        orders.append([])
        trained(replace(JOB, mixers=mixer), pictures, tmp_path / mixer)
    assert len(orders[0]) == 9
    assert all(same(a, b) for a, b in pairwise(orders))
    assert len({tuple(image.flatten().tolist()) for batch in orders[0] for image in batch}) == 36


def test_accuracy_is_the_share_of_held_out_pictures_that_are_named_right(pictures, tmp_path):
    _, record, _ = trained(JOB, pictures, tmp_path)
    model = FEMForImageClassification.from_pretrained(tmp_path / "model").eval()
    right = loss = 0.0
    for row in pictures.test:
        image = images.open_picture(row["image"], 3)
        logits = model(views.pixels(views.central_crop(image, 4, 1.0))[None]).logits[0]
        right += (logits.argmax().item() == row["label"]) / 6
        loss += nn.functional.cross_entropy(logits, torch.tensor(row["label"])).item() / 6
    assert record["accuracy"] == pytest.approx(right)
    assert record["loss"] == pytest.approx(loss, rel=1e-4)
    assert [point["step"] for point in record["curve"]] == [3, 6, 9]
    assert record["images_per_second"] > 0
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}


def test_a_run_writes_what_it_promises_and_does_not_train_again(tmp_path, monkeypatch):
    recipe = replace(RECIPE, data=folder(tmp_path / "colours"), seeds=2, epochs=1, validations=1)
    output = tmp_path / "out"
    results = run(recipe, output, "cifar")
    assert results["vision"].keys() == {"softmax", "softmax+CLTG"}
    for score in results["vision"].values():
        assert len(score["accuracies"]) == 2
        assert score["accuracy"] == pytest.approx(sum(score["accuracies"]) / 2)
    page = (output / "report.md").read_text()
    assert "12 training and 6 held-out pictures of 3 classes" in page
    assert "fem vision --profile cifar --data colours" in page
    assert str(tmp_path) not in page
    assert "| over attention, paired | by seed |" in page
    assert (output / "scores.png").read_bytes().startswith(b"\x89PNG")
    for name in ("config.json", "results.json", "metrics.jsonl", "table.csv", "table.md"):
        assert (output / name).stat().st_size
    assert len(list((output / "models").glob("*/model.safetensors"))) == 4
    assert {path.suffix for path in (output / "runs").iterdir()} == {".json"}, "checkpoints go once the record is there"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert {(line["mixer"], line["seed"]) for line in lines} == {
        (m, s) for m in ("softmax", "softmax+CLTG") for s in (0, 1)
    }

    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained again"))
    assert run(recipe, output, "cifar")["vision"] == results["vision"]


def test_table_3_has_the_papers_figures_and_ours_where_we_ran():
    record = {"seed": 0, "parameters": 5_706_016, "loss": 1.0, "images_per_second": 9.0}
    records = [record | {"mixer": "softmax+CLTG", "accuracy": a} for a in (0.5, 0.6)]
    rows = {row["model"]: row for row in experiment.table3(records, "deit-tiny")}
    assert rows["FEM"]["deit-tiny, paper"] == "76.7"
    assert rows["FEM"]["deit-tiny, ours"] == pytest.approx(55)
    assert rows["FEM"]["deit-tiny, M, ours"] == pytest.approx(5.706, abs=1e-3)
    assert rows["DeiT"]["deit-tiny, ours"] is rows["FEM"]["deit-small, ours"] is None
    assert all(row["deit-tiny, ours"] is None for row in experiment.table3(records, "cifar"))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_a_model(profile):
    for job in VisionRecipe(**PROFILES[profile]).jobs():
        assert training.model_config(job, ["a", "b"]).num_tokens > 16


CIFAR = Path(os.environ.get("FEM_DATA", Path(__file__).parents[3] / "shared" / "data")) / "images"


@pytest.mark.skipif(not CIFAR.is_dir(), reason="needs the CIFAR-10 subset: FEM_DATA names a folder with images/*.zip")
def test_the_cifar_subset_is_read_from_its_zip_file():
    (path,) = CIFAR.glob("cifar10*.zip")
    found = images.load_pictures(str(path))
    assert (len(found.train), len(found.test), len(found.classes)) == (5000, 1000, 10)
    assert "airplane" in found.classes
    part = images.Pictures(found.train.select(range(50)), found.test.select(range(50)), found.classes)
    images.check(images.to_check(part), channels=3, smallest=4)


@pytest.mark.slow
def test_the_laptop_profile_learns_digits(tmp_path):
    recipe = VisionRecipe(mixers="fem-sm", seeds=1, validations=1)
    assert run(recipe, tmp_path / "out")["vision"]["softmax+CLTG"]["accuracy"] > 0.75
