"""DeiT's training pictures, by timm: RandAugment, random erasing, repeated augmentation, mixup and cutmix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image as Pillow
from timm.data import Mixup, create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.utils import data

from fem_research.vision.settings import COPIES, VisionRecipe

# of the authors' main.py; the color jitter counts where there is no RandAugment
AUGMENTATION = {"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.4, "interpolation": "bicubic"}
AUGMENTATION |= {"re_prob": 0.25, "re_mode": "pixel", "re_count": 1}


def augmentation(recipe: VisionRecipe) -> Callable[[Pillow.Image, np.random.Generator], Float[Tensor, "c s s"]]:
    """A picture as a normalised input, by what the generator draws."""
    scale, flip = (recipe.min_area, 1.0), 0.5 * recipe.flip
    transform = create_transform(recipe.image_size, is_training=True, scale=scale, hflip=flip, **AUGMENTATION)
    return partial(_transformed, transform)


def mixture(recipe: VisionRecipe, classes: int) -> Callable[[Tensor, Tensor, np.random.Generator], tuple]:
    """Pictures (B, C, S, S) and labels (B,) mixed with those of the reversed batch; labels become (B, K), smoothed."""
    shares = {"mixup_alpha": recipe.mixup, "cutmix_alpha": recipe.cutmix, "label_smoothing": recipe.smoothing}
    return partial(_mixed, Mixup(num_classes=classes, **shares))


class Copies(RepeatAugSampler):
    """Repeated augmentation: places of a `View`, three copies of a picture in a row, for a third of the pictures an
    epoch. An epoch has whole batches."""

    def __init__(self, view: data.Dataset):
        super().__init__(view, num_replicas=1, rank=0, num_repeats=COPIES, selected_round=view.recipe.batch)

    def __iter__(self) -> Iterator[int]:
        self.epoch = (self.dataset.recipe.seed << 16) + self.dataset.epoch
        for place, index in enumerate(super().__iter__()):
            yield index + len(self.dataset) * (place % COPIES)


@contextmanager
def drawing(draw: np.random.Generator) -> Iterator[None]:
    """Let `random`, NumPy and torch, from which timm draws, begin at a number of `draw`; they go on as before it."""
    seed = int(draw.integers(2**32))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _transformed(transform: Callable, picture: Pillow.Image, draw: np.random.Generator) -> Tensor:
    with drawing(draw):
        return transform(picture)


def _mixed(mix: Mixup, x: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], draw: np.random.Generator) -> tuple:
    with drawing(draw):
        return mix(x, labels)
