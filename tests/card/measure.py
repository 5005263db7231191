"""Launches, waits and bytes of layers on the card that is not there: `.card/run tests/card/measure.py after`.

Names of layers behind "after" measure these again alone. Writes research/results/card.json and the table of
docs/card.md: "before" is what e785e87 took, "after" what cases.py holds the library to.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import card
import torch

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig

ROOT = Path(__file__).parents[2]
RECORD, PAGE, TABLE = ROOT / "research" / "results" / "card.json", ROOT / "docs" / "card.md", "## The table"
WIDTH, HEADS, ROWS, TIME = 1024, 16, 8, 2048
ATTENTION = {"use_lse": False, "use_temperature": False, "use_outer_gate": False}
LAYERS = {
    "attention": ATTENTION,
    "softmax": {},
    "softmax, slim": {"gate_rank": 8},
    "softmax, capped": {"value_logexp_cap": 29.0},
    **{prior: {"prior_type": prior} for prior in PRIORS if prior != "softmax"},
}
MODES = ("eager", "compiled")


def build(width: int = WIDTH, heads: int = HEADS, **fields) -> FreeEnergyMixer:
    config = FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, **{"use_conv": False, **fields})
    return FreeEnergyMixer(config).cuda()


def train(call, x: torch.Tensor, warm: int = 2, **marks) -> tuple[dict, list[str]]:
    """What one train step in bfloat16 autocast takes, after `warm` others, and its awkward products."""

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return call(x, **marks)

    for _ in range(warm):
        forward().float().sum().backward()
    for leaf in (x, *getattr(call, "parameters", list)()):
        leaf.grad = None  # as an optimiser's zero_grad leaves it
    with card.record() as there:
        y, held = card.kept(forward)
    gradient = torch.ones_like(y)
    with card.record() as back:
        y.backward(gradient)
    row = {"forward": there.launches, "backward": back.launches, "waits": there.waits + back.waits}
    return row | {"kept MiB": round(held / 2**20)}, there.awkward + back.awkward


@torch.no_grad()
def decode(layer: FreeEnergyMixer, mode: str, tokens: int = 512) -> dict:
    """What one token after `tokens` others takes, in bfloat16: its fourth."""
    layer = layer.bfloat16().eval()
    draw = lambda count: torch.randn(ROWS, count, layer.config.n_embd, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    _, state = layer(draw(tokens), return_state=True)
    call = torch.compile(layer) if mode == "compiled" else layer
    for _ in range(3):
        _, state = call(draw(1), state=state, return_state=True)
    x = draw(1)
    with card.record() as events:
        call(x, state=state, return_state=True)
    return {"token": events.launches, "token's waits": events.waits}


def rows(names: list[str]) -> Iterator[dict]:
    for name in names or LAYERS:
        for mode in MODES:
            fields = LAYERS[name]
            torch._dynamo.reset()
            gc.collect()
            layer = build(**fields)
            x = torch.randn(ROWS, TIME, WIDTH, device="cuda", requires_grad=True)
            row = {"layer": name, "mode": mode}
            try:
                row |= train(torch.compile(layer) if mode == "compiled" else layer, x)[0]
                row |= decode(layer, mode)
            except Exception as error:  # a row of the table says what failed
                row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
            print(row, flush=True)
            yield row


def table(record: dict) -> str:
    columns = ("forward", "backward", "waits", "kept MiB", "token", "token's waits")
    lines = [f"| layer | mode | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 2)}"]
    found = [{(row["layer"], row["mode"]): row for row in record.get(when, [])} for when in ("before", "after")]
    for key in dict.fromkeys(key for one in found for key in one):
        pairs = [[one.get(key, {}).get(column, "") for one in found] for column in columns]
        cells = [f"{a} → {b}" if a != "" and b != "" else f"{a}{b}" for a, b in pairs]
        lines.append(f"| {' | '.join([*key, *cells])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    card.pose()
    when, measured = sys.argv[1], list(rows(sys.argv[2:]))
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    again = {row["layer"] for row in measured}
    measured = [row for row in record.get(when, []) if row["layer"] not in again] + measured
    record |= {"setting": f"sm_{card.SM}, {ROWS} x {TIME} tokens, width {WIDTH}, {HEADS} heads", when: measured}
    record["torch"] = torch.__version__
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    text = f"{TABLE}\n\nOne layer, e785e87 → later (one number: not measured again): {record['setting']}, bfloat16\n"
    text += f"autocast, PyTorch {record['torch']}. `token`: one more token behind 512.\n\n{table(record)}\n"
    PAGE.write_text(PAGE.read_text().split(TABLE)[0] + text)
