"""What runs here, and why: under which transform of PyTorch a call is made, which implementation reads it, and whether
kernels may.

Our operators have a hand-written first derivative only. Where more is asked, of `torch.func`, forward mode or second
derivatives, a read takes a form of plain differentiable steps instead, which PyTorch can transform in any way, at more
time and memory.

Private parts of PyTorch: `_C._functorch.maybe_current_level` and `autograd.forward_ad._current_level`, of 2.11 to 2.15,
which may go when PyTorch says in public whether a transform runs; `compiler._is_exporting_flag`, of 2.11, which may go
when that is no longer supported.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fem.prior_table import BACKENDS

_PACKAGES = {"fla": "fla-core", "triton": "triton"}  # by module
_INSTALL = {"fla": "pip install fla-core einops", "triton": "pip install triton"}
_FOUND = {module: find_spec(module) is not None for module in _INSTALL}
MOST_PROGRAMS = 65535  # along the later axes of a CUDA grid
_MISSED: set[str] = set()  # which the user was told of
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of our own Triton kernels

# --- what PyTorch does with a call -----------------------------------------------------------------------------------


def exporting() -> bool:
    """Whether `torch.export` is tracing. In PyTorch 2.11 `is_exporting` is true under torch.compile, too."""
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)


def portable() -> bool:
    """Whether `torch.export` is tracing a graph that must not contain our custom operators.

    That is every graph for inference, under torch.no_grad(), and for ONNX. A graph exported with gradients keeps the
    operators, as they have gradients.
    """
    return exporting() and (not torch.is_grad_enabled() or torch.onnx.is_in_onnx_export())


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jvp, ...) is active, or a tensor carries a tangent.

    Without tensors: whether any could carry one.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    if forward_ad._current_level < 0:
        return False
    return not tensors or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether what is computed from the tensors has a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def guarded(condition: bool | torch.SymBool) -> bool:
    """A condition on sizes as a bool, also where they are a compiler's symbols; torch's attention takes no SymBool."""
    return True if condition else False  # noqa: SIM210  (bool(..) of a symbol stays one)


def has_values(x: Tensor) -> bool:
    """Whether the host can read values of x, though a GPU is waited for: not in graphs, under vmap or on meta."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return not x.is_meta


def may_look(x: Tensor) -> bool:
    """Whether values of x may be read on the host: on a CPU, where nothing waits, outside graphs and transforms."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not transformed(x)


# --- which implementation reads it -----------------------------------------------------------------------------------


def softmax_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that runs a softmax read on `device`: "plain", "sdpa" or "reference".

    "auto" takes torch's attention over [v | e], "sdpa", on a CPU, and on CUDA in all but float64, for which it has no
    fused kernel there; elsewhere the materialised form, "plain". Nothing is measured: equal calls run equal code.
    Raises ValueError on an unknown name, or one that cannot run on the device.
    """
    if backend == "triton":
        raise ValueError(
            "backend='triton' has kernels for scans, not for softmax attention, which torch's own fused kernels read: "
            "use backend='auto'."
        )
    _check(backend)
    if backend == "sdpa" and device.type not in ("cpu", "cuda"):
        raise ValueError(f"backend='sdpa' runs on CPU and CUDA tensors, got tensors on {device}; use backend='auto'.")
    if backend == "sdpa" and device.type == "cuda" and dtype == torch.float64:
        raise ValueError("backend='sdpa' has no fused kernel for float64 on CUDA; use backend='auto'.")
    if backend == "auto":
        return "sdpa" if device.type == "cpu" or (device.type == "cuda" and dtype != torch.float64) else "plain"
    return backend


def scan_backend(backend: str, device: torch.device, dtype: torch.dtype, module: str = "fla") -> str:
    """The backend of a scan on `device`: "plain", "triton" (the kernels of a package or our own) or "reference".

    module: "fla", flash-linear-attention, or "triton", by which a scan has a kernel of our own. "auto" takes kernels on
    CUDA in all but float64, where that is installed, and the plain form elsewhere.
    Raises ValueError on an unknown name, or one that scans do not have or that cannot run here.
    """
    _check(backend)
    if backend == "sdpa":
        raise ValueError("backend='sdpa' is attention, a scan has no such form; use backend='auto'.")
    has_kernels = dtype != torch.float64 and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    if backend == "triton" and not has_kernels:
        raise ValueError(f"backend='triton' needs CUDA and at most 32 bits, got {dtype} on {device}; use 'auto'.")
    if backend == "triton" and not _installed(module):
        needed = f"the kernels of {_PACKAGES[module]}, which is not installed: {_INSTALL[module]}"
        raise ValueError(f"backend='triton' needs {needed}.")
    if backend == "auto":
        return "triton" if device.type == "cuda" and has_kernels and _installed(module, warned=True) else "plain"
    return backend


def found(module: str) -> bool:
    """Whether "fla" or "triton" is installed."""
    return _FOUND[module]


def _installed(module: str, warned: bool = False) -> bool:
    if warned and not found(module) and module not in _MISSED:
        _MISSED.add(module)
        warnings.warn(f"scans run without fused kernels on this GPU, much slower: {_INSTALL[module]}.", stacklevel=4)
    return found(module)


def _check(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")


# --- what our own Triton kernels ask of tensors, devices and the modules in whose place they compute ------------------


@torch.compiler.assume_constant_result
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16. NVIDIA's cards do from sm_80 on: a T4 and a V100 do not."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


def by_kernels(*tensors: Tensor | None, differentiable: bool = False) -> bool:
    """Whether kernels may compute with the tensors: called eagerly on CUDA, at most 32 bits wide, and without a
    gradient, unless the kernels are differentiable."""
    if not (tensors[0].is_cuda and found("triton")) or torch.compiler.is_compiling():
        return False
    return tensors[0].numel() > 0 and plain_tensors(*tensors) and (differentiable or not differentiated(*tensors))


def plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether kernels may read the tensors themselves: no subclasses, such as a part of a tensor that devices share,
    at most 32 bits wide, and neither transformed nor exported."""
    given = [x for x in tensors if x is not None]
    fit = all(type(x) in (Tensor, nn.Parameter) and x.dtype in _DTYPES for x in given)
    return fit and not (exporting() or transformed(*given))


def on(device: torch.device) -> AbstractContextManager:
    """A context in which Triton, which launches on the current device, launches on this one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def keeps_graphs(device: torch.device) -> bool:
    """Whether an operator may keep the graph of another library's kernel for its backward: not in inference mode, nor
    where a CUDA graph may be made of it, which never is on the default stream."""
    if torch.is_inference_mode_enabled():
        return False
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def watched(module: nn.Module) -> bool:
    """Whether somebody's hook or other forward would not run if the module were not called."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or (not torch.compiler.is_compiling() and "forward" in vars(module))


def plain_map(module: nn.Module) -> bool:
    """Whether a linear map may be computed from its weights: no adapter, hook or sharded weight is in its place."""
    usual = type(module).forward is nn.Linear.forward and type(module.weight) in (nn.Parameter, Tensor)
    return usual and not watched(module)
