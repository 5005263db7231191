"""Seeded random calls of every read against its definition: 400, or as many as FEM_FUZZ_SECONDS has room for.

FEM_FUZZ_SECONDS=600 python -m pytest tests/ops/test_fuzz.py -m slow -s       # what `make fuzz` runs

FEM_FUZZ_SEED=n, with no seconds, begins at call n: a call that failed is found again by its seed.
"""

import os
import random
import time

import pytest
import torch
from reads import KEEPS_VALUES, KEYED, LAYOUTS, SCANS, documents_of, excess, make

KINDS = (*SCANS, "softmax", "softmax by window", "softmax both ways", "softmax with bias")
CALLS = 400
SECONDS = float(os.environ.get("FEM_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FEM_FUZZ_SEED", "0"))
EDGES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def draw(kind: str, seed: int):
    """A call in some dtype, the tokens of each of its documents, its marks, and a sentence that describes it."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    size = lambda low, high: 10 ** choose.uniform(low, high)  # noqa: E731
    settings = {
        "time": choose.choice(EDGES if choose.random() < 0.6 else EDGES[:12]),
        "width": choose.choice([1, 2, 3]), "keys": choose.choice([1, 3, 8]), "beta": size(-6, 1), "spread": size(-2, 2),
    }  # fmt: skip
    length = settings["time"]
    if kind in SCANS:
        settings |= {
            "rank": choose.choice([1, 2]), "decay": choose.choice([0.0, 1e-3, 0.1, 3.0, 30.0]),
            "weights": choose.uniform(0, 30 if kind in KEYED else 100), "keys": choose.choice([1, 3]),
        }  # fmt: skip
        call = make(kind, heads=1, dtype=torch.float64, **settings)
    else:
        settings |= {"heads": 2, "groups": choose.choice([1, 2]), "weights": size(-1, 3)}
        settings["causal"] = kind != "softmax both ways" and (kind == "softmax" or choose.random() < 0.7)
        settings["free"] = choose.choice([None, None, 1, 4])
        settings["window"] = choose.choice([1, 2, 17, 64, 200]) if kind == "softmax by window" else None
        settings["bias"] = choose.choice([0.0, 0.3, 0.9])
        kind = "softmax" if kind == "softmax both ways" else kind
        call = make(kind, dtype=torch.float64, **settings)
    if choose.random() < 0.3:
        settings["spike"] = choose.choice([-1, 1]) * size(1, 3)
        call = call.spiked(settings["spike"], length // 3)
    marks, kept, ids = {}, torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.long)
    if choose.random() < 0.3:
        settings["masked"] = choose.choice([0.1, 0.5, 1.0])
        kept = torch.rand(length) >= settings["masked"]
        marks["key_mask"] = kept[None]
    if choose.random() < 0.3:
        settings["documents"] = choose.choice([2, 5])
        ids = torch.randint(settings["documents"], (length,)).sort().values
        marks["segment_ids"] = ids[None]
    dtype = choose.choice(DTYPES)
    settings["layout"] = layout = choose.choice([None] * 4 + KEEPS_VALUES)
    laid = LAYOUTS[layout] if layout else lambda x: x
    described = f"{kind}, seed {seed}, {dtype}, {settings}"
    call = call.map(lambda x: laid(x.to(dtype)) if x.dim() > 2 else x.to(dtype))
    return call, documents_of(kept, ids), marks, described


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_calls_err_no_more_than_the_plain_form_may():
    start, worst, wrong, count = time.monotonic(), {}, [], 0
    while time.monotonic() - start < SECONDS or (not SECONDS and count < CALLS):
        kind = KINDS[(SEED + count) % len(KINDS)]
        call, documents, marks, words = draw(kind, SEED + count)
        count += 1
        if not documents:  # all is masked: finite, and nothing else is promised
            assert all(part.isfinite().all() for part in call.read(**marks)), words
            continue
        found = excess(call, documents, marks, SEED + count - 1)
        part = max(found, key=found.get)
        worst[kind] = max(worst.get(kind, (0.0, "")), (found[part], f"{part}: {words}"))
        if found[part] > 1:
            wrong.append(f"{found[part]:.3g} of what is allowed, {part}: {words}")
    print(f"\n{count} calls; the worst error of each read over what is allowed:")
    for kind, (size, words) in worst.items():
        print(f"{kind:18} {size:.3f}  {words}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])
