"""Draw what one read does, by attention and by FEM, on a light and on a dark ground, wide and narrow:
docs/images/mechanism_*.svg.

python docs/figures/mechanism.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

from fem.theory import free_energy, posterior

IMAGES = Path(__file__).parents[1] / "images"
WORDS = ("rain", "fell", "on", "the", "old", "town")
PRIOR = torch.tensor([0.22, 0.14, 0.16, 0.10, 0.12, 0.26]).double()
VALUES = torch.tensor(  # (channels, tokens)
    [
        [0.2, -1.0, 0.1, -0.4, 2.6, 0.3],
        [2.4, 0.4, -0.8, 0.2, -1.2, 0.1],
        [-0.6, 0.3, -0.2, -1.1, 0.5, 2.2],
        [0.1, 2.8, -0.5, 0.6, -0.3, -0.9],
    ]
).double()
BETA = 3.0
GROUNDS = {  # ink, secondary ink, colour of a weight, ink on a full weight
    "light": ("#1b1f24", "#656d76", "#1f6feb", "#ffffff"),
    "dark": ("#e6edf3", "#8b949e", "#58a6ff", "#0d1117"),
}


def draw(name: str, ink: str, grey: str, colour: str, on_colour: str, narrow: bool) -> None:
    mean = VALUES @ PRIOR
    free = free_energy(PRIOR, VALUES, BETA)
    panels = (
        ("Attention", "every channel reads the same mixture", PRIOR.expand_as(VALUES), mean),
        ("Free Energy Mixer", "every channel picks its own token", posterior(PRIOR, VALUES, BETA), free),
    )
    plt.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "fem",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": ink,
    }
    if narrow:
        figure, axes = plt.subplots(2, 1, figsize=(5.2, 6.6))
    else:
        figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.5), width_ratios=(9.1, 7.8))
    for axis, (title, says, weights, read) in zip(axes, panels):
        channels, tokens = VALUES.shape
        for c in range(channels):
            for t in range(tokens):
                weight = weights[c, t].item()
                box = plt.Rectangle((t, channels - 1 - c), 0.94, 0.9, color=colour, alpha=0.06 + 0.94 * weight, lw=0)
                axis.add_patch(box)
                shown = on_colour if weight > 0.5 else ink
                axis.text(t + 0.47, channels - 0.55 - c, f"{VALUES[c, t]:.1f}", ha="center", va="center", color=shown)
            axis.text(tokens + 0.25, channels - 0.55 - c, "→", ha="center", va="center", color=grey)
            answer = {"ha": "center", "va": "center", "weight": "bold", "fontsize": 12}
            axis.text(tokens + 0.95, channels - 0.55 - c, f"{read[c]:.1f}", **answer)
            if narrow or axis is axes[0]:
                axis.text(-0.15, channels - 0.55 - c, f"channel {c + 1}", ha="right", va="center", color=grey)
        for t, word in enumerate(WORDS):
            axis.text(t + 0.47, channels + 0.12, word, ha="center", va="bottom", color=grey)
        axis.text(tokens + 0.95, channels + 0.12, "read", ha="center", va="bottom", color=grey)
        axis.text(0, channels + 1.25, title, fontsize=14, weight="bold")
        axis.text(0, channels + 0.75, says, color=grey)
        axis.set(xlim=(-1.5 if narrow or axis is axes[0] else -0.2, tokens + 1.6), ylim=(-0.1, channels + 1.7))
        axis.axis("off")
    figure.tight_layout(pad=0.4)
    path = IMAGES / f"mechanism_{name}{'_narrow' if narrow else ''}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    matplotlib.use("Agg")
    for name, colours in GROUNDS.items():
        draw(name, *colours, narrow=False)
        draw(name, *colours, narrow=True)
