"""The read of a state space model by a kernel: mamba-ssm's, or our own where it is missing and for documents."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.common.backend import found
from fem.ops.common.composed import LEAST, opaque, pack, proven, unpack
from fem.ops.common.read import Terms
from fem.ops.common.scaled_sums import start_of
from fem.ops.ssm.inputs import SCHEMA, Inputs
from fem.ops.ssm.plain import ssm_scan

MOST_STATES = 256  # of a channel, which the kernel takes


def kernel(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """y_t = sum_n c_tn h_tn + skip u_t, h_tn = e^{delta_t a_n} h_{t-1,n} + delta_t b_tn u_t, for u, delta, y (B, D, T),
    a (D, N), b and c (B, N, T), skip (D)."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(u, delta, a, b, c, skip)


def _read(*tensors: Tensor | None) -> list[Tensor]:
    inputs = Inputs(*tensors)
    delta, _a, b, c, _skip, v, beta = inputs[:7]
    values, e, *shift = pack(v, v, beta)
    items = [*(x for x in (values, e) if x is not None), torch.ones_like(values)]
    sums = (_by_mamba if inputs.opens is None and found("mamba_ssm") else _by_ours)(
        torch.cat(items, -1), len(items), inputs
    )
    *of_items, weight = sums.chunk(len(items), -1)
    # What is flushed to 0 is a factor below e^-87 of the others: inputs delta b, decays, c.
    most = c.sum(-1, keepdim=True) * (1 + delta.amax()) * (1 + b.amax())
    least = (LEAST * most.clamp_min(1.0)).detach()
    terms, rows, entries = unpack(weight, of_items[0], None if e is None else of_items[1], *shift, least)
    return proven(terms, rows, entries, torch.ones_like(rows), lambda: _plain(inputs))


def _by_mamba(items: Tensor, streams: int, inputs: Inputs) -> Tensor:
    delta, a, b, c, skip = inputs[:5]
    time_last = lambda x: x.transpose(1, 2).contiguous()  # noqa: E731
    u, steps, b_of, c_of = map(time_last, (items, delta.repeat(1, 1, streams), b, c))
    return time_last(kernel(u, steps, a.T.repeat(streams, 1), b_of, c_of, skip.repeat(streams)))


def _by_ours(items: Tensor, streams: int, inputs: Inputs) -> Tensor:
    from fem.ops.ssm.sequential import sequential_scan  # by Triton, which the library does not require

    delta, a, b, c, skip = inputs[:5]
    sums = sequential_scan(delta, a, b, c, delta.repeat(1, 1, streams) * items, inputs.opens)
    return sums + skip.repeat(streams) * items


def _plain(inputs: Inputs) -> Terms:
    like = inputs.v.new_empty(len(inputs.v), inputs.a.numel())
    return ssm_scan(inputs, start_of(None, inputs.beta, like), True)[0]


composed = opaque(
    "ssm_composed",
    SCHEMA,
    _read,
    lambda *tensors: [tensors[5].new_empty(tensors[5].shape) for _ in range(2 if tensors[6] is None else 3)],
)
