"""Every launch of the scans' kernels, forward and backward, as small calls of their launchers.

They vary what decides how a kernel compiles: dtypes, widths, decays, what is None, one token and one channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from fem.experiments.doctor.without_card import Compiled, compiled_for
from fem.ops.channel_scan.read import channel_scan_terms
from fem.ops.decay_scan.read import decay_scan
from fem.ops.linear_attention.read import linear_attention_terms
from fem.ops.softmax.recompute import recompute
from fem.ops.softmax.support import Intervals
from fem.ops.ssm.read import ssm_terms

BF16, FP32 = torch.bfloat16, torch.float32
Launch = tuple[str, Callable[[], None]]  # its name, and the call


def linear_attention(dtype, keys, values, decay=None, free=True, present=True, time=130) -> Launch:
    def run():
        q, k, v = (leaf(1, time, 4, width, dtype=dtype) for width in (keys, keys, values))
        g = {None: None, "head": leaf(1, time, 4), "channel": leaf(1, time, 4, keys)}[decay]
        beta = leaf(4, values) if free else None
        terms, state = linear_attention_terms(q, k, v, beta, g, present=present, backend="triton")
        differentiate(*terms, *state.values())

    kind = "no decay" if decay is None else f"decay per {decay}"
    more = "" if present else "without the present token"
    return called("linear attention", dtype, f"widths {keys}, {values}", kind, free, more, time), run


def channel_scan(dtype, weighted=True, decays=True, free=True, channels=64, time=130, weight_dtype=None) -> Launch:
    def run():
        v, x, a = leaf(1, time, 2, channels, dtype=dtype), None, None
        if weighted:
            x = leaf(1, time, 2, channels, dtype=weight_dtype or dtype)
        if decays:
            a = leaf(1, time, 2, channels, dtype=dtype)
        terms, state = channel_scan_terms(x, v, leaf(2, channels) if free else None, a, backend="triton")
        differentiate(*terms, *state.values())

    parts = " and ".join(name for name, there in (("weights", weighted), ("decays", decays)) if there) or "counts"
    return called("channel scan", dtype, f"{2 * channels} channels", parts, free, "", time), run


def ssm(dtype, rank=16, free=True, both_ways=False, channels=64, time=130) -> Launch:
    def run():
        delta, v = (leaf(1, time, 2, channels, dtype=dtype) for _ in range(2))
        b, c = (leaf(1, time, rank, dtype=dtype) for _ in range(2))
        shared = leaf(2, channels, rank), b, c, leaf(2, channels)
        options = {"causal": not both_ways, "return_state": not both_ways, "backend": "triton"}
        terms, state = ssm_terms(delta, *shared, v, leaf(2, channels) if free else None, **options)
        differentiate(*terms, *(state or {}).values())

    return called("ssm", dtype, f"{rank} states", "both ways" if both_ways else "causal", free, "", time), run


def conditioner(dtype, channels=64, time=130) -> Launch:
    def run():
        decay, u = (leaf(1, time, channels, dtype=dtype) for _ in range(2))
        differentiate(decay_scan(decay, u, leaf(1, channels), "triton"))

    return called("conditioner", dtype, f"{channels} channels", "", True, "", time), run


def softmax_entries(dtype, keys, values, seen=False, bias=False, time=130) -> Launch:
    def run():
        q = leaf(1, time, 4, keys, dtype=dtype)
        k, v = (leaf(1, time, 2, width, dtype=dtype) for width in (keys, values))
        free = leaf(1, time, 4, values)
        scores = torch.zeros(1, 1, time, time) if bias else None
        rows = torch.arange(time, dtype=torch.int32)[None]
        interval = Intervals(rows - rows, rows + 1) if seen else None
        doubtful = free > 0
        differentiate(recompute(free, doubtful, q, k, v, leaf(2, values), scores, interval, not seen, 0.125, "triton"))

    kind = " and ".join(name for name, there in (("an interval", seen), ("a bias", bias)) if there) or "causal"
    return called("softmax entries", dtype, f"widths {keys}, {values}", kind, True, "", time), run


def called(read, dtype, size, kind, free, more, time) -> str:
    parts = (read, str(dtype).removeprefix("torch."), size, kind, "" if free else "mean alone", more)
    return ", ".join(filter(None, parts)) + (f", {time} token" if time == 1 else "")


def leaf(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def differentiate(*outputs: Tensor | None) -> None:
    sum(x.float().sum() for x in outputs if x is not None).backward()


def few() -> Iterator[Launch]:
    """Every kernel at least once, at the widest tiles of bfloat16 and float32."""
    yield linear_attention(BF16, 64, 32)
    yield linear_attention(BF16, 64, 64, "channel")
    yield linear_attention(FP32, 64, 32, "channel")
    yield channel_scan(BF16)
    yield ssm(BF16)
    yield conditioner(BF16)
    yield softmax_entries(BF16, 64, 32)


def compile_all(launches: Iterator[Launch], cards: list[str]) -> Iterator[Compiled]:
    """Compile all launches for each card; kernels with the same figures are reported once."""
    launches, seen = list(launches), set()
    for card in cards:
        for name, run in launches:
            # the check of backends would refuse CPU tensors
            with compiled_for(card) as found, mock.patch("fem.ops.common.backend._check"):
                try:
                    run()
                except Exception as error:
                    found.append(Compiled(name, "the launcher", card, f"{type(error).__name__}: {error}"))
            for one in found:
                if one._replace(case="") not in seen:
                    seen.add(one._replace(case=""))
                    yield one._replace(case=name)
