"""The read of a state space model by the kernel of mamba-ssm: stateless reads of rows of one document."""

from __future__ import annotations

import torch
from torch import Tensor

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
    delta, a, b, c, skip, v, beta = inputs[:7]
    values, e, *shift = pack(v, v, beta)
    items = [*(x for x in (values, e) if x is not None), torch.ones_like(values)]
    parts = len(items)
    time_last = lambda x: x.transpose(1, 2).contiguous()  # noqa: E731
    u, steps, b_of, c_of = map(time_last, (torch.cat(items, -1), delta.repeat(1, 1, parts), b, c))
    sums = kernel(u, steps, a.T.repeat(parts, 1), b_of, c_of, skip.repeat(parts))
    *of_items, weight = time_last(sums).chunk(parts, -1)
    # What is flushed to 0 is a factor below e^-87 of the others: inputs delta b, decays, c.
    most = c.sum(-1, keepdim=True) * (1 + delta.amax()) * (1 + b.amax())
    least = (LEAST * most.clamp_min(1.0)).detach()
    terms, rows, entries = unpack(weight, of_items[0], None if e is None else of_items[1], *shift, least)
    return proven(terms, rows, entries, torch.ones_like(rows), lambda: _plain(inputs))


def _plain(inputs: Inputs) -> Terms:
    like = inputs.v.new_empty(len(inputs.v), inputs.a.numel())
    return ssm_scan(inputs, start_of(None, inputs.beta, like), True)[0]


composed = opaque(
    "ssm_composed",
    SCHEMA,
    _read,
    lambda *tensors: [tensors[5].new_empty(tensors[5].shape) for _ in range(2 if tensors[6] is None else 3)],
)
