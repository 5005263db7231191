"""What PyTorch launched, waited for and kept on the card that is not there (docs/card.md)."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.attention
from ahead_of_time import usage
from torch import Tensor

from fem.ops.channel_scan import channel_kernels
from fem.ops.common import joined, part_kernels, row_maps, token_kernels
from fem.ops.common.launch import Launched
from fem.ops.conditioner import conditioner_kernels as of_conditioner
from fem.ops.linear_attention import doubtful_kernels, feature_kernels, linear_token, scan_kernels
from fem.ops.softmax import card_attention as of_attention
from fem.ops.softmax import one_query_kernels
from fem.ops.softmax.fused import doubt_kernels as doubt
from fem.ops.softmax.fused import elementwise_kernels as of_softmax
from fem.ops.softmax.fused import fused_attention as attention
from fem.ops.ssm import mix_token, ssm_kernels, ssm_numbers_kernels

SM = int(os.environ.get("FAKE_SM", "90"))
KERNELS = (of_softmax, doubt, of_conditioner, one_query_kernels, token_kernels, scan_kernels, doubtful_kernels)
KERNELS += (feature_kernels, linear_token, channel_kernels, ssm_kernels, ssm_numbers_kernels, mix_token, part_kernels)
KERNELS += (joined, row_maps)

_loaded: list[tuple[str, bytes]] = []  # Triton's kernels, compiled; a launch names its own by its place here, from 1 on
watchers: list[Callable] = []  # are told of every launch: name, binary, warps, grid and arguments
_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.card_get.restype = ctypes.c_char_p


class Events(list):
    """What happened, in words: "kernel ..", "matmul ..", "triton ..", "copy ..", "fill", "wait ..", "graph .."."""

    @property
    def launches(self) -> int:
        """All that the card is given to do: kernels, products, copies within the card and fills."""
        work = ("kernel", "matmul", "triton", "fill", "graph", "copy card to card")
        return sum(event.startswith(work) for event in self)

    @property
    def waits(self) -> int:
        """How often the host waits for the card. A copy to pageable memory is followed by such a wait."""
        return sum("wait" in event for event in self)

    @property
    def awkward(self) -> list[str]:
        """Products of 16-bit numbers, an operand of which has rows of no multiple of 8, or starts off 16 bytes."""
        found = []
        for event in self:
            if event.startswith("matmul"):
                _, name, *numbers = event.split()
                operands = [tuple(map(int, numbers[at : at + 3])) for at in (0, 3, 6)]
                if any(bits == 16 and (width % 8 or off) for bits, width, off in operands):
                    found.append(f"{name} with (bits, width, bytes off) {operands}")
        return found

    def summary(self, most: int = 40) -> str:
        return "\n".join(f"{count:5d} {what}" for what, count in Counter(map(_short, self)).most_common(most))


def _short(event: str) -> str:
    fused = re.search(r"(flash_\w+|fmha_\w+)<", event)
    names = re.findall(r"at::native::(?:\(anonymous namespace\)::)?(\w+)", event)
    return fused.group(1) if fused else "kernel " + "/".join(dict.fromkeys(names)) if names else event[:120]


@contextmanager
def record() -> Iterator[Events]:
    events = Events()
    _runtime.card_start()
    try:
        yield events
    finally:
        events.extend(_runtime.card_get(index).decode() for index in range(_runtime.card_stop()))


def kept(forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The output of a forward, and the bytes that are held for its backward, the output aside."""
    before = torch.cuda.memory_allocated()
    y = forward()
    return y, torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()


def registers(call: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes that it spills, of the library's Triton kernels that a call launches.

    ptxas optimises them here, as it does for a card. Of a kernel in several forms: the most.
    """
    kernels = {name: one for module in KERNELS for name, one in vars(module).items() if isinstance(one, Launched)}
    for kernel in kernels.values():
        kernel.codes.clear()
        kernel.fn.device_caches.clear()
    loaded = len(_loaded)
    setting = os.environ.pop("DISABLE_PTXAS_OPT", None)
    try:
        call()
    finally:
        os.environ |= {} if setting is None else {"DISABLE_PTXAS_OPT": setting}
    found: dict[str, tuple[int, int]] = {}
    for name, binary in _loaded[loaded:]:
        if name in kernels:
            found[name] = tuple(map(max, zip(usage(binary).values(), found.get(name, (0, 0)))))
    return found


def pose() -> None:
    """Make Triton believe in the card: it compiles by ptxas for it, with its limits, and launches nothing."""
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import autotuner, driver

    class Utilities:
        def load_binary(self, name, kernel, shared, device):
            _loaded.append((name, kernel))
            return 1, len(_loaded), 64, 0, 1024  # module, function, registers, spills, threads

        def get_device_properties(self, device):
            card = torch.cuda.get_device_properties(0)
            processors, shared = card.multi_processor_count, card.shared_memory_per_block_optin
            limits = {"max_shared_mem": shared, "max_num_regs": 65536, "warpSize": 32}
            unknown = dict.fromkeys(("sm_clock_rate", "mem_clock_rate", "mem_bus_width"), 1)
            return limits | {"multiprocessor_count": processors} | unknown

        def __getattr__(self, name):
            return lambda *arguments, **options: None

    class Launcher:
        def __init__(self, source, metadata):
            known = metadata if isinstance(metadata, dict) else metadata._asdict()
            self.name, self.warps = known["name"], known["num_warps"]

        def __call__(self, x, y, z, stream, function, *arguments):
            _runtime.card_event(f"triton {self.name}".encode())
            for watch in watchers:
                watch(self.name, _loaded[function - 1][1], self.warps, (x, y, z), arguments)

    class Driver:
        utils, launcher_cls = Utilities(), Launcher
        is_active = staticmethod(lambda: True)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", SM, 32))
        get_current_device = staticmethod(lambda: 0)
        set_current_device = staticmethod(lambda device: None)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        get_device_interface = staticmethod(lambda: torch.cuda)
        map_python_to_cpp_type = staticmethod(lambda kind: kind)
        get_benchmarker = staticmethod(lambda: lambda call, quantiles=None, **options: (call(), [1.0, 1.0, 1.0])[1])
        get_empty_cache_for_benchmark = staticmethod(lambda: torch.empty(1, device="cuda"))
        clear_cache = staticmethod(lambda cache: None)

    driver.set_active(Driver())
    nvidia = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = type(nvidia)(compiler=nvidia.compiler, driver=Driver)
    tuner = autotuner.Autotuner
    pruned, measured = tuner.prune_configs, tuner._bench

    def prune(self, *arguments):
        self.found = False
        return pruned(self, *arguments)

    def measure(self, *arguments, **options):
        """Nothing can be timed here: the first configuration that the card has room for is taken."""
        times = [float("inf")] * 3 if self.found else measured(self, *arguments, **options)
        self.found = self.found or times[0] < float("inf")
        return times

    tuner.prune_configs, tuner._bench = prune, measure
    pose_as_cudnn()
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def pose_as_cudnn() -> None:
    """Put flash attention in the place of cuDNN's, whose stub cannot be called: the calls of composed reads choose it
    themselves; the fused layer's, whose values may be wider than the keys, read empty values of the keys' width.
    """
    choose = torch.nn.attention.sdpa_kernel
    cudnn = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    attend, attend_backward = attention.kernel_attention, attention.kernel_attention_backward
    without = lambda order, **how: choose([one for one in order if one != cudnn], **how)  # noqa: E731
    as_wide = lambda x, y: x if x.shape[-1] == y.shape[-1] else x.new_empty(*x.shape[:-1], y.shape[-1])  # noqa: E731

    def forward(q, k, values, scale, causal, flash):
        out, lse = attend(q, k, as_wide(values, k), scale, causal, True)
        return as_wide(out, values), lse

    def backward(grad, q, k, values, out, lse, scale, causal, flash):
        narrow = (as_wide(x, k) for x in (values, out))
        d_q, d_k, d_values = attend_backward(as_wide(grad, k), q, k, *narrow, lse, scale, causal, True)
        return [d_q, d_k, as_wide(d_values, values)]

    of_attention.sdpa_kernel = without
    attention.kernel_attention, attention.kernel_attention_backward = forward, backward
