"""Launches, waits, bytes and registers on the card that is not there: `.card/run tests/card/measure.py after`.

The first argument is a part of research/results/checks/card.json, which is measured anew, and the page beside it:
"after", what cases.py holds the library to; "before", the same without the fused layer's and the conditioner's kernels;
or "registers" of these. Names of layers behind it: only theirs.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median

import card
import torch

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig, conditioner, fused_layer

RECORD = Path(__file__).parents[2] / "research" / "results" / "checks" / "card.json"
WIDTH, HEADS, ROWS, TIME = 1024, 16, 8, 2048
ATTENTION = {"use_lse": False, "use_temperature": False, "use_outer_gate": False}
LAYERS = {
    "attention": ATTENTION,
    "softmax": {},
    "softmax, slim": {"gate_rank": 8},
    "softmax, slim, conditioner": {"gate_rank": 8, "use_conv": True},
    "softmax, split": {"gate_rank": 8, "free_share": 0.5},
    "softmax, capped": {"value_logexp_cap": 29.0},
    "linear": {"prior_type": "linear"},
    "gla": {"prior_type": "gla"},
    "gla, channels": {"prior_type": "gla", "decay": "channel"},
    **{prior: {"prior_type": prior} for prior in PRIORS if prior not in ("softmax", "linear", "gla")},
}
FUSED = [name for name in LAYERS if name.startswith(("attention", "softmax")) and "capped" not in name]  # nothing waits
MODES = ("eager", "compiled")
BFLOAT16 = "eager, bfloat16"  # parameters, without autocast, as the layers that an H100 timed
REGISTERS = {  # a head's values, of keys of 64
    "32": {},
    "56": {"gate_rank": 64},
    "64": {"gate_rank": 8, "use_conv": True},
    "32 + 32": {"gate_rank": 8, "free_share": 0.5},
    "gla, 32": {"prior_type": "gla"},
    "gla, channels, 34": {"prior_type": "gla", "decay": "channel"},
    "mamba, 51": {"prior_type": "mamba"},
}


def build(width: int = WIDTH, heads: int = HEADS, **fields) -> FreeEnergyMixer:
    config = FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, **{"use_conv": False, **fields})
    return FreeEnergyMixer(config).cuda()


def prepared(name: str, mode: str) -> tuple[FreeEnergyMixer, Callable, torch.Tensor]:
    """A layer of the table, how it is called, and its input, in a memory without blocks that other layers have left."""
    gc.collect()
    torch.cuda.empty_cache()
    layer, x = build(**LAYERS[name]), tokens()
    if mode == BFLOAT16:
        layer, x = layer.bfloat16(), x.detach().bfloat16().requires_grad_()
    return layer, torch.compile(layer) if mode == "compiled" else layer, x


def step(call, x: torch.Tensor, **marks) -> torch.Tensor:
    """A layer's output in bfloat16."""
    with torch.autocast("cuda", torch.bfloat16, enabled=x.dtype != torch.bfloat16):
        return call(x, **marks)


def forget(call, x: torch.Tensor) -> None:
    """Gradients as an optimiser's zero_grad leaves them."""
    for leaf in (x, *getattr(call, "parameters", list)()):
        leaf.grad = None


def host(call, x: torch.Tensor, steps: int = 60) -> int:
    """Microseconds of this machine's processor that a train step takes: the median of `steps`. Nothing is computed, so
    these are PyTorch's, Triton's and the library's own."""
    times, gradient = [], torch.ones_like(step(call, x))
    for _ in range(steps):
        start = time.process_time()
        step(call, x).backward(gradient)
        times.append(time.process_time() - start)
        forget(call, x)
    return round(1e6 * median(times))


def train(call, x: torch.Tensor, warm: int = 2, **marks) -> tuple[dict, list[str]]:
    """What one train step in bfloat16 takes, after `warm` others, and its awkward products."""
    for _ in range(warm):
        step(call, x, **marks).float().sum().backward()
    forget(call, x)
    with card.record() as there:
        y, held = card.kept(lambda: step(call, x, **marks))
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
    for name in names:
        for mode in (*MODES, BFLOAT16) if name in (*FUSED, "linear", "gla", "gla, channels") else MODES:
            torch._dynamo.reset()
            layer, call, x = prepared(name, mode)
            row = {"layer": name, "mode": mode}
            try:
                row |= train(call, x)[0] | {"host us": host(call, x)}
                row |= {} if mode == BFLOAT16 else decode(layer, mode)
            except Exception as error:  # a row of the table says what failed
                row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"
            print(row, flush=True)
            yield row


def tokens() -> torch.Tensor:
    return torch.randn(ROWS, TIME, WIDTH, device="cuda", requires_grad=True)


def registers(values: str) -> dict[str, tuple[int, int]]:
    """Registers and spilt bytes of every kernel that a train step and tokens of a layer with such values launch."""
    torch._dynamo.reset()
    layer = build(**REGISTERS[values])
    sizes = [layer.config.free_width] if layer.config.free_share is None else [layer.config.free_width] * 2
    assert values.split(", ")[-1] == " + ".join(map(str, sizes)), sizes
    return card.registers(lambda: (train(layer, tokens(), warm=0), *(decode(layer, mode) for mode in MODES)))


def table(record: dict) -> str:
    columns = ("forward", "backward", "waits", "kept MiB", "host us", "token", "token's waits")
    lines = [f"| layer | mode | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 2)}"]
    before = {(row["layer"], row["mode"]): row for row in record["before"]}
    for row in record["after"]:
        key = row["layer"], row["mode"]
        pairs = [(before.get(key, {}).get(column), row.get(column, "")) for column in columns]
        cells = [f"{new}" if old is None else f"{old} → {new}" for old, new in pairs]
        lines.append(f"| {' | '.join([*key, *cells])} |")
    return "\n".join(lines)


def registers_table(record: dict[str, dict]) -> str:
    lines = [f"| kernel | {' | '.join(record)} |", f"|{'---|' * (len(record) + 1)}"]
    for name in dict.fromkeys(name for found in record.values() for name in found):
        cells = [found.get(name) for found in record.values()]
        cells = ["" if cell is None else f"{cell[0]}" + f" ({cell[1]})" * (cell[1] > 0) for cell in cells]
        lines.append(f"| {' | '.join([f'`{name}`', *cells])} |")
    return "\n".join(lines)


def estimates_table(rows: list[dict], than: list[dict]) -> str:
    """Microseconds by estimate; where the same method is known for older code, beside what a card took for it."""
    known = {row["layer"]: row for row in than}
    columns = ("forward", "train", "attention", "products", "others")
    heads = ["layer", *columns, "of attention's 100", "older code", "H200"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        old = known.get(row["layer"], {"estimated": 0, "measured": 0})
        cells = [*(1000 * row[column] for column in columns), 100 * row["train"] / rows[0]["train"]]
        cells = [f"{x:.0f}" if x else "" for x in (*cells, 1000 * old["estimated"], 1000 * old["measured"])]
        lines.append(f"| {' | '.join([row['layer'], *cells])} |")
    return "\n".join(lines)


def write(record: dict) -> None:
    """The record, and its page."""
    record |= {"setting": f"sm_{card.SM}, {ROWS} x {TIME} tokens, width {WIDTH}, {HEADS} heads"}
    record["torch"] = torch.__version__
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    RECORD.with_suffix(".md").write_text(f"""# What a card would launch

Counted on [a card that is not there](../../../docs/card.md), which computes nothing:
{record["setting"]}, PyTorch {record["torch"]}.

## One layer

A train step with parameters in float32 under autocast to bfloat16, which casts them in every step, or in bfloat16.
`host us`: microseconds of a core of the machine that poses as the card's host, for a train step; blank: not measured.
`token`: one more token behind 512.
Two numbers: without the kernels of the fused layer and of the conditioner → with them.

{table(record)}

## Registers

Registers of a thread on sm_90, by the width of a head's values; keys have 64, and 40 where channels
decay by themselves. In brackets: bytes that it spills.

{registers_table(record["registers"])}

## Estimates

No card took these. Microseconds of a train step's launches, one after another, by `tests/card/estimate.py`:
bfloat16 parameters, slim gates of rank 64.
`attention`, `products`, `others`: parts of the train step; beside them, the train step where attention's takes 100.
`older code`: the train step of commit `54c997fc` by the same method, and what an H200 took for that,
[captured](../cost.md#h200).

{estimates_table(record["estimated"], record["estimates_checked"])}
""")


if __name__ == "__main__":
    card.pose()
    part, *names = sys.argv[1:]
    record = json.loads(RECORD.read_text())
    if part == "registers":
        found = record[part] | {values: registers(values) for values in names or REGISTERS}
        record[part] = {values: found[values] for values in REGISTERS if values in found}
    else:
        if part == "before":
            fused_layer.available = conditioner.fits = lambda *_: False
        measured = list(rows(names or (FUSED if part == "before" else list(LAYERS))))
        by_key = {(row["layer"], row["mode"]): row for row in [*record[part], *measured]}
        record[part] = [by_key[key] for key in product(LAYERS, (*MODES, BFLOAT16)) if key in by_key]
    write(record)
