"""Channel scans by torch's cumulative sums, or with decays by a kernel of flash-linear-attention: stateless reads."""

from __future__ import annotations

import torch
from torch import Tensor

from fem.ops.channel_scan.plain import channel_scan
from fem.ops.common.composed import LEAST, opaque, pack, proven, unpack
from fem.ops.common.read import LOG_ZERO, Terms
from fem.ops.common.scaled_sums import start_of
from fem.ops.decay_scan import composed as decay


def _read(x, v, beta, log_decay) -> list[Tensor]:
    """(B, T, C), beta (C); -inf in x adds nothing, -inf in log_decay forgets."""
    values, e, *shift = pack(v, v, beta)
    if x is None:
        peak, weight = 0.0, torch.ones_like(values)
    else:
        x = x.float()
        peak = x.detach().amax(1, keepdim=True).clamp_min(LOG_ZERO)
        weight = (x - peak).exp()
    items = torch.cat([weight, *(weight * one for one in (values, e) if one is not None)], -1)
    parts = items.shape[-1] // v.shape[-1]
    if log_decay is None:
        sums = items.cumsum(1)
    else:
        sums = decay.kernel(items, log_decay.float().clamp_min(LOG_ZERO).repeat(1, 1, parts))
    sums = [*sums.chunk(parts, -1), None]
    terms, rows, entries = unpack(*sums[:3], *shift, LEAST)
    terms = terms._replace(log_weight=torch.where(rows, LOG_ZERO, terms.log_weight + peak))
    return proven(terms, rows, entries, torch.ones_like(rows), lambda: _plain(x, v, beta, log_decay))


def _plain(x, v, beta, log_decay) -> Terms:
    x, v, log_decay = (None if part is None else part.float() for part in (x, v, log_decay))
    return channel_scan(log_decay, x, v, beta, start_of(None, beta, v[:, 0]))[0]


composed = opaque(
    "channel_scan_composed",
    "Tensor? x, Tensor v, Tensor? beta, Tensor? log_decay",
    _read,
    lambda x, v, beta, log_decay: [v.new_empty(v.shape, dtype=torch.float32) for _ in range(2 if beta is None else 3)],
)
