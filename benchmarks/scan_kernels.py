"""The Triton kernels of the scans, compiled as their launchers launch them, for GPUs that need not be there.

python benchmarks/scan_kernels.py                # writes docs/results/scan_kernels.{json,md}
python benchmarks/scan_kernels.py every          # prints all launches that a layer can make: half an hour on one core
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import triton
from measure import save

from fem.experiments.doctor import launches
from fem.experiments.doctor.without_card import CARDS, SPILL, Compiled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def every() -> Iterator[launches.Launch]:
    """All that a layer can ask for."""
    for dtype in (BF16, FP32):
        for keys, values in ((64, 32), (128, 64)):
            for decay in (None, "head", "channel"):
                yield launches.linear_attention(dtype, keys, values, decay)
        yield launches.channel_scan(dtype)
        yield launches.channel_scan(dtype, decays=False)
        yield launches.channel_scan(dtype, weighted=False)
        yield launches.ssm(dtype)
        yield launches.conditioner(dtype)
        yield launches.softmax_entries(dtype, 64, 32)
        yield launches.softmax_entries(dtype, 128, 128, seen=True, bias=True)
    yield launches.linear_attention(BF16, 256, 128, "channel")
    yield launches.linear_attention(BF16, 40, 24, "head")
    yield launches.linear_attention(BF16, 64, 32, "head", free=False)
    yield launches.linear_attention(BF16, 64, 32, present=False)
    yield launches.linear_attention(BF16, 64, 32, "head", time=1)
    yield launches.channel_scan(BF16, weighted=False, decays=False)
    yield launches.channel_scan(FP16)
    yield launches.channel_scan(BF16, weight_dtype=FP32)
    yield launches.channel_scan(BF16, free=False)
    yield launches.channel_scan(BF16, channels=1, time=1)
    yield launches.ssm(BF16, rank=1)
    yield launches.ssm(BF16, rank=64)
    yield launches.ssm(BF16, both_ways=True)
    yield launches.ssm(BF16, free=False)
    yield launches.ssm(BF16, channels=1, time=1)
    yield launches.conditioner(BF16, channels=1, time=1)
    yield launches.softmax_entries(BF16, 256, 256, time=1)


def worst(found: list[Compiled]) -> list[dict[str, str]]:
    """A row for every kernel: most registers, bytes spilt and bytes shared on each card, or what is wrong there."""
    rows = []
    for kernel in dict.fromkeys(one.kernel for one in found):
        row = {"kernel": f"`{kernel}`"}
        for card in CARDS:
            there = [one for one in found if (one.kernel, one.card) == (kernel, card)]
            faults = sorted({one.fault() for one in there if one.fault()})
            row[card] = faults[0] if faults else " / ".join(str(max(part)) for part in zip(*(one[4:] for one in there)))
        rows.append(row)
    return rows


if __name__ == "__main__":
    chosen = every() if sys.argv[1:] == ["every"] else launches.few()
    found = list(launches.compile_all(chosen, list(CARDS)))
    faults = sum(one.fault() is not None for one in found)
    cards = "; ".join(f"{name}: {card.shared // 1024} KiB ({card.example()})" for name, card in CARDS.items())
    note = (
        f"Every launch goes through the JIT of Triton {triton.__version__} with the arguments that the launchers pass, "
        "and stops before the kernel would start: **nothing here has run on a GPU.** "
        f"{len(found)} kernels compiled, {faults} of them unfit for their card.\n\n"
        "Registers of a thread / bytes that it spills / bytes of shared memory of a program, the most of any launch. "
        f"Fit means at most {SPILL} bytes spilt, and shared memory within the card's. {cards}.\n\nLaunches: "
        + "; ".join(dict.fromkeys(one.case for one in found))
        + "; forward and backward."
    )
    if sys.argv[1:] == ["every"]:
        print(*worst(found), note, sep="\n")
    else:
        records = [one._asdict() for one in found]
        save("docs/results/scan_kernels", "Triton kernels of the scans, compiled", records, worst(found), note)
