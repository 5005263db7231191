"""The paper's figures, measured on one L40S, under our names of the mixers."""

from __future__ import annotations

from typing import NamedTuple

# Table 7: 12 layers of width 768, 12 heads, T 1024, batch 8, FP32.


class Cost(NamedTuple):
    forward: float  # seconds
    train: float
    train_gb: float | None = None


TABLE7 = {
    "RWKV7": Cost(0.0832, 0.2367, 11.48),
    "LinAttn": Cost(0.0652, 0.1368, 6.16),
    "HGRN2": Cost(0.0680, 0.1481, 6.94),
    "PaTHAttention": Cost(0.0693, 0.2098, 5.82),
    "GatedSlotAttention": Cost(0.0765, 0.1901, 8.08),
    "attention, plain": Cost(0.1306, 0.3334, 10.34),
    "attention": Cost(0.0649, 0.1471, 4.99),
    "FEM-SM without C": Cost(0.0693, 0.1615, 5.92),
    "FEM-SM": Cost(0.0732, 0.1853, 7.77),
    "GLA": Cost(0.0824, 0.2213, 10.17),
    "FEM-GLA without C": Cost(0.0875, 0.2344, 11.08),
    "FEM-GLA": Cost(0.0934, 0.2566, 12.93),
    "Mamba": Cost(0.0606, 0.1249, 4.70),
    "FEM-Mamba without C": Cost(0.0586, 0.1438, 6.87),
    "FEM-Mamba": Cost(0.0647, 0.1831, 8.07),
}

# Table 5: 8 layers of width 512, 4 heads, T 2048, batch 4. The paper prints the parts that a row leaves out.

TABLE5 = {
    "GatedDeltaNet": Cost(0.016, 0.042),
    "DeltaNet": Cost(0.014, 0.036),
    "HGRN2": Cost(0.009, 0.024),
    "RWKV6": Cost(0.014, 0.037),
    "RWKV7": Cost(0.017, 0.050),
    "DiffTrans": Cost(0.018, 0.041),
    "FEM-SM -G,T,L,C": Cost(0.012, 0.027),
    "FEM-SM -G,T,L": Cost(0.015, 0.033),
    "FEM-SM -G,T": Cost(0.016, 0.035),
    "FEM-SM -G": Cost(0.017, 0.040),
    "FEM-SM": Cost(0.017, 0.041),
}
