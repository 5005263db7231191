"""Triton kernels compiled for an H100 or H200 (sm_90) without a GPU, and what the compiler made of them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_MEMORY = 227 * 1024


def compiled(kernel, types: dict[str, str], constants: dict, options: dict) -> dict[str, int]:
    """Registers, spills in bytes, shared memory in bytes, and counts of the instructions that cost most.

    types: of the arguments that are no constants, in Triton's names ("*bf16", "i32"). options: num_warps and so on.
    """
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
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
