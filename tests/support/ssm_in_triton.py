"""Reads of a state space model by our own scan in Triton's interpreter, beside float64: `python ssm_in_triton.py`.

Prints "equal", or what differs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

import torch
from reads import gradients_of, make

torch.set_num_threads(1)
CASES = {
    "usual": {},
    "several kept states": {"time": 70},
    "documents": {"documents": True},
    "documents and masks": {"documents": True, "masked": True},
    "spikes of 300": {"spike": 300.0},
    "one state": {"rank": 1},
    "several blocks of columns": {"width": 15, "time": 5},
    "in pieces": {"pieces": (14, 16, 1, 1, 1)},
    "documents in pieces": {"pieces": (14, 16, 1, 1, 1), "documents": True},
}


def results(call, marks, dtype, backend, pieces):
    mine = replace(call.leaves(dtype), rules={"backend": backend})
    read = mine.in_pieces(*pieces, **marks)
    torch.manual_seed(1)
    cotangents = [torch.randn(x.shape) for x in read]
    return [*read, *gradients_of(mine, read, cotangents).values()]


def error(time=33, spike=0.0, documents=False, masked=False, pieces=None, **sizes) -> float:
    torch.manual_seed(0)
    call, marks = make("ssm", time, batch=2, **{"rank": 5} | sizes), {}
    call.arguments["v"][:, time // 4] += spike
    if documents:
        marks["segment_ids"] = (torch.arange(time) // 12)[None].expand(2, time)
    if masked:
        marks["key_mask"] = torch.ones(2, time, dtype=torch.bool)
        marks["key_mask"][0, :5] = marks["key_mask"][1, 11] = False
    wanted = results(call, marks, torch.float64, "plain", [time])
    found, again = (results(call, marks, None, "triton", pieces or [time]) for _ in range(2))
    if not all(map(torch.equal, found, again)):
        return torch.inf
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))


if __name__ == "__main__":
    far = {name: size for name, case in CASES.items() if not (size := error(**case)) < 5e-6}
    print(far or "equal")
