"""One HTML page that shows what every channel of every head reads: data inside, nothing fetched, no server needed."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib.resources import files

import numpy as np

from fem.inspect.layers import LayerTables

LARGEST = 24_000_000  # characters that a browser on a phone still opens at once


def page(model: str, tokens: Sequence[str], layers: Sequence[LayerTables], first: tuple[int, int]) -> str:
    """The page, opened at the head `first` = (place of its layer, place in the layer).

    Raises ValueError where the page would be too large for a browser.
    """
    data = {
        "model": model,
        "tokens": list(tokens),
        "first": sum(tables.heads for tables in layers[: first[0]]) + first[1],
        "layers": [page_data(tables) for tables in layers],
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")
    if len(text) > LARGEST:
        size = f"{len(text) / 1e6:.0f} MB of {len(tokens)} tokens, {len(layers)} layers"
        raise ValueError(f"page must stay under {LARGEST / 1e6:.0f} MB, got {size}; name fewer --layers.")
    template = files("fem.inspect").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("INSPECTION", text)


def page_data(tables: LayerTables) -> dict:
    """A layer's data in the page: weights as bytes, all other numbers in thousandths."""
    return {
        "layer": tables.layer,
        "prior": tables.prior_type,
        "channels": tables.read.shape[1],
        "perChannel": tables.prior.shape[1] > 1,
        "heads": [
            {
                "prior": packed(tables.prior[head]),
                "posterior": None if tables.posterior is None else packed(tables.posterior[head]),
                "priorTokens": thousandths(tables.prior_tokens, head),
                "posteriorTokens": thousandths(tables.posterior_tokens, head),
                "lambda": thousandths(tables.lambda_, head),
                "hidden": thousandths(tables.hidden_beta, head),
                "beta": thousandths(tables.beta, head),
                "gate": thousandths(tables.gate, head),
                "gap": thousandths(tables.gap, head),
            }
            for head in range(tables.heads)
        ],
    }


def packed(weights: np.ndarray) -> str:
    """Weights (c, T, T) of causal reads as bytes 255 sqrt(w), row t with the tokens i <= t after row t - 1, in base64.

    The square root keeps small weights apart: a weight is off by 0.004 at most, and by 0.0004 where it is below 0.01.
    """
    rows, columns = np.tril_indices(weights.shape[-1])
    roots = np.sqrt(weights[:, rows, columns].clip(0, 1))
    return base64.b64encode(np.rint(255 * roots).astype(np.uint8).tobytes()).decode()


def thousandths(part: np.ndarray | None, head: int) -> list[int] | None:
    return None if part is None else np.rint(1000 * part[head]).astype(int).ravel().tolist()
