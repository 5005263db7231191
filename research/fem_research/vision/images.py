"""Labelled pictures (digits, a folder, a zip file, a dataset of the hub), and the inputs of a model made of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, concatenate_datasets, load_dataset
from huggingface_hub.constants import HF_HUB_OFFLINE
from jaxtyping import Float
from PIL import Image as Pillow
from torch import Tensor
from torch.utils import data

from fem.train.data import way_to_the_hub
from fem_research.vision.settings import VisionRecipe

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
HELD_OUT = ("validation", "val", "test")
DIGITS_TESTED = 360
AT_ONCE = 1024  # files in memory while all are checked
SOURCES = "data must be digits, a folder, a zip file or a dataset of the hub"
MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Pictures:
    """Image files with labels to train on and to test on, {"image": {"bytes", "path"}, "label"}, and class names."""

    train: Dataset
    test: Dataset
    classes: list[str]


def load_pictures(source: str) -> Pictures:
    """Pictures from "digits", a folder or a zip file of <split>/<class>/<picture>, or a dataset of the hub."""
    if source == "digits":
        return digits()
    path = Path(source)
    if path.is_dir():
        names = sorted(p.relative_to(path).as_posix() + "/" * p.is_dir() for p in path.rglob("*"))
        return _laid_out(source, names, lambda name: {"bytes": None, "path": str(path / name)})
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            read = lambda name: {"bytes": archive.read(name), "path": name}  # noqa: E731
            return _laid_out(source, sorted(archive.namelist()), read)
    if path.exists():
        raise ValueError(f"{SOURCES}, got the file {source!r}.")
    return _of_the_hub(source)


def digits() -> Pictures:
    """1,797 handwritten digits, 8 x 8 grey pixels; the last 360 are held out, since a writer's digits come together."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    files = [_png(pixels) for pixels in (bunch.images * (255 / 16)).round().astype(np.uint8)]
    classes = [str(name) for name in bunch.target_names]
    cut = len(files) - DIGITS_TESTED
    return Pictures(
        _dataset(files[:cut], bunch.target[:cut].tolist(), classes),
        _dataset(files[cut:], bunch.target[cut:].tolist(), classes),
        classes,
    )


def open_picture(file: dict, channels: int) -> Pillow.Image:
    """The picture as grey or RGB pixels. Raises ValueError where it cannot be read."""
    try:
        with Pillow.open(file["path"] if file["bytes"] is None else io.BytesIO(file["bytes"])) as picture:
            return picture.convert(MODES[channels])
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ValueError(f"{file['path']!r} is no picture that can be read: {error}") from error


def check(pictures: Pictures, channels: int, smallest: int, advance: Callable[[], None] = lambda: None) -> None:
    """Read every picture once. Raises ValueError on pictures that cannot be read, or are smaller than `smallest`."""

    def fault(file: dict) -> list[str]:
        try:
            width, height = open_picture(file, channels).size
        except ValueError as error:
            return [str(error)]
        told = f"{file['path']!r} has {width} x {height} pixels, less than a patch of {smallest}."
        return [told] if min(width, height) < smallest else []

    files, faults = concatenate_datasets([pictures.train, pictures.test]), []
    with ThreadPoolExecutor() as pool:
        for first in range(0, len(files), AT_ONCE):
            for sentences in pool.map(fault, files[first : first + AT_ONCE]["image"]):
                faults += sentences
                advance()
    if faults:
        raise ValueError(f"{len(faults)} of {len(files):,} pictures cannot be used; the first: {faults[0]}")


def _laid_out(source: str, names: list[str], read: Callable[[str], dict]) -> Pictures:
    """Pictures from files named <split>/<class>/<picture>."""
    files = [path for path in map(PurePosixPath, names) if len(path.parts) == 3 and path.suffix.lower() in SUFFIXES]
    if not files:
        raise ValueError(f"data must hold pictures as <split>/<class>/<picture>, got {source!r} without any.")
    filled = {f"{path.parent}/" for path in files}
    for name in names:
        if name.count("/") == 2 and name.endswith("/") and name not in filled:
            raise ValueError(f"every class must have pictures, got {name[:-1]!r} in {source!r} without any.")
    classes = sorted({path.parts[1] for path in files if path.parts[0] == "train"})
    held_out = _held_out(source, {path.parts[0] for path in files})
    for _, name in sorted({path.parts[:2] for path in files if path.parts[0] == held_out}):
        if name not in classes:
            what = f"'{held_out}/{name}' in {source!r} without 'train/{name}'"
            raise ValueError(f"every class must be in train, got {what}.")
    if len(classes) < 2:
        raise ValueError(f"data must have two classes or more, got {classes[0]!r} alone in {source!r}.")

    def part(split: str) -> Dataset:
        own = [path for path in files if path.parts[0] == split]
        return _dataset([read(str(path)) for path in own], [classes.index(path.parts[1]) for path in own], classes)

    return Pictures(part("train"), part(held_out), classes)


def _of_the_hub(name: str) -> Pictures:
    if "/" not in name:
        raise ValueError(f"{SOURCES} (OWNER/NAME), got {name!r}, which is no file or folder here.")
    try:
        if not HF_HUB_OFFLINE:
            way_to_the_hub()
        splits = load_dataset(name)
    except Exception as error:  # what the hub raises differs by connection, name and version
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{SOURCES}, got {name!r}: {reason}") from error
    held_out = _held_out(name, set(splits))
    features = splits["train"].features
    first = lambda wanted: next((c for c, kind in features.items() if isinstance(kind, wanted)), None)  # noqa: E731
    columns = [first(Image), first(ClassLabel)]
    if None in columns:
        told = f"{name!r} with {', '.join(features)}"
        raise ValueError(f"data must have a column of images and one of classes, got {told}.")

    def part(split: str) -> Dataset:
        files = splits[split].select_columns(columns).rename_columns(dict(zip(columns, ("image", "label"))))
        return files.cast_column("image", Image(decode=False))

    return Pictures(part("train"), part(held_out), features[columns[1]].names)


def _held_out(source: str, splits: set[str]) -> str:
    held_out = next((split for split in HELD_OUT if split in splits), None)
    if "train" not in splits or held_out is None:
        told = f"{source!r} with {', '.join(sorted(splits))}"
        raise ValueError(f"data must have a split train and one of {', '.join(HELD_OUT)}, got {told}.")
    return held_out


def _png(pixels: np.ndarray) -> dict:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "digits"}


def _dataset(files: list[dict], labels: list[int], classes: list[str]) -> Dataset:
    features = Features(image=Image(decode=False), label=ClassLabel(names=classes))
    return Dataset.from_dict({"image": files, "label": labels}, features)


MEAN_AND_STD = {1: ((0.5,), (0.5,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
TRIES = 10


class View(data.Dataset):
    """Pictures as {"pixel_values" (C, S, S), "labels"}; crops depend on seed, epoch and index only, for all models."""

    def __init__(self, files: Dataset, recipe: VisionRecipe, training: bool = False):
        self.files, self.recipe, self.training, self.epoch = files, recipe, training, 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        row, recipe = self.files[index], self.recipe
        picture = open_picture(row["image"], recipe.channels)
        if not self.training:
            crop = central_crop(picture, recipe.image_size, recipe.central_share)
            return {"pixel_values": pixels(crop), "labels": row["label"]}
        draw = np.random.default_rng([recipe.seed, self.epoch, index])
        crop = random_crop(picture, recipe.image_size, recipe.min_area, draw)
        if recipe.flip and draw.random() < 0.5:
            crop = crop.transpose(Pillow.Transpose.FLIP_LEFT_RIGHT)
        return {"pixel_values": pixels(crop), "labels": row["label"], "draw": draw}


def central_crop(picture: Pillow.Image, size: int, share: float) -> Pillow.Image:
    """The central square whose side is `share` of the picture's shorter one, at `size` pixels."""
    width, height = picture.size
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return picture.resize((size, size), Pillow.Resampling.BICUBIC, (left, top, left + side, top + side))


def random_crop(picture: Pillow.Image, size: int, min_area: float, draw: np.random.Generator) -> Pillow.Image:
    """A crop: its share of the area uniform in [min_area, 1], its aspect log-uniform in [3/4, 4/3]; else the centre."""
    width, height = picture.size
    for _ in range(TRIES):
        area = width * height * draw.uniform(min_area, 1)
        aspect = np.exp(draw.uniform(-1, 1) * np.log(4 / 3))
        w, h = np.sqrt(area * aspect), np.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = draw.uniform(0, width - w), draw.uniform(0, height - h)
            return picture.resize((size, size), Pillow.Resampling.BICUBIC, (left, top, left + w, top + h))
    return central_crop(picture, size, 1.0)


def pixels(picture: Pillow.Image) -> Float[Tensor, "c h w"]:
    """(value / 255 - mean) / std, per channel."""
    values = torch.from_numpy(np.array(picture, dtype=np.float32)).reshape(*picture.size[::-1], -1).permute(2, 0, 1)
    mean, std = (torch.tensor(constant)[:, None, None] for constant in MEAN_AND_STD[len(values)])
    return (values / 255 - mean) / std


@dataclass(frozen=True)
class Batches:
    """Collates examples: labels are (B,) in testing; in training (B, K), smoothed, and mixed with the pictures."""

    classes: int
    recipe: VisionRecipe

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        x = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.tensor([example["labels"] for example in examples])
        if "draw" not in examples[0]:
            return {"pixel_values": x, "labels": labels}
        rest = self.recipe.smoothing / self.classes
        y = torch.nn.functional.one_hot(labels, self.classes) * (1 - self.recipe.smoothing) + rest
        return dict(zip(("pixel_values", "labels"), self.mixed(x, y, examples[0]["draw"])))

    def mixed(
        self, x: Float[Tensor, "b c h w"], y: Float[Tensor, "b k"], draw: np.random.Generator
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b k"]]:
        """Pictures and labels mixed with those of the reversed batch, x' and y'.

            mixup:  s x + (1 - s) x',  s ~ Beta(mixup, mixup)
            cutmix: x with a box of x' in it, s the share of the picture outside the box
            labels: s y + (1 - s) y'

        With both switched on, each batch gets either one, by chance.
        """
        mixup, cutmix = self.recipe.mixup, self.recipe.cutmix
        boxed = cutmix > 0 and (mixup == 0 or draw.random() < 0.5)
        alpha = cutmix if boxed else mixup
        if alpha == 0:
            return x, y
        share = float(draw.beta(alpha, alpha))
        if boxed:
            x, share = _boxed(x, share, draw)
        else:
            x = share * x + (1 - share) * x.flip(0)
        return x, share * y + (1 - share) * y.flip(0)


def _boxed(x: Tensor, share: float, draw: np.random.Generator) -> tuple[Tensor, float]:
    size = x.shape[-1]
    side = size * np.sqrt(1 - share)
    (top, bottom), (left, right) = (
        np.clip(np.round(draw.uniform(0, size) + side * np.array([-0.5, 0.5])), 0, size).astype(int) for _ in range(2)
    )
    mixed = x.clone()
    mixed[..., top:bottom, left:right] = x.flip(0)[..., top:bottom, left:right]
    return mixed, float(1 - (bottom - top) * (right - left) / size**2)
