"""The authors' scripts, by their own names and values: what their readers paste must run."""

import pytest
import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig

QUICK_START = {
    "n_embd": 512, "n_head": 8, "prior_type": "softmax", "softmax_backend": "auto", "fem_ratio": 2 / 3,
    "p_t_to_fem_ratio": 2.0, "use_temperature": True, "use_lse": True, "use_outer_gate": True, "use_conv": True,
    "use_rope": True,
}  # fmt: skip
GUIDE = {
    "n_embd": 512, "n_head": 8, "fem_dim": None, "fem_ratio": 0.5, "qk_dim": None, "p_t_to_fem_ratio": 4.0,
    "softmax_backend": "auto", "dropout": 0.0, "causal": True, "bias": True, "use_temperature": True, "use_lse": True,
    "use_outer_gate": True, "value_logexp_cap": 40.0, "eps": 1e-6, "use_rope": True, "rope_theta": 10000.0,
    "use_conv": True, "conv_hidden": 64, "conv_norm_first": True, "conv_bidirectional": False, "ssm_rank": 16,
    "mamba_normalize": True,
}  # fmt: skip
MAMBA = {
    "n_embd": 512, "n_head": 8, "fem_dim": None, "fem_ratio": 0.5, "prior_type": "mamba", "dropout": 0.0,
    "causal": True, "bias": True, "use_temperature": True, "use_lse": True, "use_outer_gate": True, "use_rope": False,
    "use_conv": True, "conv_hidden": 64, "ssm_rank": 16, "mamba_normalize": True,
}  # fmt: skip
SCRIPTS = {
    "quick start": QUICK_START,
    "softmax": GUIDE | {"prior_type": "softmax"},
    "linear": GUIDE | {"prior_type": "linear"},
    "gla": GUIDE | {"prior_type": "gla"},
    "rnn_softmax": GUIDE | {"prior_type": "rnn_softmax", "fem_ratio": 1, "p_t_to_fem_ratio": 2.0},
    "mamba": MAMBA,
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_runs(script):
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(**SCRIPTS[script])).to(device="cpu", dtype=torch.float32).eval()
    x = torch.randn(2, 128, 512)
    for mask in (None, torch.rand(2, 128) > 0.1):
        with torch.no_grad():
            y = layer(x, attention_mask=mask)
        assert y.shape == (2, 128, 512)
        assert y.isfinite().all()
