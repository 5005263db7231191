"""Registers that the conditioner's kernels take on an H100 in bfloat16, and bytes that they spill, as JSON by width."""

import json
import sys

import torch
from ahead_of_time import compiled

from fem.ops.conditioner import conditioner_kernels as kernels
from fem.ops.conditioner import fused_conditioner as fused

SIXTEEN = ("projected", "weight", "bias", "out", "grad", "d_projected", "x", "normed", "features", "d_features", "d_x")
SIXTEEN += ("in_weight", "in_bias", "map_weight", "map_bias")
WIDE = ("hidden", "summaries", "last", "starts", "d_state", "d_last", "d_hidden", "parts", "norm_parts")
TYPES = dict.fromkeys(SIXTEEN, "*bf16") | dict.fromkeys(WIDE, "*fp32") | {"keep": "*i1", "start": "*i1"}
TYPES |= {"eps": "fp32", "in_eps": "fp32"}
NAMES = ("project_kernel", "condition_kernel", "condition_backward_kernel", "state_backward_kernel")
INPUTS = 1024


def kernels_of(width: int) -> dict[str, dict[str, int]]:
    sizes, sort = fused.ChunkSizes(2, 2048, width), torch.bfloat16
    usual = {"length": width**0.5, "bends": True, "ALONE": False, **sizes.shape, **sizes.ends}
    warps, found = usual.pop("num_warps"), {}
    for name in NAMES:
        way = fused.BACKWARD if "backward" in name else fused.FORWARD
        constants = usual | fused.product_sizes(INPUTS, width, sort, *way)
        found[name] = compiled(getattr(kernels, name), TYPES, constants, warps)
    return found


if __name__ == "__main__":
    print(json.dumps({width: kernels_of(int(width)) for width in sys.argv[1].split(",")}))
