"""The Triton kernels of the scans, compiled as their launchers launch them, for GPUs that need not be there.

python benchmarks/scan_kernels.py                # writes docs/results/scan_kernels.{json,md}
python benchmarks/scan_kernels.py every          # prints all launches that a layer can make: half an hour on one core
"""

from __future__ import annotations

import sys

import triton
from measure import save

from fem.experiments.doctor.launches import compile_all, every, few
from fem.experiments.doctor.without_card import CARDS, SPILL, Compiled


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
    launches = every() if sys.argv[1:] == ["every"] else few()
    found = list(compile_all(launches, list(CARDS)))
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
