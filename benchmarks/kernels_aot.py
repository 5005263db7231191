"""What the Triton kernels become on an H100 or H200 (sm_90), compiled without a GPU.

python benchmarks/kernels_aot.py            # writes docs/results/kernels_aot.{json,md}
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
from aot import SHARED_MEMORY, compiled
from measure import save
from plain_flash import plain_forward

from fem.ops.softmax.kernels import (
    backward as softmax_backward,
)
from fem.ops.softmax.kernels import (
    blocks as softmax_blocks,
)
from fem.ops.softmax.kernels import decode as kernels
from fem.ops.softmax.kernels import (
    forward as softmax_forward,
)
from fem.ops.softmax.kernels import launch_decode as softmax_decode
from fem.ops.softmax.kernels import (
    values as softmax_values,
)
from fem.ops.softmax.kernels.blocks import ROWS, Blocks, blocks_for

WIDTHS = (64, 128, 256)  # of q and k, and of [v | E]

DECODE_ROWS, DECODE_SPLITS = (1, 4), 64

BFLOAT16 = {"q", "k", "v", "bias", "mean", "free_energy", "grad_mean", "grad_free", "dq", "dk", "dv"}
INT32 = {"first", "end", "row_blocks", "kept", "wide"}
INTEGERS = {"queries", "keys", "blocks", "heads", "groups", "stride", "batch_stride"}
INTEGERS |= {"bias_batch", "bias_head", "bias_row", "bias_column", "rows_of_head", "interval_stride", "order_stride"}
INTEGERS |= {"splits", "k_batch", "k_time", "k_head", "v_batch", "v_time", "v_head"}
FLOATS = {"scale_log2", "over_scale", "scale", "proven"}


def _type(name: str, formed: bool) -> str:
    if name in INTEGERS | FLOATS:
        return "i32" if name in INTEGERS else "fp32"
    if name in ("values", "g"):
        return "*fp16" if not formed else "*bf16" if name == "values" else "*fp32"
    return "*bf16" if name in BFLOAT16 else "*i32" if name in INT32 else "*fp32"


def _compiled(kernel, constants: dict, blocks: Blocks) -> dict[str, int]:
    options = blocks.launch()
    tile = {name: options.pop(name) for name in ("BLOCK_Q", "BLOCK_K")}
    return compiled(
        kernel,
        {name: _type(name, constants.get("FORMED", False)) for name in kernel.arg_names},
        constants | tile,
        options,
    )


def cases(widths: tuple[int, ...]) -> Iterator[tuple[str, int, str, object, dict, Blocks]]:
    """(name, width, "bias" or "", kernel, constants, blocks) of the plain kernel and of everything that is shipped."""
    stored = {
        "read_forward": (softmax_forward.read_forward, softmax_blocks.FORWARD),
        "key_gradients": (softmax_backward.key_gradients, softmax_blocks.KEY_GRADIENTS),
        "query_gradients": (softmax_backward.query_gradients, softmax_blocks.QUERY_GRADIENTS),
    }
    formed = {
        "wide read_forward": (softmax_forward.read_forward, softmax_blocks.WIDE_FORWARD),
        "wide key_gradients": (softmax_backward.key_gradients, softmax_blocks.WIDE_KEY_GRADIENTS),
        "wide query_gradients": (softmax_backward.query_gradients, softmax_blocks.WIDE_QUERY_GRADIENTS),
    }
    passes = (softmax_values.value_bounds, softmax_values.values_and_exponentials, softmax_values.block_shifts)
    rows = Blocks(0, ROWS, 4, 3)
    for width in widths:
        half = width // 2
        sizes = {"DK": width, "D": width, "DV": half, "HALF": half, "WIDTH": half, "PADDED": half, "BLOCK": ROWS}
        yield "plain flash", width, "", plain_forward, sizes, blocks_for(softmax_blocks.FORWARD, width, True, False)
        for reads, how in (
            (stored, {"FORMED": False, "PRECISION": "ieee"}),
            (formed, {"FORMED": True, "PRECISION": "tf32"}),
        ):
            for bias in ("", "bias"):
                constants = sizes | how | {"ds": None} | ({} if bias else {"bias": None})
                for name, (kernel, table) in reads.items():
                    yield name, width, bias, kernel, constants, blocks_for(table, width, True, bool(bias))
            name = "wide row_gradients" if how["FORMED"] else "row_gradients"
            yield name, width, "", softmax_backward.row_gradients, sizes | how, rows
        for kernel in passes:
            yield kernel.__name__, width, "", kernel, sizes, rows
        for queries in DECODE_ROWS:
            tile = softmax_decode.launch(queries, width)
            decode = sizes | {"bias": None, "order": None, "ROWS": queries, "BLOCK": tile["BLOCK"]}
            name = f"read_split, {queries} rows"
            yield name, width, "", kernels.read_split, decode, Blocks(0, *tile.values())
        merge = sizes | {"ROWS": 1, "SPLITS": DECODE_SPLITS}
        yield "merge_splits", width, "", kernels.merge_splits, merge, Blocks(0, DECODE_SPLITS, 4, 3)


def measured(name: str, width: int, bias: str, kernel, constants: dict, blocks: Blocks) -> dict:
    return {"kernel": name, "width": width, "bias": bias, "blocks": blocks, **_compiled(kernel, constants, blocks)}


if __name__ == "__main__":
    results = [measured(*case) for case in cases(WIDTHS)]
    head = ("registers", "spill", "shared", "HGMMA", "HMMA", "MUFU.EX2")
    rows = []
    for result in results:
        queries, keys, warps, stages, _ = result["blocks"]
        tile = f"{queries} x {keys}, {warps} warps, {stages} stages" if queries else f"{keys} rows, {warps} warps"
        name = f"{result['kernel']}, {result['bias']}".rstrip(", ")
        rows.append({"kernel": name, "width": str(result["width"]), "tile": tile})
        rows[-1] |= {name: str(result[name]) for name in head}
    note = (
        f"bfloat16, compiled ahead of time for sm_90 by Triton {triton.__version__}; nothing here ran on a GPU.\n\n"
        "Width: of q and k, and of [v | E]; plain flash attention of this width has the same weights and products. "
        f"Registers per thread; spill: bytes of stack per thread; shared: bytes of {SHARED_MEMORY}; then matrix and "
        "exponential instructions in the whole kernel (its loop over whole blocks and its loop over edges). Wide: for "
        "heads whose E one shift cannot hold in float16, in tf32. read_split and merge_splits decode."
    )
    save("docs/results/kernels_aot", "Triton kernels on Hopper, ahead of time", results, rows, note)
