"""The README's plot on a dark ground: research/results/demo_reading_dark.png. The site turns plots itself.

python docs/figures/dark.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

RESULTS = Path(__file__).parents[2] / "research" / "results"
INVERTED = 0.87
HALF_TURN = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])  # of the hue, as in CSS


def dark(light: Image.Image) -> Image.Image:
    """Dark where the picture is light, of the same hue: invert(.87) hue-rotate(180deg) of docs/site.css."""
    share = np.asarray(light.convert("RGB"), dtype=float) / 255
    inverted = (1 - share) * INVERTED + share * (1 - INVERTED)
    return Image.fromarray((255 * (inverted @ HALF_TURN.T).clip(0, 1)).round().astype(np.uint8))


if __name__ == "__main__":
    dark(Image.open(RESULTS / "demo_reading.png")).save(RESULTS / "demo_reading_dark.png", optimize=True)
