"""Seeded random calls of every scan read against its definition: 300, or as many as FEM_FUZZ_SECONDS has room for.

FEM_FUZZ_SECONDS=600 python -m pytest tests/ops/test_fuzz.py -m slow -s       # what `make fuzz` runs
"""

import math
import os
import random
import time

import pytest
import torch
from scan_reads import READS, gradients_of, scan_call

CALLS = 300
SECONDS = float(os.environ.get("FEM_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FEM_FUZZ_SEED", "0"))
EDGES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def draw(name: str, seed: int):
    """A call in some dtype, and a sentence that describes it."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    size = lambda low, high: 10 ** choose.uniform(low, high)  # noqa: E731
    keyed = name in READS[:3]
    settings = {
        "time": choose.choice(EDGES if choose.random() < 0.6 else EDGES[:12]),
        "batch": 1, "heads": 1, "width": choose.choice([1, 2, 3]), "keys": choose.choice([1, 3]),
        "rank": choose.choice([1, 2]), "beta": size(-6, 1), "spread": size(-2, 2),
        "weights": choose.uniform(0, 30 if keyed else 100), "decay": choose.choice([0.0, 1e-3, 0.1, 3.0, 30.0]),
    }  # fmt: skip
    dtype = choose.choice(DTYPES)
    call = scan_call(name, **settings)
    if choose.random() < 0.3:
        v = call.arguments["v"].clone()
        v[:, settings["time"] // 3] += choose.choice([-1, 1]) * size(1, 3)
        call = call.set(v=v)
    return call.map(lambda x: x.to(dtype)), dtype, f"{name}, seed {seed}, {dtype}, {settings}"


def pieces(time: int, seed: int) -> list[int]:
    choose, sizes = random.Random(seed), []
    while sum(sizes) < time:
        sizes.append(min(choose.choice([1, 2, 16, 63, 64, 100]), time - sum(sizes)))
    return sizes


def excess(call, dtype, seed: int) -> dict[str, float]:
    """Errors of reads and gradients over what is allowed: twice the plain form's, or 16 eps (1 + max|v|).

    In chunks twice that: states are rounded where they are handed on, and so are the gradients that come back by them.
    """
    exact, mine, plain = call.leaves(torch.float64), call.leaves(), call.leaves()
    wanted = exact.definition()
    largest = call.arguments["v"].double().abs().max().item()
    small = min(1.0, call.arguments["beta"].double().min().item())
    floor = 16 * torch.finfo(dtype).eps * (1 + largest)
    if dtype == torch.float64:  # the definition is no better itself, where beta is small or weights are large
        floor = 1e-11 * (1 + largest) / small
    cotangents = [torch.randn_like(part) for part in wanted]
    expected = gradients_of(exact, wanted, cotangents)
    other = plain.definition()
    of_plain = gradients_of(plain, other, cotangents)

    def over(how, got, want, theirs, unit=1.0):
        got, want, theirs = (x.double() * unit for x in (got, want, theirs))
        scale = max(1.0, want.abs().max().item())
        error, theirs = ((x - want).abs().max().item() for x in (got, theirs))
        allowed = max(2 * theirs if math.isfinite(theirs) else 0.0, floor * scale) * (2 if how == "chunks" else 1)
        return error / allowed if math.isfinite(error) else math.inf

    cut = pieces(call.arguments["v"].shape[1], seed)
    with torch.no_grad():
        reads = {
            "no gradient": call.read(),
            "one query": call.in_pieces(*cut),
        }
    reads |= {"whole": mine.read(), "chunks": mine.in_pieces(*cut)}
    found = {}
    for how, read in reads.items():
        for part, got, want, theirs in zip(("mean", "F"), read, wanted, other):
            found[f"{part}, {how}"] = over(how, got, want, theirs)
        if read.mean.requires_grad:
            for part, gradient in gradients_of(mine, read, cotangents).items():
                # that of a logarithm, for what enters as one; of theta, for beta
                unit = exact.arguments[part].detach() if part in ("q", "k", "delta", "B", "C", "D", "beta") else 1.0
                found[f"d{part}, {how}"] = over(how, gradient, expected[part], of_plain[part], unit)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_calls_err_no_more_than_the_plain_form_may():
    start, worst, wrong, count = time.monotonic(), {}, [], 0
    while time.monotonic() - start < SECONDS or (not SECONDS and count < CALLS):
        name = READS[count % len(READS)]
        call, dtype, words = draw(name, SEED + count)
        found = excess(call, dtype, SEED + count)
        part = max(found, key=found.get)
        worst[name] = max(worst.get(name, (0.0, "")), (found[part], f"{part}: {words}"))
        if found[part] > 1:
            wrong.append(f"{found[part]:.3g} of what is allowed, {part}: {words}")
        count += 1
    print(f"\n{count} calls; the worst error of each read over what is allowed:")
    for name, (size, words) in worst.items():
        print(f"{name:16} {size:.3f}  {words}")
    assert not wrong, "\n".join(wrong[:20])
