"""What the Triton kernels of the scans become on an H100 or H200 (sm_90), compiled without a GPU.

python benchmarks/scan_kernels_aot.py            # writes docs/results/scan_kernels_aot.{json,md}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from aot import SHARED_MEMORY, compiled
from measure import save

from fem.ops.channel_scan.kernels import backward as channel_backward
from fem.ops.channel_scan.kernels import forward as channel_forward
from fem.ops.decay_scan.kernels import scan as decay_scan
from fem.ops.decay_scan.kernels.launch import Cut
from fem.ops.linear_attention.kernels import (
    carry as keyed_carry,
)
from fem.ops.linear_attention.kernels import (
    channel_scores as keyed_channel_scores,
)
from fem.ops.linear_attention.kernels import (
    output as keyed_read,
)
from fem.ops.linear_attention.kernels import (
    scores as keyed_scores,
)
from fem.ops.linear_attention.kernels import (
    state as keyed_memory,
)
from fem.ops.linear_attention.kernels.blocks import CARRIED_KEYS, WARPS_OF_CARRY, blocks_for
from fem.ops.ssm.kernels import backward as ssm_backward
from fem.ops.ssm.kernels import forward as ssm_forward
from fem.ops.ssm.kernels import launch as ssm_triton

KEYED_WIDTHS = ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128))  # of q and k, and of v


class Case(NamedTuple):
    """A kernel as it ships."""

    kernel: object
    widths: str
    variant: str
    constants: dict  # tile sizes, and None for arguments that are absent
    launch: dict  # warps and stages
    types: dict[str, str]  # of arguments that are no fp32 pointers, in Triton's names

    def measure(self) -> dict:
        types = {name: self.types.get(name, "*fp32") for name in self.kernel.arg_names}
        figures = compiled(self.kernel, types, self.constants, self.launch)
        return {"kernel": self.kernel.__name__, "widths": self.widths, "variant": self.variant} | figures


def keyed_cases(widths: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """The keyed scan in bfloat16."""
    types = dict.fromkeys(("q", "k", "v", "left", "kept", "pairs", "dq", "dk", "dv"), "*bf16")
    types |= {"doubt": "*i8", "tier": "*u8", "time": "i32", "chunks": "i32"}

    def case(kernel, keys: int, values: int, variant: str = "", **constants) -> Case:
        blocks = blocks_for(kernel.__name__, keys, values, half_precision=True)
        known = {"DK": keys, "KEYS": keys, "DV": values, "VALUES": values, "SIZES": blocks.chunk.bit_length() - 1}
        launch = blocks.launch()
        known |= {name: launch.pop(name) for name in ("CHUNK", "BLOCK")} | {"PRESENT": True} | constants
        name = f"{keys}, {values}" if "DV" in kernel.arg_names else str(keys)
        return Case(kernel, name, variant, known, launch, types)

    for keys, values in widths:
        yield case(keyed_memory.remember, keys, values, total=None)
        yield case(keyed_memory.remember_gradients, keys, values)
        yield case(keyed_read.read, keys, values)
        yield case(keyed_read.memory_gradients, keys, values)
        at_once = blocks_for("token_gradients", keys, values, half_precision=True).values
        tokens = case(keyed_read.token_gradients, keys, values, VALUES=at_once)
        yield tokens._replace(types={name: type_ for name, type_ in types.items() if name != "dv"})
        for kernel in (keyed_carry.carry, keyed_carry.carry_gradients):
            carried = case(kernel, keys, values, BLOCK=CARRIED_KEYS, SHARED=False)
            yield carried._replace(launch={"num_warps": WARPS_OF_CARRY, "enable_fp_fusion": True})
    for keys in sorted({keys for keys, _ in widths}):
        for kernel in (keyed_scores.scores, keyed_scores.scores_gradients):
            yield case(kernel, keys, 16, "no decay", g=None)
            yield case(kernel, keys, 16, "decay per head")
        for kernel in (keyed_channel_scores.channel_scores, keyed_channel_scores.channel_scores_gradients):
            yield case(kernel, keys, 16, "decay per channel")


INTEGERS = ("time", "chunks", "channels", "size", "start_size", "last_size", "scratch_size", "own_size", "d_b_size")


def channel_cases() -> Iterator[Case]:
    """The decaying sum and the channel scan in bfloat16."""
    shape = Cut.of(8, 2048, 768)
    inputs = ("log_decay", "x", "u", "v", "h", "h_out", "grad", "d_decay", "d_x", "d_u", "d_v")
    types = dict.fromkeys(inputs, "*bf16") | dict.fromkeys(INTEGERS, "i32")

    def case(kernel, variant: str = "", **constants) -> Case:
        launch = dict(shape.carry_blocks if "carry" in kernel.__name__ else shape.blocks)
        known = {name: launch.pop(name) for name in ("CHUNK", "BLOCK") if name in launch} | constants
        return Case(kernel, str(known["BLOCK"]), variant, known, launch, types)

    yield case(decay_scan.scan_sums)
    for direction in (False, True):
        yield case(decay_scan.scan_carry, "backwards" if direction else "", REVERSED=direction)
    yield case(decay_scan.scan_chunks)
    yield case(decay_scan.gradient_sums)
    yield case(decay_scan.gradient_chunks)
    no_energies = dict.fromkeys(("beta", "free_energy", "energy_share", "d_free", "d_beta"))
    variants = {
        "decays and weights": {},
        "weights": {"log_decay": None, "d_decay": None},
        "decays": {"x": None, "d_x": None},
        "mean alone": no_energies,
    }
    for variant, absent in variants.items():
        for kernel in (channel_forward.channel_sums, channel_forward.channel_carry, channel_forward.channel_reads):
            yield case(kernel, variant, **absent)
        yield case(channel_backward.channel_gradient_sums, variant, **absent, d_log_weight=None)
        yield case(channel_backward.channel_gradient_carry, variant)
        yield case(channel_backward.channel_gradients, variant, **absent, d_log_weight=None)


def state_space_cases(ranks: tuple[int, ...]) -> Iterator[Case]:
    """The state space scan in bfloat16."""
    inputs = dict.fromkeys(("delta", "b", "c", "v", "d_delta", "d_v"), "*bf16")
    types = inputs | dict.fromkeys(INTEGERS, "i32") | {"opens": "*i8"}
    for rank in ranks:
        _, launch = ssm_triton.cut(torch.empty(8, 2048, 768, device="meta"), rank)
        known = {name: launch.pop(name) for name in ("N", "PADDED", "CHUNK", "BLOCK")}
        widths = f"{known['BLOCK']} x {rank}"
        mean_alone = dict.fromkeys(("beta", "free_energy", "d_free", "opens", "d_log_weight"))
        for variant, absent in {"documents": {}, "past alone": {"skip": None}, "mean alone": mean_alone}.items():
            for kernel in (ssm_forward.ssm_sums, ssm_forward.ssm_reads, ssm_backward.ssm_gradients):
                yield Case(kernel, widths, variant, known | absent, launch, types)


def cases() -> Iterator[Case]:
    """Every kernel at the sizes it ships with."""
    yield from keyed_cases(KEYED_WIDTHS)
    yield from channel_cases()
    yield from state_space_cases((16, 64))


if __name__ == "__main__":
    results = [case.measure() for case in cases()]
    rows = [{name: str(value) for name, value in result.items()} for result in results]
    note = (
        f"bfloat16, compiled ahead of time for sm_90 by Triton {triton.__version__}; nothing here ran on a GPU.\n\n"
        "Widths: of q and k, and of v; channels, and states, of a program. Registers per thread; spill: bytes of "
        f"stack per thread; shared: bytes of {SHARED_MEMORY}; then matrix and exponential instructions of the kernel."
    )
    save("docs/results/scan_kernels_aot", "Triton kernels of the scans on Hopper, ahead of time", results, rows, note)
