"""What the Triton kernels become on an H100 or H200 (sm_90), compiled without a GPU.

    python benchmarks/kernels_aot.py            # writes docs/results/kernels_aot.{json,md}
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator

import triton
from measure import save
from plain_flash import plain_forward
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fem.kernels import softmax_backward, softmax_blocks, softmax_forward, softmax_values
from fem.kernels.softmax_blocks import ROWS, Blocks

SHARED_MEMORY = 227 * 1024
WIDTHS = (64, 128, 256)  # of q and k, and of [v | E]

BFLOAT16 = {"q", "k", "v", "values", "g", "bias", "mean", "free_energy", "grad_mean", "grad_free", "dq", "dk", "dv"}
INT32 = {"first", "end", "row_blocks"}
INTEGERS = {"queries", "keys", "heads", "groups", "stride", "batch_stride"}
INTEGERS |= {"bias_batch", "bias_head", "bias_row", "bias_column"}
FLOATS = {"scale_log2", "over_scale", "scale", "proven"}


def _type(name: str) -> str:
    if name in INTEGERS | FLOATS:
        return "i32" if name in INTEGERS else "fp32"
    return "*bf16" if name in BFLOAT16 else "*i32" if name in INT32 else "*u8" if name == "keep" else "*fp32"


def compiled(kernel, constants: dict, blocks: Blocks) -> dict[str, int]:
    """Registers, spills in bytes, shared memory in bytes, and counts of the instructions that cost most."""
    names, options = kernel.arg_names, blocks.launch()
    constants = constants | {name: options.pop(name) for name in ("BLOCK_Q", "BLOCK_K")}
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else _type(name) for name in names}
    aligned = [index for index, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},  # as the JIT finds them
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage, listing = _tool("cuobjdump", "-res-usage", built.asm["cubin"]), _tool("nvdisasm", "-c", built.asm["cubin"])
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return {
        "registers": registers,
        "spill": stack,
        "shared": built.metadata.shared,
        "HGMMA": listing.count("HGMMA"),
        "HMMA": listing.count("HMMA"),
        "MUFU.EX2": listing.count("MUFU.EX2"),
    }


def _tool(name: str, option: str, cubin: bytes) -> str:
    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def cases(widths: tuple[int, ...], half_precision: bool = True) -> Iterator[tuple[str, int, str, object, dict, Blocks]]:
    """(name, width, what it sees, kernel, constants, blocks) of everything that is shipped, and the plain kernel."""
    once = Blocks(0, 0, 4, 3)
    for width in widths:
        half = width // 2
        sizes = {"DK": width, "D": width, "DV": half, "HALF": half, "ds": None}
        rows = {"WIDTH": half, "PADDED": half, "DV": half, "HALF": half, "BLOCK": ROWS}
        forward = softmax_blocks.forward_blocks(width, half_precision)
        yield "plain flash", width, "causal", plain_forward, sizes, forward
        for sees, absent in (("interval", {"keep": None, "bias": None}), ("interval, mask, bias", {})):
            of = sizes | absent
            yield "read_forward", width, sees, softmax_forward.read_forward, of, forward
            blocks = softmax_blocks.key_gradient_blocks(width, half_precision)
            yield "key_gradients", width, sees, softmax_backward.key_gradients, of, blocks
            blocks = softmax_blocks.query_gradient_blocks(width, half_precision)
            yield "query_gradients", width, sees, softmax_backward.query_gradients, of, blocks
        for kernel in (softmax_values.value_bounds, softmax_values.values_and_exponentials):
            yield kernel.__name__, width, "mask", kernel, rows, once
        yield "row_gradients", width, "", softmax_backward.row_gradients, rows, once


def measure(widths: tuple[int, ...], sees: tuple[str, ...] | None = None) -> list[dict]:
    return [
        {"kernel": name, "width": width, "sees": seen, "blocks": blocks, **compiled(kernel, constants, blocks)}
        for name, width, seen, kernel, constants, blocks in cases(widths)
        if sees is None or seen in sees
    ]


if __name__ == "__main__":
    results = measure(WIDTHS)
    head = ("kernel", "width", "sees", "registers", "spill", "shared", "HGMMA", "HMMA", "MUFU.EX2")
    rows = []
    for result in results:
        queries, keys, warps, stages, _ = result["blocks"]
        tile = f"{queries} x {keys}, {warps} warps, {stages} stages" if queries else f"{ROWS} rows, {warps} warps"
        rows.append({name: str(result[name]) for name in head[:3]} | {"tile": tile})
        rows[-1] |= {name: str(result[name]) for name in head[3:]}
    note = (
        f"bfloat16, compiled ahead of time for sm_90 by Triton {triton.__version__}; nothing here ran on a GPU. Width is "
        "that of q and k and of [v | E], so plain flash attention of this width has the same weights and products. "
        f"Registers per thread; spill: bytes of stack per thread; shared: bytes of {SHARED_MEMORY}; then matrix and "
        "exponential instructions in the whole kernel (its loop over whole blocks and its loop over edges)."
    )
    save("docs/results/kernels_aot", "Triton kernels on Hopper, ahead of time", results, rows, note)
