"""What torch's FlopCounterMode counts of the reads, against products written out that it counts itself."""

import pytest
import torch
from operations import counted

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.functional import keyed_scan_read, softmax_read

BATCH, QUERIES, TIME, HEADS, KEY_HEADS, WIDTH, CHANNELS = 2, 5, 13, 4, 2, 3, 7


def attention(q, k, values):
    return ((q @ k.mT).softmax(-1) @ values,)


def recurrence(q, k, values):
    state, read = q.new_zeros(len(q), q.shape[2], values.shape[2]), []
    for t in range(q.shape[1]):
        state = state + k[:, t, :, None] @ values[:, t, None]
        read.append(q[:, t, None] @ state)
    return read


@pytest.mark.parametrize("free", [True, False])
def test_a_softmax_read_counts_as_attention_over_values_and_their_exponentials(free):
    q = torch.randn(BATCH, QUERIES, HEADS, WIDTH)
    k, v = torch.randn(BATCH, TIME, KEY_HEADS, WIDTH), torch.randn(BATCH, TIME, KEY_HEADS, CHANNELS)
    beta = torch.ones(KEY_HEADS, CHANNELS) if free else None
    per_head = [torch.randn(BATCH * HEADS, *shape) for shape in ((QUERIES, WIDTH), (TIME, WIDTH))]
    forward, backward = counted(attention, *per_head, torch.randn(BATCH * HEADS, TIME, CHANNELS * (1 + free)))
    scores, _ = counted(lambda q, k: [q @ k.mT], *per_head)
    read = lambda *x: softmax_read(*x, causal=False)  # noqa: E731
    assert counted(read, q, k, v, beta) == (forward, backward + scores)


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("free", [True, False])
def test_linear_attention_counts_as_its_recurrence(free, decays):
    q, k = torch.rand(2, BATCH, TIME, HEADS, WIDTH)
    v, log_decay = torch.randn(BATCH, TIME, HEADS, CHANNELS), -torch.rand(BATCH, TIME, HEADS, WIDTH)
    beta = torch.ones(HEADS, CHANNELS) if free else None
    widths = WIDTH, WIDTH, CHANNELS * (1 + free)
    written_out = counted(recurrence, *(torch.randn(BATCH * HEADS, TIME, width) for width in widths))
    assert counted(keyed_scan_read, q, k, v, beta, log_decay if decays else None) == written_out


@pytest.mark.parametrize("prior", ["softmax", "gla"])
def test_a_layer_without_memory_counts_as_one_with(prior):
    """On the device "meta", as trainers measure a model before they build it."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type=prior))
    found = counted(lambda x: [layer(x)], torch.zeros(2, 7, 16))
    layer.to("meta")
    assert counted(lambda x: [layer(x)], torch.zeros(2, 7, 16, device="meta")) == found
