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
    "in pieces": {"pieces": (14, 16, 1, 1, 1)},
    "documents in pieces": {"pieces": (14, 16, 1, 1, 1), "documents": True},
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


def in_pieces(leaves, marks, pieces, backend):
    """A prefill in chunks and tokens one by one, each from the state before."""
    reads, state, first = [], None, 0
    for size in pieces:
        here = {n: x if n in ("A", "D", "beta") else x[:, first : first + size] for n, x in (leaves | marks).items()}
        read, state = ssm_read(**here, backend=backend, initial_state=state, return_state=True)
        reads.append(read)
        first += size
    return [torch.cat(parts, 1) for parts in zip(*reads)]


def results(inputs, marks, dtype, backend, pieces=()):
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    read = in_pieces(leaves, marks, pieces, backend) if pieces else ssm_read(**leaves, **marks, backend=backend)
    torch.manual_seed(1)
    loss = sum((torch.randn(x.shape).to(x.dtype) * x).sum() for x in read)
    return [*read, *torch.autograd.grad(loss, list(leaves.values()))]


if __name__ == "__main__":
    far = {}
    for name, case in CASES.items():
        pieces = case.get("pieces", ())
        drawn = draw(**{option: value for option, value in case.items() if option != "pieces"})
        wanted = results(*drawn, torch.float64, "plain")
        found = results(*drawn, torch.float32, "triton", pieces)
        again = results(*drawn, torch.float32, "triton", pieces)
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
        if not error < 5e-6 or not all(map(torch.equal, found, again)):
            far[name] = error
    print(far or "equal")
