"""Labelled pictures: scikit-learn's digits, a folder, a zip file, or a dataset of the hub."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, load_dataset
from huggingface_hub.constants import HF_HUB_OFFLINE
from PIL import Image as Pillow

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
