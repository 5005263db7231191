"""Seeded random calls of every read against its definition: 400, or as many as FEM_FUZZ_SECONDS has room for.

FEM_FUZZ_SECONDS=600 python -m pytest tests/ops/test_fuzz.py -m slow -s       # what `make fuzz` runs

FEM_FUZZ_SEED=n, with no seconds, begins at call n: a call that failed is found again by its seed.
"""

import math
import os
import random
import time

import pytest
import torch
from scan_reads import READS, gradients_of, scan_call
from softmax_calls import SoftmaxCall, softmax_call
from test_every_read import KEEPS_VALUES, LAYOUTS

KINDS = (*READS, "softmax", "softmax by window", "softmax both ways", "softmax with bias")
CALLS = 400
SECONDS = float(os.environ.get("FEM_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FEM_FUZZ_SEED", "0"))
EDGES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
FEATURES = ("q", "k", "delta", "B", "C", "D")  # of scans: they enter as logarithms, and theirs are judged


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
    if kind in READS:
        keyed = kind in READS[:3]
        settings |= {
            "rank": choose.choice([1, 2]), "decay": choose.choice([0.0, 1e-3, 0.1, 3.0, 30.0]),
            "weights": choose.uniform(0, 30 if keyed else 100), "keys": choose.choice([1, 3]),
        }  # fmt: skip
        call = scan_call(kind, batch=1, heads=1, dtype=torch.float64, **settings)
    else:
        settings |= {"heads": 2, "groups": choose.choice([1, 2]), "scores": size(-1, 3)}
        settings["causal"] = kind != "softmax both ways" and (kind == "softmax" or choose.random() < 0.7)
        settings["free"] = choose.choice([None, None, 1, 4])
        settings["window"] = choose.choice([1, 2, 17, 64, 200]) if kind == "softmax by window" else None
        settings["bias"] = choose.choice([0.0, 0.3, 0.9]) if kind == "softmax with bias" else None
        call = softmax_call(**settings)
    if choose.random() < 0.3:
        settings["spike"] = choose.choice([-1, 1]) * size(1, 3)
        for name in ("v", "f"):
            if (values := call.arguments.get(name)) is not None:
                values = values.clone()
                values[:, length // 3] += settings["spike"]
                call = call.set(**{name: values})
    marks, kept, ids = {}, torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.long)
    if choose.random() < 0.3:
        settings["masked"] = choose.choice([0.1, 0.5, 1.0])
        kept = torch.rand(length) >= settings["masked"]
        marks["key_mask"] = kept[None]
    if choose.random() < 0.3:
        settings["documents"] = choose.choice([2, 5])
        ids = torch.randint(settings["documents"], (length,)).sort().values
        marks["segment_ids"] = ids[None]
    documents = [torch.nonzero(kept & (ids == n))[:, 0] for n in range(5)]
    dtype = choose.choice(DTYPES)
    settings["layout"] = layout = choose.choice([None] * 4 + KEEPS_VALUES)
    laid = LAYOUTS[layout] if layout else lambda x: x
    described = f"{kind}, seed {seed}, {dtype}, {settings}"
    return (
        call.map(lambda x: laid(x.to(dtype)) if x.dim() > 2 else x.to(dtype)),
        dtype,
        [tokens for tokens in documents if len(tokens)],
        marks,
        described,
    )


def pieces(time: int, seed: int) -> list[int]:
    choose, sizes = random.Random(seed), []
    while sum(sizes) < time:
        sizes.append(min(choose.choice([1, 1, 2, 16, 63, 64, 100]), time - sum(sizes)))
    return sizes


def by_definition(call, documents):
    """The reads of the kept tokens, every document apart."""
    reads = [call.at(tokens).definition() for tokens in documents]
    return [torch.cat(parts, 1) for parts in zip(*reads)]


def excess(call, dtype, documents, marks, seed: int) -> dict[str, float]:
    """Errors of reads and gradients over what is allowed: twice the plain form's, or 16 eps (1 + max|v|).

    In chunks twice that: states are rounded where they are handed on, and so are the gradients that come back by them.
    Scores of softmax beyond 16 cost what rounding them in float32 does, and its dbeta may err by 16 times as much. In
    float64, which no wider type helps, 1e-11 (1 + max|v|), and F and gradients that over beta where beta < 1.
    """
    exact, mine, plain = call.leaves(torch.float64), call.leaves(), call.leaves()
    wanted, other = by_definition(exact, documents), by_definition(plain, documents)
    rows = torch.cat(documents)
    values = [call.arguments.get(name) for name in ("v", "f")]
    largest = max(x.double().abs().max().item() for x in values if x is not None)
    length, softmax = call.arguments["v"].shape[1], isinstance(call, SoftmaxCall)
    score = exact.largest_score() if softmax else 0.0
    floor = max(16 * torch.finfo(dtype).eps, score * torch.finfo(torch.float32).eps) * (1 + largest)
    of_mean = floor
    if dtype == torch.float64:
        of_mean = 1e-11 * (1 + largest)
        floor = of_mean / min(1.0, exact.arguments["beta"].min().item())
    cotangents = [torch.randn_like(part) for part in wanted]
    expected = gradients_of(exact, wanted, cotangents)
    of_plain = gradients_of(plain, other, cotangents)

    def over(how, got, want, theirs, floor=floor, unit=1.0):
        got, want, theirs = (x.double() * unit for x in (got, want, theirs))
        scale = max(1.0, want.abs().max().item())
        error, theirs = ((x - want).abs().max().item() for x in (got, theirs))
        allowed = max(2 * theirs if math.isfinite(theirs) else 0.0, floor * scale) * (2 if how == "chunks" else 1)
        return error / allowed if math.isfinite(error) else math.inf

    cut = pieces(length, seed)
    in_chunks = not softmax or call.causal or not (call.window or marks)  # else queries are the last of the keys
    with torch.no_grad():
        reads = {"no gradient": call.read(**marks)}
        if in_chunks:
            reads["no gradient, one by one"] = call.in_pieces(*cut, **marks)
        if softmax and call.streams():
            reads["streamed"] = call.streamed(*cut, **marks)
    reads["whole"] = mine.read(**marks)
    if in_chunks:
        reads["chunks"] = mine.in_pieces(*cut, **marks)
    found = {}
    sizes = {n: max(1.0, exact.arguments[n].abs().max().item()) for n in "qk"} if softmax else {}
    units = {"q": sizes.get("k", 1.0), "k": sizes.get("q", 1.0)}  # of which gradients of scores are sums
    units |= {"beta": 16.0} if softmax else {}  # a difference of nearly equal sums
    for how, read in reads.items():
        for part, got, want, theirs in zip(("mean", "F"), read, wanted, other):
            found[f"{part}, {how}"] = over(how, got[:, rows], want, theirs, of_mean if part == "mean" else floor)
        if read.mean.requires_grad:
            gradients = gradients_of(mine, [part[:, rows] for part in read], cotangents)
            for part, gradient in gradients.items():
                logarithm = part == "beta" or (part in FEATURES and not softmax)
                unit = exact.arguments[part].detach() if logarithm else 1.0
                found[f"d{part}, {how}"] = over(
                    how, gradient, expected[part], of_plain[part], floor * units.get(part, 1.0), unit
                )
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_random_calls_err_no_more_than_the_plain_form_may():
    start, worst, wrong, count = time.monotonic(), {}, [], 0
    while time.monotonic() - start < SECONDS or (not SECONDS and count < CALLS):
        kind = KINDS[(SEED + count) % len(KINDS)]
        call, dtype, documents, marks, words = draw(kind, SEED + count)
        count += 1
        if not documents:  # all is masked: finite, and nothing else is promised
            assert all(part.isfinite().all() for part in call.read(**marks)), words
            continue
        found = excess(call, dtype, documents, marks, SEED + count - 1)
        part = max(found, key=found.get)
        worst[kind] = max(worst.get(kind, (0.0, "")), (found[part], f"{part}: {words}"))
        if found[part] > 1:
            wrong.append(f"{found[part]:.3g} of what is allowed, {part}: {words}")
    print(f"\n{count} calls; the worst error of each read over what is allowed:")
    for kind, (size, words) in worst.items():
        print(f"{kind:18} {size:.3f}  {words}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])
