"""`channel_scan_read` alone: weights per value channel. What it shares with `ssm_read` is in test_recurrences.py."""

from functools import partial

import pytest
import torch
from scan_reads import compare, gradients_of, relative, scan_call

from fem.functional import channel_scan_read
from fem.ops.channel_scan import channel_scan_read as channel_scan
from fem.ops.common.scan import ScanCall


@pytest.mark.parametrize("kind", ["aft", "aft with decay"])
@pytest.mark.parametrize("size", [30.0, 100.0])
def test_log_weights_of_any_size_keep_mean_and_gradients_exact(kind, size):
    inputs = scan_call(kind, 43, batch=1)
    compare(inputs.set(log_weight=torch.randn_like(inputs.arguments["v"]) * size))


def test_log_weights_around_a_hundred_keep_four_thousand_tokens_exact():
    inputs = scan_call("aft", 4096, batch=1)
    inputs = inputs.set(log_weight=inputs.arguments["log_weight"] + 100)
    exact = inputs.map(lambda x: x.double())
    for got, wanted in zip(inputs.read(), exact.read()):
        assert relative(got, wanted) < 1e-5


def test_decays_that_sum_to_a_thousand_are_exact():
    inputs = scan_call("aft with decay", 47, batch=1)
    compare(inputs.set(log_decay=-torch.rand_like(inputs.arguments["v"]) * 2000 / 47))


def test_documents_may_begin_by_a_decay_of_minus_infinity():
    inputs = scan_call("aft with decay", 20)
    decay = inputs.arguments["log_decay"].clone()
    decay[:, 12] = -torch.inf
    ids = (torch.arange(20) >= 12).long().expand(2, -1)
    for got, wanted in zip(inputs.set(log_decay=decay).read(), inputs.read(segment_ids=ids)):
        assert (got == wanted).all()


def test_tokens_of_no_weight_are_passed_over():
    inputs = scan_call("aft", 15)
    weight = inputs.arguments["log_weight"].clone()
    weight[:, :3] = weight[:, 7] = -torch.inf
    mine = inputs.set(log_weight=weight).leaves()
    read = mine.read()
    kept = [3, 4, 5, 6, *range(8, 15)]
    for got, wanted in zip(read, inputs.at(kept).read()):
        assert (got[:, :3] == 0).all()
        torch.testing.assert_close(got[:, kept], wanted)
    for gradient in gradients_of(mine, read, [torch.ones_like(part) for part in read]).values():
        assert gradient.isfinite().all()


def test_aft_without_weights_is_the_running_average():
    v = torch.randn(2, 40, 2, 3)
    mean = channel_scan_read(None, v, None).mean
    torch.testing.assert_close(mean, v.cumsum(1) / torch.arange(1, 41).view(40, 1, 1))


def test_steady_decays_forget_at_their_rate():
    v = torch.zeros(1, 60, 1, 1)
    v[:, 0] = 1.0
    mean = channel_scan_read(None, v, None, torch.full_like(v, -0.5), normalize=False).mean
    torch.testing.assert_close(mean.flatten(), (-0.5 * torch.arange(60.0)).exp())


def test_unnormalised_reads_are_the_sums_themselves():
    inputs = scan_call("aft with decay", 30)
    x, v, beta, a = (inputs.arguments[name].double() for name in ("log_weight", "v", "beta", "log_decay"))
    mean, free_energy = inputs.read(normalize=False)
    s, energy = torch.zeros(2, *v[:, 0].shape, dtype=torch.float64)
    for t in range(30):
        s = a[:, t].exp() * s + x[:, t].exp() * v[:, t]
        energy = a[:, t].exp() * energy + (x[:, t] + beta * v[:, t]).exp()
        assert relative(mean[:, t], s) < 1e-5
        assert relative(free_energy[:, t], energy.log() / beta) < 1e-5


def test_the_total_weight_comes_with_the_terms():
    inputs = scan_call("aft with decay", 12)
    x, v, beta, a = inputs.tensors()
    one_way = partial(channel_scan._channel_one_way, kernels=False)
    terms, state = ScanCall().both_ways(one_way, (x, a, v, v), beta)
    x, a = (inputs.arguments[name].double() for name in ("log_weight", "log_decay"))
    total = torch.full_like(x[:, 0], -torch.inf)
    for t in range(12):
        total = torch.logaddexp(total + a[:, t], x[:, t])
        assert relative(terms.log_weight[:, t], total) < 1e-6
    assert relative(state["log_weight"], total) < 1e-6
    torch.testing.assert_close(state["mean"], terms.mean[:, -1])
