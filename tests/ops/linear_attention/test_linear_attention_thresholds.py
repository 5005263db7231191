"""The limits inside the linear attention read, each at a point where another limit would be seen."""

import math

import pytest
import torch
from thresholds import flushed, one_spike_behind_two_tokens

from fem.functional import keyed_scan_read
from fem.ops.linear_attention.naive import naive_linear_attention_read


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
    wanted, _ = naive_linear_attention_read(q, k, v, beta)
    assert (found - wanted.free_energy).abs().max() <= 1e-5 * v.abs().max()
