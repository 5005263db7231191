"""Compiles kernels for a GPU that is not there, exactly as they would be launched on it; nothing runs.

A replacement for Triton's driver names the GPU. The launchers then run on CPU tensors, and each launch goes through
Triton's own JIT, which finds the arguments' types, which are None and which are divisible by 16 as on a GPU, and stops
before the kernel would start. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import torch

SPILL = 256  # bytes per thread that a kernel may spill from registers to memory


class Card(NamedTuple):
    """A kind of GPU: Triton's backend and architecture, threads per warp, bytes of shared memory per program."""

    backend: str
    architecture: int | str
    warp: int
    shared: int

    def example(self) -> str:
        return EXAMPLES[str(self.architecture)]


EXAMPLES = {"80": "A100", "89": "L4, RTX 40", "90": "H100, H200", "120": "RTX 50", "gfx942": "MI300"}
CARDS = {
    "sm_80": Card("cuda", 80, 32, 163 * 1024),
    "sm_89": Card("cuda", 89, 32, 99 * 1024),
    "sm_90": Card("cuda", 90, 32, 227 * 1024),
    "sm_120": Card("cuda", 120, 32, 99 * 1024),
    "gfx942": Card("hip", "gfx942", 64, 64 * 1024),
}


class Compiled(NamedTuple):
    """A compiled launch, or the error. spill: bytes per thread; shared: bytes of shared memory per program."""

    case: str
    kernel: str
    card: str
    error: str | None = None
    registers: int | None = None
    spill: int | None = None
    shared: int | None = None

    def fault(self) -> str | None:
        """Why the kernel cannot be used on the card; None where it can."""
        if self.error is not None:
            return self.error
        if self.shared > CARDS[self.card].shared:
            return f"{self.shared} bytes of shared memory of {CARDS[self.card].shared}"
        return f"{self.spill} bytes spilt" if self.spill > SPILL else None


@contextmanager
def compiled_for(name: str) -> Iterator[list[Compiled]]:
    """Launches in this block compile for the card and add a record to the list, with an empty `case`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler; unset it to compile kernels.")
    card = CARDS[name]
    target = GPUTarget(card.backend, card.architecture, card.warp)
    found: list[Compiled] = []

    class Driver:
        """What the JIT asks of a driver. Each card has another device number, by which the JIT caches kernels."""

        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: list(CARDS).index(name))
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        is_active = staticmethod(lambda: True)

    def launch(kernel, grid):
        def compile_alone(*arguments, **constants):
            try:
                built = kernel.run(*arguments, grid=grid, warmup=True, **constants)
            except Exception as error:
                found.append(Compiled("", kernel.__name__, name, _causes(error)))
            else:
                found.append(Compiled("", kernel.__name__, name, None, *_resources(built)))

        return compile_alone

    empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    with ExitStack() as stack:
        for base in (jit.KernelInterface, jit.JITFunction):
            stack.enter_context(mock.patch.object(base, "__getitem__", launch))
        # no kernel writes these tensors, and launchers may branch on what they read from them
        for owner, attribute, make in ((torch.Tensor, "new_empty", empty), (torch, "empty_like", empty_like)):
            zeros = lambda *args, make=make, **options: make(*args, **options).zero_()  # noqa: E731
            stack.enter_context(mock.patch.object(owner, attribute, zeros))
        driver.set_active(Driver())
        yield found


def _causes(error: BaseException) -> str:
    """The last line of an error and of what caused it."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}")
        error = error.__cause__
    return "; ".join(lines)


def _resources(kernel) -> tuple[int, int, int]:
    """Registers per thread, bytes spilt per thread, and bytes of shared memory per program."""
    if "cubin" in kernel.asm:
        registers, spill = re.search(r"REG:(\d+) STACK:(\d+)", _usage(kernel.asm["cubin"])).groups()
    else:
        registers, spill = (
            re.search(rf"\.{entry}:\s+(\d+)", kernel.asm["amdgcn"]).group(1)
            for entry in ("vgpr_count", "private_segment_fixed_size")
        )
    return int(registers), int(spill), kernel.metadata.shared


def _usage(cubin: bytes) -> str:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
