"""Registers that the conditioner's kernels take on an H100 in bfloat16, and bytes that they spill, as JSON by width."""

import json
import sys

from ahead_of_time import compiled

from fem.ops.conditioner import conditioner_kernels as kernels
from fem.ops.conditioner import fused_conditioner as fused

SIXTEEN = ("projected", "weight", "bias", "out", "grad", "d_projected", "x", "normed", "features", "d_features", "d_x")
WIDE = ("hidden", "summaries", "last", "starts", "d_state", "d_last", "d_hidden", "parts")
TYPES = dict.fromkeys(SIXTEEN, "*bf16") | dict.fromkeys(WIDE, "*fp32") | {"keep": "*i1", "start": "*i1", "eps": "fp32"}
NAMES = ("sum_chunks_kernel", "condition_kernel", "condition_backward_kernel", "state_backward_kernel")
FIRST = ("normalize_kernel", "normalize_backward_kernel")
INPUTS = 1024


def kernels_of(width: int) -> dict[str, dict[str, int]]:
    sizes = fused.ChunkSizes(2, 2048, width)
    constants = {"root": width**0.5, **sizes.shape, **sizes.ends}
    found = {name: compiled(getattr(kernels, name), TYPES, constants, fused.WARPS) for name in NAMES}
    warps = (first := {"width": INPUTS, **fused.input_tile(INPUTS)}).pop("num_warps")
    return found | {name: compiled(getattr(kernels, name), TYPES, first, warps) for name in FIRST}


if __name__ == "__main__":
    print(json.dumps({width: kernels_of(int(width)) for width in sys.argv[1].split(",")}))
