"""Labelled pictures (digits, a folder, a zip file, a dataset of the hub), and the inputs of a model made of them."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, load_dataset
from huggingface_hub.constants import HF_HUB_OFFLINE
from jaxtyping import Float
from PIL import Image as Pillow
from torch import Tensor
from torch.utils import data

from fem.train.hub import way_to_the_hub

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
    """Pictures from "digits", a folder or a zip file of <split>/<class>/<picture>, or a dataset of the hub.

    The splits are train, and the first that exists of validation, val and test. Raises ValueError on data that are
    missing, empty, or not laid out in this way.
    """
    if source == "digits":
        return digits()
    path = Path(source)
    if path.is_dir():
        names = [f"{p.relative_to(path).as_posix()}{'/' * p.is_dir()}" for p in sorted(path.rglob("*"))]
        return _laid_out(source, names, lambda name: {"bytes": None, "path": str(path / name)})
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _laid_out(
                source, sorted(archive.namelist()), lambda name: {"bytes": archive.read(name), "path": name}
            )
    if path.exists():
        raise ValueError(f"{SOURCES}, got the file {source!r}.")
    return _of_the_hub(source)


def digits() -> Pictures:
    """1,797 handwritten digits, 8 x 8 grey pixels; the last 360 are held out, since a writer's digits come together."""
    from sklearn.datasets import load_digits

    found = load_digits()
    files = [_png(pixels) for pixels in (found.images * (255 / 16)).round().astype(np.uint8)]
    classes = [str(name) for name in found.target_names]
    cut = len(files) - DIGITS_TESTED
    return Pictures(
        _dataset(files[:cut], found.target[:cut].tolist(), classes),
        _dataset(files[cut:], found.target[cut:].tolist(), classes),
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

    def fault(file: dict) -> str | None:
        try:
            size = open_picture(file, channels).size
        except ValueError as error:
            return str(error)
        if min(size) < smallest:
            return f"{file['path']!r} has {size[0]} x {size[1]} pixels, less than a patch of {smallest}."
        return None

    faults = []
    with ThreadPoolExecutor() as pool:
        for part in (pictures.train, pictures.test):
            for first in range(0, len(part), AT_ONCE):
                for found in pool.map(fault, part[first : first + AT_ONCE]["image"]):
                    faults += [found] if found else []
                    advance()
    if faults:
        total = len(pictures.train) + len(pictures.test)
        raise ValueError(f"{len(faults)} of {total:,} pictures cannot be used; the first: {faults[0]}")


def _laid_out(source: str, names: list[str], read: Callable[[str], dict]) -> Pictures:
    """Pictures from files named <split>/<class>/<picture>."""
    places = [PurePosixPath(name) for name in names]
    pictures = [place for place in places if len(place.parts) == 3 and place.suffix.lower() in SUFFIXES]
    if not pictures:
        raise ValueError(f"data must hold pictures as <split>/<class>/<picture>, got {source!r} without any.")
    counts = Counter(place.parent for place in pictures)
    for name, place in zip(names, places):
        if name.endswith("/") and len(place.parts) == 2 and not counts[place]:
            raise ValueError(f"every class must have pictures, got {str(place)!r} in {source!r} without any.")
    splits = {place.parts[0] for place in pictures}
    held_out = _held_out(source, splits)
    classes = sorted({place.parts[1] for place in pictures if place.parts[0] == "train"})
    for place in counts:
        if place.parts[0] == held_out and place.parts[1] not in classes:
            missing = f"train/{place.parts[1]}"
            raise ValueError(f"every class must be in train, got {str(place)!r} in {source!r} without {missing!r}.")
    if len(classes) < 2:
        raise ValueError(f"data must have two classes or more, got {classes[0]!r} alone in {source!r}.")

    def part(split: str) -> Dataset:
        own = [place for place in pictures if place.parts[0] == split]
        labels = [classes.index(place.parts[1]) for place in own]
        return _dataset([read(str(place)) for place in own], labels, classes)

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
    columns = [
        next((c for c, kind in features.items() if isinstance(kind, wanted)), None) for wanted in (Image, ClassLabel)
    ]
    if None in columns:
        raise ValueError(
            f"data must have a column of images and one of classes, got {name!r} with {', '.join(features)}."
        )

    def part(split: str) -> Dataset:
        files = splits[split].select_columns(columns).rename_columns(dict(zip(columns, ("image", "label"))))
        return files.cast_column("image", Image(decode=False))

    return Pictures(part("train"), part(held_out), features[columns[1]].names)


def _held_out(source: str, splits: set[str]) -> str:
    found = next((split for split in HELD_OUT if split in splits), None)
    if "train" not in splits or found is None:
        raise ValueError(
            f"data must have a split train and one of {', '.join(HELD_OUT)}, "
            f"got {source!r} with {', '.join(sorted(splits))}."
        )
    return found


def _png(pixels: np.ndarray) -> dict:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "digits"}


def _dataset(files: list[dict], labels: list[int], classes: list[str]) -> Dataset:
    features = Features(image=Image(decode=False), label=ClassLabel(names=classes))
    return Dataset.from_dict({"image": files, "label": labels}, features)


MEAN_AND_STD = {1: ((0.5,), (0.5,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training pictures vary: crops of at least `min_area` of the picture, mirror images, mixtures."""

    min_area: float
    flip: bool
    mixup: float
    cutmix: float
    smoothing: float


class View(data.Dataset):
    """Pictures as {"pixel_values" (C, S, S), "labels"}: the central crop or, in training, a random one.

    How a picture is cropped and mirrored depends on seed, epoch and index only, so all models see the same.
    """

    def __init__(
        self,
        files: Dataset,
        size: int,
        channels: int,
        central_share: float,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ):
        self.files, self.size, self.channels, self.central_share = files, size, channels, central_share
        self.augmentation, self.seed, self.epoch = augmentation, seed, 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict:
        row = self.files[index]
        picture = open_picture(row["image"], self.channels)
        if self.augmentation is None:
            crop = central_crop(picture, self.size, self.central_share)
            return {"pixel_values": pixels(crop), "labels": row["label"]}
        draw = np.random.default_rng([self.seed, self.epoch, index])
        crop = random_crop(picture, self.size, self.augmentation.min_area, draw)
        if self.augmentation.flip and draw.random() < 0.5:
            crop = crop.transpose(Pillow.Transpose.FLIP_LEFT_RIGHT)
        return {"pixel_values": pixels(crop), "labels": row["label"], "draw": draw}


def central_crop(picture: Pillow.Image, size: int, share: float) -> Pillow.Image:
    """The central square whose side is `share` of the picture's shorter one, at `size` pixels."""
    width, height = picture.size
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return picture.resize((size, size), Pillow.Resampling.BICUBIC, (left, top, left + side, top + side))


def random_crop(picture: Pillow.Image, size: int, min_area: float, draw: np.random.Generator) -> Pillow.Image:
    """A part of the picture at `size` pixels: its share of the area uniform in [min_area, 1], its aspect log-uniform in
    [3/4, 4/3]; the central square where ten tries find no part that fits.
    """
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
    augmentation: Augmentation

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        x = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.tensor([example["labels"] for example in examples])
        if "draw" not in examples[0]:
            return {"pixel_values": x, "labels": labels}
        rest = self.augmentation.smoothing / self.classes
        y = torch.nn.functional.one_hot(labels, self.classes) * (1 - self.augmentation.smoothing) + rest
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
        mixup, cutmix = self.augmentation.mixup, self.augmentation.cutmix
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
