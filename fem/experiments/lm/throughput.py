"""How fast and how large a training is: floating-point operations, the share of the GPU's peak, memory."""

from __future__ import annotations

import resource
import sys

import torch

from fem.models import FEMForCausalLM

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


def flops_per_token(model: FEMForCausalLM, context: int) -> int:
    """6 N + 3 T sum_softmax (qk_dim + 2 fem_dim): weights and causal scores, forward and backward.

    N: the parameters that multiply a token, so embeddings only where they are the head as well. A softmax layer
    reads T / 2 keys a query, [v | exp(beta v)] behind them; scans and gates are left out.
    """
    config = model.config
    weights = model.num_parameters() - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    softmax = [mixer for mixer in config.mixer_configs() if mixer.prior_type == "softmax"]
    return 6 * weights + 3 * context * sum(m.qk_dim + (1 + m.use_lse) * m.fem_dim for m in softmax)


def peak_flops() -> float | None:
    """Operations a second of this process's GPU at its best; None where nobody has entered it, or there is none."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def peak_memory() -> int:
    """Most bytes this process has held: of its GPU, or of the machine where it has none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
