"""Labelled pictures: digits, a folder, a zip file, a dataset of the hub, which may be read as it is used."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    Features,
    Image,
    IterableDataset,
    concatenate_datasets,
    load_dataset,
)
from huggingface_hub.constants import HF_HUB_OFFLINE
from PIL import Image as Pillow

from fem.train.data import way_to_the_hub

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
HELD_OUT = ("validation", "val", "test")
DIGITS_TESTED = 360
AT_ONCE = 1024  # files in memory while pictures are checked
CHECKED = 10_000  # pictures that are read before the training
IN_ZIP = "zip://"
SOURCES = "data must be digits, a folder, a zip file or a dataset of the hub"
MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Pictures:
    """Image files with labels to train on and to test on, {"image": {"bytes", "path"}, "label"}, and class names."""

    train: Dataset | IterableDataset
    test: Dataset | IterableDataset
    classes: list[str]

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """The pictures to train on and to test on; None where a stream does not tell, which is refused."""
        return _count(self.train), _count(self.test)


def load_pictures(source: str, stream: bool = False) -> Pictures:
    """Pictures from "digits", a folder or a zip file of <split>/<class>/<picture>, or a dataset of the hub. stream:
    read that dataset as it is used; all of it is downloaded otherwise."""
    if stream and ("/" not in source or Path(source).exists()):
        raise ValueError(f"stream needs a dataset of the hub (OWNER/NAME), got data = {source!r}.")
    if source == "digits":
        return digits()
    path = Path(source)
    if path.is_dir():
        names = sorted(p.relative_to(path).as_posix() + "/" * p.is_dir() for p in path.rglob("*"))
        return _laid_out(source, names, lambda name: {"bytes": None, "path": str(path / name)})
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist())
        return _laid_out(source, names, lambda name: {"bytes": None, "path": f"{IN_ZIP}{name}::{path}"})
    if path.exists():
        raise ValueError(f"{SOURCES}, got the file {source!r}.")
    return _of_the_hub(source, stream)


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
        with Pillow.open(_opened(file)) as picture:
            return picture.convert(MODES[channels])
    except (OSError, ValueError, SyntaxError, zipfile.BadZipFile, Pillow.DecompressionBombError) as error:
        raise ValueError(f"{file['path']!r} is no picture that can be read: {error}") from error


def _opened(file: dict) -> str | io.BytesIO:
    if file["bytes"] is not None:
        return io.BytesIO(file["bytes"])
    if not file["path"].startswith(IN_ZIP):
        return file["path"]
    name, _, archive = file["path"].removeprefix(IN_ZIP).rpartition("::")
    return io.BytesIO(_archive(archive, os.getpid()).read(name))


@functools.cache
def _archive(path: str, process: int) -> zipfile.ZipFile:
    """An archive that stays open: each process has its own, as they would move each other's place in it."""
    return zipfile.ZipFile(path)


def to_check(pictures: Pictures) -> Dataset:
    """The pictures that are read before a training: all of a small set, evenly spaced ones of a large one, and none of
    a stream. The others are met in training, which they end as these do."""
    parts = [files for files in (pictures.train, pictures.test) if isinstance(files, Dataset)]
    files = concatenate_datasets(parts) if parts else Dataset.from_dict({"image": []})
    return files.select(range(0, len(files), -(-len(files) // CHECKED) or 1))


def check(files: Dataset, channels: int, smallest: int, advance: Callable[[], None] = lambda: None) -> None:
    """Read each of the pictures. Raises ValueError where any cannot be read, or are smaller than `smallest`."""

    def fault(file: dict) -> list[str]:
        try:
            width, height = open_picture(file, channels).size
        except ValueError as error:
            return [str(error)]
        told = f"{file['path']!r} has {width} x {height} pixels, less than a patch of {smallest}."
        return [told] if min(width, height) < smallest else []

    faults: list[str] = []
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


def _of_the_hub(name: str, stream: bool) -> Pictures:
    if "/" not in name:
        raise ValueError(f"{SOURCES} (OWNER/NAME), got {name!r}, which is no file or folder here.")
    try:
        if not HF_HUB_OFFLINE:
            way_to_the_hub()
        splits = load_dataset(name, streaming=stream)
    except Exception as error:  # what the hub raises differs by connection, name and version
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{SOURCES}, got {name!r}: {reason}") from error
    held_out = _held_out(name, set(splits))
    if (features := splits["train"].features) is None:
        raise ValueError(f"stream needs data that tell their columns, got {name!r}, which do not.")
    first = lambda wanted: next((c for c, kind in features.items() if isinstance(kind, wanted)), None)  # noqa: E731
    columns = [first(Image), first(ClassLabel)]
    if None in columns:
        told = f"{name!r} with {', '.join(features)}"
        raise ValueError(f"data must have a column of images and one of classes, got {told}.")

    def part(split: str) -> Dataset | IterableDataset:
        files = splits[split].cast_column(columns[0], Image(decode=False)).select_columns(columns)
        return files.rename_columns({old: new for old, new in zip(columns, ("image", "label")) if old != new})

    pictures = Pictures(part("train"), part(held_out), features[columns[1]].names)
    if None in pictures.counts:
        raise ValueError(f"stream needs data that tell how many pictures they have, got {name!r}, which do not.")
    return pictures


def _count(files: Dataset | IterableDataset) -> int | None:
    if isinstance(files, Dataset):
        return len(files)
    told = (files.info.splits or {}).get(str(files.split))
    return told and told.num_examples


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
