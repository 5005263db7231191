"""The speed and memory of a training: floating-point operations, the GPU's peak, peak memory."""

from __future__ import annotations

import resource
import sys

import torch
from transformers import PreTrainedModel

from fem.models import FEMConfig
from fem.models.engines.obstacles import attends

# Peak of dense bfloat16 matrix products in operations a second, by a part of the GPU's name (vendors' data sheets).
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def flops_per_token(model: PreTrainedModel, context: int) -> int:
    """`training_flops` of a model, whose embeddings multiply a token only where they are tied to the head.

    Of another library's model the weights alone are counted.
    """
    config = model.config
    weights = model.num_parameters() - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    return training_flops(weights, config, context) if isinstance(config, FEMConfig) else 6 * weights


def training_flops(weights: int, config: FEMConfig, context: int) -> int:
    """6 N + 6 sum_softmax s (qk_dim + n_head read_width): weights and causal scores, forward and backward.

    N: the parameters that multiply a token. In a softmax layer a query reads s keys and values on average, T / 2 or,
    of a window of w tokens, w - w^2 / 2 T; [v | exp(beta v)] unless values are split. Scans and gates are left out.
    """
    scores = 0.0
    for mixer in filter(attends, config.mixer_configs()):
        seen = min(mixer.window or context, context)
        scores += (seen - seen**2 / (2 * context)) * (mixer.qk_dim + mixer.n_head * mixer.read_width)
    return 6 * weights + round(6 * scores)


def peak_flops() -> float | None:
    """Peak operations per second of this process's GPU; None where there is none, or PEAKS does not list it."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory() -> int:
    """The most bytes that this process has held: GPU memory, or resident memory where there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
