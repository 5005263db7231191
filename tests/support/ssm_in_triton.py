"""Reads of a state space model by our own scan in Triton's interpreter, beside float64: `python ssm_in_triton.py`.

Prints "equal", or what differs.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fem.functional import ssm_read

torch.set_num_threads(1)
ROWS, HEADS, WIDTH = 2, 2, 3
CASES = {
    "usual": {},
    "several kept states": {"time": 70},
    "documents": {"documents": True},
    "documents and masks": {"documents": True, "masked": True},
    "spikes of 300": {"spike": 300.0},
    "one state": {"states": 1},
    "several blocks of columns": {"width": 15, "time": 5},
}


def draw(time=33, states=5, width=WIDTH, spike=0.0, documents=False, masked=False):
    torch.manual_seed(0)
    steps = {"delta": torch.rand(ROWS, time, HEADS, width) + 0.1}
    steps |= {name: torch.rand(ROWS, time, states) + 0.1 for name in "BC"}
    v = torch.randn(ROWS, time, HEADS, width)
    v[:, time // 4] += spike
    inputs = steps | {"A": -torch.rand(HEADS, width, states), "D": torch.rand(HEADS, width) + 0.1, "v": v}
    marks = {}
    if documents:
        marks["segment_ids"] = (torch.arange(time) // 12)[None].expand(ROWS, time)
    if masked:
        marks["key_mask"] = torch.ones(ROWS, time, dtype=torch.bool)
        marks["key_mask"][0, :5] = marks["key_mask"][1, 11] = False
    return inputs | {"beta": torch.rand(HEADS, width) + 0.5}, marks


def results(inputs, marks, dtype, backend):
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    read = ssm_read(**leaves, **marks, backend=backend)
    torch.manual_seed(1)
    loss = sum((torch.randn(x.shape).to(x.dtype) * x).sum() for x in read)
    return [*read, *torch.autograd.grad(loss, list(leaves.values()))]


if __name__ == "__main__":
    far = {}
    for name, case in CASES.items():
        wanted = results(*draw(**case), torch.float64, "plain")
        found = results(*draw(**case), torch.float32, "triton")
        again = results(*draw(**case), torch.float32, "triton")
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
        if not error < 5e-6 or not all(map(torch.equal, found, again)):
            far[name] = error
    print(far or "equal")
