"""Registers of kernels on an H100 and bytes that they spill, as JSON: of the conditioner in bfloat16 or our scans."""

import json
import sys

import torch
from ahead_of_time import compiled

from fem.ops.channel_scan import channel_kernels as channels
from fem.ops.conditioner import conditioner_kernels as kernels
from fem.ops.conditioner import fused_conditioner as fused
from fem.ops.ssm import fused_ssm as states
from fem.ops.ssm.ssm_kernels import ssm_backward_kernel, ssm_kernel

SIXTEEN = ("projected", "weight", "bias", "out", "grad", "d_projected", "x", "normed", "features", "d_features", "d_x")
SIXTEEN += ("in_weight", "in_bias", "map_weight", "map_bias")
WIDE = ("hidden", "summaries", "last", "starts", "d_state", "d_last", "d_hidden", "parts", "norm_parts")
TYPES = dict.fromkeys(SIXTEEN, "*bf16") | dict.fromkeys(WIDE, "*fp32") | {"keep": "*i1", "start": "*i1"}
TYPES |= {"eps": "fp32", "in_eps": "fp32"}
NAMES = ("project_kernel", "condition_kernel", "condition_backward_kernel", "state_backward_kernel")
INPUTS, WIDTHS = 1024, (16, 64, 256)
NUMBERS = ("T", "C", "W", "TOKENS", "x_row", "x_token", "x_channel", "a_row", "v_row", "f_row", "pieces", "length")
FLAGS = {"HAS_A": True, "HAS_V": True, "HAS_F": True, "KEPT": True, "CHUNK": states.CHUNK}


def of_conditioner() -> dict[str, dict[str, int]]:
    found = {}
    for width in WIDTHS:
        sizes, sort = fused.ChunkSizes(2, 2048, width), torch.bfloat16
        usual = {"length": width**0.5, "bends": True, "ALONE": False, **sizes.shape, **sizes.ends}
        warps = usual.pop("num_warps")
        for name in NAMES:
            way = fused.BACKWARD if "backward" in name else fused.FORWARD
            constants = usual | fused.product_sizes(INPUTS, width, sort, *way)
            found[f"{name} of {width}"] = compiled(getattr(kernels, name), TYPES, constants, warps)
    return found


def of_scans() -> dict[str, dict[str, int]]:
    both, found = (True, False), {}
    calls = [(channels.channel_kernel, {"BLOCK": channels.BLOCK}, 1, both)]
    calls += [(channels.channel_backward_kernel, {"BLOCK": channels.BLOCK}, 1, both)]
    for rank in (16, 64):
        sizes = states.cell_sizes(rank)
        calls += [(ssm_kernel, sizes, sizes["num_warps"], both)]
        calls += [(ssm_backward_kernel, sizes, sizes["num_warps"], (False,))]
    for kernel, sizes, warps, ways in calls:
        for ends in ways:
            constants = FLAGS | sizes | {"ENDS": ends}
            pointers = set(kernel.arg_names) - {*NUMBERS, *constants}
            types = {pointer: "*i8" if pointer == "opens" else "*fp32" for pointer in pointers}
            at = f" of {sizes['N']} states" if "N" in sizes else ""
            found[f"{kernel.__name__}{at}, {ends}"] = compiled(kernel, types, constants, warps)
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[f"of_{sys.argv[1]}"]()))
