"""Triton's kernels compiled for a card that is not there, by the ptxas that Triton brings."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fem.ops.common.launch import OPTIONS


def compiled(kernel, types: dict[str, str], constants: dict, warps: int, capability: int = 90) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills. types: of arguments, "i32" where none is given.

    Pointers are multiples of 16 bytes, as PyTorch allocates them; other numbers are of any value.
    """
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [index for index, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        fn=kernel.fn,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps} | OPTIONS)
    return usage(found.asm["cubin"])


def usage(binary: bytes) -> dict[str, int]:
    """Registers of a thread of a compiled kernel, and bytes that it spills."""
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said_of(binary, "cuobjdump", "-res-usage")).groups()
    return {"registers": int(registers), "spilled": int(stack)}


def said_of(binary: bytes, tool: str, option: str) -> str:
    """What a tool that Triton brings says of a compiled kernel."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return said.stdout + said.stderr
