"""The pictures of our CIFAR-10 pages are taken from a dataset by their places among a class's pictures."""

import io
import sys
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cifar_subset import pictures


def test_a_picture_is_taken_by_its_place_in_its_class():
    shades = [Picture.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)) for i in range(6)]
    features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog"])})
    split = Dataset.from_dict({"img": shades, "label": [0, 1, 1, 0, 1, 0]}, features=features)
    kept = pictures(split, {"cat": [2], "dog": [0, 2]})
    assert {name: Picture.open(io.BytesIO(file)).getpixel((4, 4))[0] for name, file in kept.items()} == {
        "cat/0002.jpg": 100,
        "dog/0000.jpg": 20,
        "dog/0002.jpg": 80,
    }
