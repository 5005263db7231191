"""From pictures to a model's inputs: crops, mirror images, normalised pixels, and mixtures of two pictures."""

from __future__ import annotations

from dataclasses import dataclass

import datasets
import numpy as np
import torch
from jaxtyping import Float
from PIL import Image as Pillow
from torch import Tensor
from torch.utils.data import Dataset

from fem_research.vision.images import open_picture

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


class View(Dataset):
    """Pictures as {"pixel_values" (C, S, S), "labels"}: the central crop or, in training, a random one.

    How a picture is cropped and mirrored depends on seed, epoch and index only, so all models see the same.
    """

    def __init__(
        self,
        files: datasets.Dataset,
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
