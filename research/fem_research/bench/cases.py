"""The comparisons that each profile measures, and the paper's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive, require_some_of
from fem_research.common.mixers import OTHERS


class Cost(NamedTuple):
    forward: float  # seconds
    train: float
    forward_gb: float | None = None  # at the peak
    train_gb: float | None = None
    forward_mflop: float | None = None  # a token
    train_mflop: float | None = None


BASELINE = "attention"  # torch's own layer
OWN_LAYER = "attention, FEM's layer"  # without any of its parts

TABLE7 = {  # 12 layers of width 768, 12 heads, T 1024, batch 8, FP32
    "RWKV7": Cost(0.0832, 0.2367, 11.08, 11.48, 179.35, 538.09),
    "LinAttn": Cost(0.0652, 0.1368, 6.01, 6.16, 169.94, 509.75),
    "HGRN2": Cost(0.0680, 0.1481, 6.66, 6.94, 169.89, 509.65),
    "PaTHAttention": Cost(0.0693, 0.2098, 5.62, 5.82, 171.29, 513.84),
    "GatedSlotAttention": Cost(0.0765, 0.1901, 7.72, 8.08, 184.04, 552.11),
    "attention, plain": Cost(0.1306, 0.3334, 9.61, 10.34, 207.84, 623.41),
    "attention": Cost(0.0649, 0.1471, 4.89, 4.99, 169.89, 509.65),
    "attention+LTG": Cost(0.0693, 0.1615, 5.82, 5.92, 169.92, 509.75),
    "FEM": Cost(0.0732, 0.1853, 7.67, 7.77, 171.43, 514.19),
    "GLA": Cost(0.0824, 0.2213, 9.95, 10.17, 208.03, 623.90),
    "GLA+LTG": Cost(0.0875, 0.2344, 10.89, 11.08, 208.07, 624.02),
    "FEM-GLA": Cost(0.0934, 0.2566, 12.74, 12.93, 209.57, 628.46),
    "Mamba/paper": Cost(0.0606, 0.1249, 4.60, 4.70, 156.33, 468.97),
    "Mamba+LTG/paper": Cost(0.0586, 0.1438, 6.77, 6.87, 149.29, 447.83),
    "FEM-Mamba/paper": Cost(0.0647, 0.1831, 7.97, 8.07, 150.44, 451.25),
}

TABLE5 = {  # 8 layers of width 512, 4 heads, T 2048, batch 4; the paper prints the parts that a row leaves out
    "GatedDeltaNet": Cost(0.016, 0.042),
    "DeltaNet": Cost(0.014, 0.036),
    "HGRN2": Cost(0.009, 0.024),
    "RWKV6": Cost(0.014, 0.037),
    "RWKV7": Cost(0.017, 0.050),
    "DiffTrans": Cost(0.018, 0.041),
    OWN_LAYER: Cost(0.012, 0.027),
    "attention+C": Cost(0.015, 0.033),
    "attention+CL": Cost(0.016, 0.035),
    "attention+CLT": Cost(0.017, 0.040),
    "FEM": Cost(0.017, 0.041),
}


PARTS = ("read", "layer", "single", "heads", "gpt2", "table5", "decode", "served", "context")
BY_TOKEN = ("decode", "served")  # parts that time generation
READS = (BASELINE, "attention+L", "attention+L, plain")
LAYERS = (
    *(BASELINE, "attention+LTG", "FEM", "attention+LTG/r32", "FEM/r32", "attention+LTG/r32/s.5", "FEM/r32/s.5"),
    *("attention+LTG, plain", "GLA+LTG", "FEM-GLA"),
)
SINGLE = (BASELINE, "attention+L", "attention+C", "attention+G/r32", "attention+CG/r32", "GLA+LTG/r32")
HEADS = (
    *(BASELINE, "attention/h16", "attention/h64", "attention/h128", "attention+C/h64"),
    *("attention+L", "attention+LTG/r16/s.5", "attention+LTG/r16", "FEM/r16"),
)
DECODES = (BASELINE, "attention+LTG", "FEM", "attention+LTG/r32", "attention+LTG/r32/s.5", "FEM-GLA")
SERVED = (BASELINE, "attention+LTG")
CONTEXTS = (BASELINE, "FEM", "FEM-GLA", "FEM-Mamba/paper", "FEM-AFT/paper")
EAGER = (BASELINE, "attention+LTG", "attention+LTG/r32", "FEM/r32", "attention+LTG/r32/s.5")
BY_COMPILER = tuple(f"{name}, compiled" for name in (*EAGER, "FEM/r32/s.5"))
BASELINES_AT_LENGTH = ("GLA (fla)", "Mamba (mamba-ssm)")


@dataclass(frozen=True)
class Size:
    """One mixer's shape."""

    batch: int
    time: int
    width: int
    heads: int


@dataclass(frozen=True)
class Case:
    """One comparison: mixers that run in turn on the same input. layers: blocks of the model; 0: the mixer alone."""

    part: str
    size: Size
    dtype: str
    mixers: tuple[str, ...]
    layers: int = 0

    @property
    def name(self) -> str:
        size = self.size
        return f"{self.part}, T {size.time:,}, batch {size.batch}, width {size.width}, {self.dtype}"


DTYPES = ("float32", "bfloat16")


def _laptop() -> list[Case]:
    return [
        *(Case("read", Size(1, time, 512, 8), dtype, READS) for dtype in DTYPES for time in (512, 2048)),
        *(Case("layer", Size(2, time, 512, 8), dtype, LAYERS) for dtype in DTYPES[:1] for time in (512, 2048)),
        *(Case("single", Size(2, time, 512, 8), "float32", SINGLE) for time in (512, 2048)),
        *(Case("heads", Size(max(1, 512 // time), time, 256, 4), "float32", HEADS) for time in (32, 512, 2048)),
        Case("gpt2", Size(1, 512, 768, 12), "float32", tuple(TABLE7), layers=1),
        Case("table5", Size(1, 1024, 512, 4), "float32", (BASELINE, *TABLE5), layers=2),
        *(Case("decode", Size(1, time, 1024, 16), "float32", DECODES) for time in (1024, 4096, 16384)),
        *(Case("served", Size(1, time, 1024, 16), "float32", SERVED) for time in (1024, 4096, 16384)),
        *(Case("context", Size(1, time, 256, 4), "float32", CONTEXTS) for time in (1024, 2048, 4096, 8192)),
    ]


def _gpu() -> list[Case]:
    """Softmax attention and FEM on it, in four minutes on an H100: scans tune their kernels for minutes."""
    return [
        Case("layer", Size(8, 2048, 1024, 16), "bfloat16", BY_COMPILER),
        Case("gpt2", Size(8, 1024, 768, 12), "bfloat16", BY_COMPILER[:4], layers=12),
        Case("layer", Size(2, 8192, 1024, 16), "bfloat16", BY_COMPILER[:5]),
        Case("layer", Size(8, 2048, 1024, 16), "bfloat16", EAGER),
        *(Case("read", Size(2, time, 1024, 16), "bfloat16", READS[:2]) for time in (2048, 8192, 32768)),
        Case("decode", Size(1, 4096, 1024, 16), "bfloat16", (BASELINE, "attention+LTG", "attention+LTG/r32")),
    ]


def _paper() -> list[Case]:
    cases = []
    for dtype in DTYPES:
        for time in (2048, 8192, 32768):
            cases += [Case("read", Size(1, time, 1024, heads), dtype, READS) for heads in (16, 8)]
        cases += [Case("layer", Size(8, time, 1024, 16), dtype, LAYERS + OTHERS) for time in (1024, 4096)]
        cases += [Case("single", Size(8, time, 1024, 16), dtype, SINGLE) for time in (1024, 4096)]
        cases.append(Case("gpt2", Size(8, 1024, 768, 12), dtype, tuple(TABLE7), layers=12))
        cases.append(Case("table5", Size(4, 2048, 512, 4), dtype, (BASELINE, *TABLE5), layers=8))
    for time in (1024, 4096, 16384, 65536):
        cases.append(Case("decode", Size(1, time, 1024, 16), "bfloat16", DECODES))
        cases.append(Case("served", Size(1, time, 1024, 16), "bfloat16", SERVED))
    for time in (2048, 8192, 32768, 131072):
        cases.append(Case("context", Size(1, time, 1024, 16), "bfloat16", CONTEXTS + BASELINES_AT_LENGTH))
    return cases


PROFILES = {"laptop": _laptop(), "gpu": _gpu(), "paper": _paper()}


@dataclass(frozen=True, kw_only=True)
class BenchRecipe:
    """The parts to measure, and the time for each."""

    profile: str = option("laptop", "Sizes: laptop, gpu (minutes on one) or paper (hours on one).")
    parts: str = option(",".join(PARTS), "Parts, with commas between them.")
    seconds: float = option(4.0, "Seconds to measure a case's train steps; a third of that more for forward passes.")
    threads: int = option(1, "CPU threads.")
    seed: int = option(0, "Seed of weights and inputs.")

    def __post_init__(self):
        require_one_of("profile", self.profile, PROFILES)
        require_some_of("parts", self.part_names, PARTS)
        require_positive(self, "seconds", "threads")
        require_not_negative(self, "seed")
        if not self.cases():
            has = ", ".join({case.part: None for case in PROFILES[self.profile]})
            raise ValueError(f"--parts: the profile {self.profile!r} has {has}, got {self.parts!r}.")

    @property
    def part_names(self) -> list[str]:
        return listed(self.parts)

    def cases(self) -> list[Case]:
        return [case for case in PROFILES[self.profile] if case.part in self.part_names]
