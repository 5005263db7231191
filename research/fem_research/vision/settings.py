"""What `fem vision` trains: pictures, models and training, as a recipe and its profiles."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fem.config import MLPS
from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive
from fem_research.common.grid import digest_of
from fem_research.common.mixers import canonical
from fem_research.common.names import as_shown

DTYPES = ("float32", "bfloat16")
RECIPES = ("plain", "deit")
COPIES = 3  # of a picture in a row, in DeiT's repeated augmentation


@dataclass(frozen=True, kw_only=True)
class VisionRecipe:
    """Pictures, models and training. The defaults suit a laptop: scikit-learn's digits, under a minute per model."""

    data: str = option("digits", "digits, a folder or zip of <split>/<class>/<picture>, or a dataset of the hub.")
    stream: bool = option(False, "Read a dataset of the hub as it is used, instead of downloading all of it.")
    mixers: str = option(
        "attention,FEM", "With commas between, such as attention, FEM-GLA, attention+LT.", shown=as_shown
    )
    seeds: int = option(3, "How many seeds; every mixer has the same.")
    seed: int = option(0, "First seed: of weights, order and crops.")
    image_size: int = option(8, "Side of the images, in pixels.")
    patch_size: int = option(2, "Side of a patch, in pixels.")
    channels: int = option(1, "1: grey, 3: RGB.")
    width: int = option(48, "Width of the model.")
    layers: int = option(4, "Blocks of the model.")
    heads: int = option(4, "Heads of every mixer.")
    mlp: str = option("narrowed", "MLP: narrowed to DeiT's parameters, or kept, as in the paper.")
    pooling: str = option("cls", "cls: classify by a class token, as DeiT; mean: by the mean over patches.")
    drop_path: float = option(0.0, "Probability with which the last block skips a branch in training.")
    recipe: str = option(
        "plain",
        "plain: crops, gradients clipped at 1, a cosine to 0; deit: DeiT's, by timm: RandAugment, erasing, every "
        "picture three times in a row, no clipping, a cosine from 1e-6 up and down to 1e-5.",
    )
    epochs: int = option(24, "Times that every picture is seen.")
    batch: int = option(64, "Pictures per step, over all processes.", called="batch_size")
    learning_rate: float = option(3e-3, "Peak learning rate of AdamW.")
    warmup: float = option(0.05, "Share of the steps in which the learning rate rises.")
    weight_decay: float = option(0.05, "Weight decay of the weights; beta, norms and biases have none.")
    min_area: float = option(0.6, "Smallest share of a picture's area that a training crop shows.")
    flip: bool = option(False, "Mirror half of the training pictures.")
    mixup: float = option(0.0, "Beta parameter of blends of two pictures, by the recipe deit; 0: none.")
    cutmix: float = option(0.0, "Beta parameter of boxes from another picture, by the recipe deit; 0: none.")
    smoothing: float = option(0.1, "Label smoothing.")
    central_share: float = option(1.0, "Side of the central crop that tests see, as a share of the shorter side.")
    validations: int = option(10, "Tests and checkpoints, evenly spaced; the last at the end.")
    dtype: str = option("float32", f"Arithmetic: {' or '.join(DTYPES)}; weights and optimiser stay float32.")
    workers: int = option(0, "Processes that read pictures.")
    threads: int = option(1, "CPU threads; more of them are faster on an idle machine, and slower on a busy one.")

    def __post_init__(self):
        require_positive(self, "image_size", "patch_size", "width", "heads", "layers", "seeds", "epochs", "batch")
        require_positive(self, "validations", "threads", "learning_rate")
        require_not_negative(self, "seed", "mixup", "cutmix", "workers", "weight_decay")
        for name in ("min_area", "central_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}.")
        for name in ("smoothing", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels}.")
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("mlp", self.mlp, MLPS)
        require_one_of("recipe", self.recipe, RECIPES)
        if self.recipe == "plain" and (self.mixup or self.cutmix):
            raise ValueError(f"mixup = {self.mixup} and cutmix = {self.cutmix} need recipe = deit, got plain.")
        if self.recipe == "deit" and (self.channels != 3 or self.batch % 2):
            raise ValueError(
                f"recipe deit needs channels = 3 and an even batch_size, got {self.channels} and {self.batch}."
            )
        if not self.mixer_names:
            raise ValueError("mixers must name at least one mixer, got an empty list.")

    @property
    def mixer_names(self) -> list[str]:
        return list(dict.fromkeys(canonical(name) for name in listed(self.mixers)))

    def jobs(self) -> Iterator[VisionRecipe]:
        """A recipe for each seed and mixer, seed by seed."""
        for seed in range(self.seed, self.seed + self.seeds):
            for mixer in self.mixer_names:
                yield replace(self, mixers=mixer, seed=seed, seeds=1)

    @property
    def key(self) -> str:
        """The name of the record of a recipe with one mixer and one seed: another for any value that decides it."""
        decides = {name: value for name, value in asdict(self).items() if name not in ("workers", "threads")}
        decides |= {"files": files} if (files := _files(self.data)) else {}
        return f"{self.mixers}-seed{self.seed}-{digest_of(decides)}"


@functools.cache
def _files(data: str) -> list[tuple[str, int]]:
    """Every file of a folder with its size, or of an archive with its check sum; none where `data` is another name."""
    path = Path(data)
    if path.is_dir():
        return sorted((p.relative_to(path).as_posix(), p.stat().st_size) for p in path.rglob("*") if p.is_file())
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return sorted((entry.filename, entry.CRC) for entry in archive.infolist())
    return []


DEIT_TINY = {"data": "ILSVRC/imagenet-1k", "image_size": 224, "patch_size": 16, "channels": 3, "central_share": 0.875}
DEIT_TINY |= {"width": 192, "layers": 12, "heads": 3, "drop_path": 0.1, "dtype": "bfloat16", "seeds": 1}
DEIT_TINY |= {"epochs": 300, "batch": 1024, "learning_rate": 1e-3, "warmup": 5 / 300, "validations": 100, "workers": 12}
DEIT_TINY |= {"min_area": 0.08, "flip": True, "mixup": 0.8, "cutmix": 1.0, "recipe": "deit"}
CIFAR = {"data": "uoft-cs/cifar10", "image_size": 32, "patch_size": 4, "channels": 3, "min_area": 0.5, "flip": True}
CIFAR |= {"width": 96, "layers": 6, "heads": 4, "epochs": 40, "learning_rate": 1e-3}
PROFILES: dict[str, dict] = {  # the fields that differ from the recipe's defaults
    "digits": {},
    "cifar": CIFAR,
    "deit-tiny": DEIT_TINY,
    "deit-small": DEIT_TINY | {"width": 384, "heads": 6},
}
