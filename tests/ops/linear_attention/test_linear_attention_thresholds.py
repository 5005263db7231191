"""The limits inside the linear attention read, each at a point where another limit would be seen."""

import math

import pytest
import torch
from thresholds import flushed, one_spike_behind_two_tokens

from fem.functional import keyed_scan_read
from fem.ops.linear_attention.naive_linear_attention import naive_linear_attention_read


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("log_weight", [-15.0, -20.0, -23.5])
def test_nothing_is_lost_where_the_processor_flushes_small_numbers_to_zero(log_weight):
    """A certificate below e^-80 would take what is left of a flushed sum for the whole."""
    v, beta = one_spike_behind_two_tokens()
    v = v + 43.8  # around 0, or float64 would read it
    q, k = torch.ones(1, v.shape[1], 1, 4), torch.ones(1, v.shape[1], 1, 4)
    k[0, 0] = math.exp(log_weight)
    with flushed():
        found = keyed_scan_read(q, k, v, beta).free_energy
    wanted = naive_linear_attention_read(q, k, v, beta)
    assert (found - wanted.free_energy).abs().max() <= 1e-5 * v.abs().max()


@pytest.mark.parametrize("log_weight", [40.0, 85.0])
def test_a_state_of_great_weight_is_scaled_before_it_is_read(log_weight):
    """From e^88 on, what a query reads of such a state would be infinite in float32."""
    torch.manual_seed(0)
    q, k = (torch.rand(1, 12, 1, 4) + 0.5 for _ in range(2))
    v, beta, past, ahead = torch.randn(1, 12, 1, 8), torch.ones(1, 8), slice(0, 6), slice(6, None)
    k[:, past] *= math.exp(log_weight)
    q[:, past] *= math.exp(-log_weight)
    k[:, ahead] *= math.exp(-12.0)
    q[:, ahead] *= math.exp(12.0)
    wanted = naive_linear_attention_read(q, k, v, beta)
    _, state = keyed_scan_read(q[:, past], k[:, past], v[:, past], beta, return_state=True)
    found = keyed_scan_read(q[:, ahead], k[:, ahead], v[:, ahead], beta, initial_state=state)
    assert (found.free_energy - wanted.free_energy[:, ahead]).abs().max() <= 6e-7
    assert (found.mean - wanted.mean[:, ahead]).abs().max() <= 6e-7
