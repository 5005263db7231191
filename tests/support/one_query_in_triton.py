"""One query by our kernels in Triton's interpreter, beside the definition in float64: `python one_query_in_triton.py`.

Prints the largest error of the mean and of F, in units of the largest value, of each case.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fem.ops.softmax import one_query_kernels

torch.set_num_threads(1)
CASES = {
    "plain": {},
    "one key": {"time": 1},
    "several parts": {"time": 701},
    "several blocks of a part": {"time": 301, "NUMBERS": 256},
    "grouped heads": {"heads": 6},
    "a pair of widths": {"mean": 5, "free": 3, "shared": False},
    "no mean": {"mean": 0, "shared": False},
    "no free energy": {"free": 0, "shared": False},
    "a mask that hides all of one row": {"masked": True, "time": 301},
    "a bias of each head": {"biased": True},
    "spans of 1,000 nats": {"scale_of_values": 400.0},
    "a spike": {"spike": 1e4, "time": 301},
    "a hidden spike": {"spike": 1e4, "masked": True, "time": 301},
    "small beta": {"beta": 1e-5},
    "equal values": {"scale_of_values": 0.0},
    "scores of 1,000": {"scale_of_keys": 400.0},
    "keys that lie token by token": {"transposed": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


def draw(
    time=37, heads=2, mean=7, free=7, shared=True, masked=False, biased=False, scale_of_values=1.0, spike=0.0,
    beta=None, scale_of_keys=1.0, transposed=False, dtype=torch.float32,
):  # fmt: skip
    torch.manual_seed(0)
    rows, kv_heads, width = 2, 2, 10

    def lie(d: int) -> torch.Tensor:
        shape = (rows, time, kv_heads, d) if transposed else (rows, kv_heads, time, d)
        return torch.randn(shape).transpose(1, 2) if transposed else torch.randn(shape)

    q, k, v = torch.randn(rows, heads, width), scale_of_keys * lie(width), 3.0 + scale_of_values * lie(mean)
    v[:, :, time // 3] += spike
    f = v if shared else scale_of_values * lie(free)
    rate = torch.rand(kv_heads, f.shape[-1]) + 0.5 if beta is None else torch.full((kv_heads, f.shape[-1]), beta)
    mask = torch.zeros(1, 1, time)
    if masked:
        mask = torch.where(torch.rand(rows, 1, time) < 0.5, -torch.inf, 0.0)
        mask[0], mask[1, :, time // 3] = -torch.inf, -torch.inf
    if biased:
        mask = torch.randn(1, heads, time)
    q, k, v, f = (x.to(dtype) for x in (q, k, v, f))
    return q, k, v, v if shared else f, rate, mask if masked or biased else None, width**-0.5, shared


def definition(q, k, v, f, beta, mask, scale, _):
    group = q.shape[1] // k.shape[1]
    q, k, v, f = (x.double() for x in (q, *(x.repeat_interleave(group, 1) for x in (k, v, f))))
    beta = beta.double().repeat_interleave(group, 0)[:, None]
    scores = scale * torch.einsum("bhd,bhtd->bht", q, k) + (0 if mask is None else mask.double())
    hidden = scores.isneginf().all(-1, keepdim=True)
    log_p = scores.masked_fill(hidden, 0.0).log_softmax(-1)[..., None]
    mean = (log_p.exp() * v).sum(2)
    shift = f.amax(2, keepdim=True)
    more = (log_p.exp() * (beta * (f - shift)).expm1()).sum(2)  # of values that hardly differ, digits of the difference
    near = shift[:, :, 0] + more.log1p() / beta[:, 0]
    far = (log_p + beta * f).logsumexp(2) / beta[:, 0]
    free = torch.where(more > -0.5, near, far)
    return [torch.where(hidden, 0.0, x)[:, None] for x in (mean, free)]


def error(case: dict) -> float:
    one_query_kernels.NUMBERS = case.get("NUMBERS", 4096)
    inputs = draw(**{name: value for name, value in case.items() if name != "NUMBERS"})
    found, wanted = one_query_kernels.read_one_query(*inputs), definition(*inputs)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b.numel()]
    assert all(a.shape == b.shape and a.dtype == inputs[0].dtype for a, b in zip(found, wanted))
    return max(((a.double() - b).abs().max() / b.abs().max().clamp_min(1.0)).item() for a, b in pairs)


if __name__ == "__main__":
    print(json.dumps({name: error(case) for name, case in CASES.items()}, indent=1))
