"""Inputs of a model made of pictures: crops, augmentation, batches with smoothed labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from jaxtyping import Float
from PIL import Image as Pillow
from torch import Tensor
from torch.utils import data

from fem_research.vision.images import open_picture
from fem_research.vision.settings import VisionRecipe

MEAN_AND_STD = {1: ((0.5,), (0.5,)), 3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
TRIES = 10
BUFFER = 2_000  # pictures in memory, as files, of which a stream draws the next


class View(data.Dataset):
    """Pictures as {"pixel_values" (C, S, S), "labels"}; crops depend on seed, epoch and place only, for all models.

    Place i + c N is copy c of picture i, of N: each copy has a crop of its own.
    """

    def __init__(self, files: Dataset | IterableDataset, recipe: VisionRecipe, training: bool = False):
        self.files, self.recipe, self.training, self.epoch = files, recipe, training, 0
        self.augment = augmentation(recipe) if training else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> dict:
        return self.example(self.files[place % len(self.files)], place)

    def example(self, row: dict, *place: int) -> dict:
        picture = open_picture(row["image"], self.recipe.channels)
        if self.augment is None:
            crop = central_crop(picture, self.recipe.image_size, self.recipe.central_share)
            return {"pixel_values": pixels(crop), "labels": row["label"]}
        draw = np.random.default_rng([self.recipe.seed, self.epoch, *place])
        return {"pixel_values": self.augment(picture, draw), "labels": row["label"], "draw": draw}


class Stream(data.IterableDataset):
    """The same of pictures that are read as they come: in training without an end, the order shuffled in a buffer, and
    with `copies` of every picture in a row. An order of its own for every `epoch`, and every time it begins anew."""

    def __init__(self, files: IterableDataset, recipe: VisionRecipe, training: bool = False, copies: int = 1):
        self.view = View(files, recipe, training)
        self.copies, self.epoch = copies, 0
        self.files = files.shuffle(seed=recipe.seed, buffer_size=BUFFER) if training else files

    def __iter__(self) -> Iterator[dict]:
        worker = data.get_worker_info()
        self.view.epoch = self.epoch
        for turn in count() if self.view.training else (0,):
            self.files.set_epoch(self.epoch + turn)
            place = -1
            for place, row in enumerate(self.files):
                for copy in range(self.copies):
                    yield self.view.example(row, 0 if worker is None else worker.id, turn, place, copy)
            if place < 0:  # fewer files than workers
                return


def augmentation(recipe: VisionRecipe) -> Callable[[Pillow.Image, np.random.Generator], Float[Tensor, "c s s"]]:
    """What makes a training input of a picture, with what it draws."""
    if recipe.recipe == "deit":
        from fem_research.vision.deit import augmentation as deits

        return deits(recipe)
    return partial(cropped, recipe)


def cropped(recipe: VisionRecipe, picture: Pillow.Image, draw: np.random.Generator) -> Float[Tensor, "c s s"]:
    crop = random_crop(picture, recipe.image_size, recipe.min_area, draw)
    if recipe.flip and draw.random() < 0.5:
        crop = crop.transpose(Pillow.Transpose.FLIP_LEFT_RIGHT)
    return pixels(crop)


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


class Batches:
    """Collates examples: labels are (B,) in testing; in training (B, K), smoothed, and mixed with the pictures."""

    def __init__(self, classes: int, recipe: VisionRecipe):
        self.classes, self.recipe, self.mix = classes, recipe, None
        if recipe.mixup or recipe.cutmix:
            from fem_research.vision.deit import mixture

            self.mix = mixture(recipe, classes)

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        x = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.tensor([example["labels"] for example in examples])
        if "draw" not in examples[0]:
            return {"pixel_values": x, "labels": labels}
        if self.mix is not None:
            return dict(zip(("pixel_values", "labels"), self.mix(x, labels, examples[0]["draw"])))
        rest = self.recipe.smoothing / self.classes
        y = torch.nn.functional.one_hot(labels, self.classes) * (1 - self.recipe.smoothing) + rest
        return {"pixel_values": x, "labels": y}
