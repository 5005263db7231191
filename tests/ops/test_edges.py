"""Reads at the edges of their range: the limits inside them, each at a point where another limit would be seen."""

import math

import pytest
import torch
from reads import KEYED, READS, SCANS, beside_float64, flushed, gradients_of, make, relative

from fem.functional import channel_scan_read, keyed_scan_read, softmax_read

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def column(*x):
    return torch.tensor(x).view(1, -1, 1, 1)


ONE, BETA = column(1.0, 1.0), torch.ones(1, 1)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("beta", [1e-10, 1e-17, 1e-38, 1e30, 1e37])
def test_the_smallest_beta_reads_the_mean_and_one_beyond_all_values_the_largest(name, beta):
    """In a scan a large beta v would reach the number that stands for the logarithm of nothing."""
    call = make(name, 40, beta=beta)
    largest = call.definition().free_energy
    for read in (call.read(), call.in_pieces(*[1] * 40)):
        assert relative(read.free_energy, read.mean if beta < 1 else largest) < 1e-6


@pytest.mark.parametrize("name", SCANS)
def test_scans_of_small_values_under_a_small_beta_lose_rounding_over_beta(name):
    call = make(name, 43, beta=1e-6)
    call = call.set(v=1e-6 * call.arguments["v"])
    assert (call.read().free_energy - call.definition().free_energy).abs().max() < 2e-14 / 1e-6


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize(("beta", "size"), [(1e-3, 1.0), (2.0, 100.0)])
def test_free_energies_keep_more_digits_than_the_rule_asks_for(name, beta, size):
    """Of a small beta; and beta's gradient beside log-weights of a hundred, which is a difference of large numbers."""
    call = make(name, 43, beta=beta, weights=min(size, 30.0) if name in KEYED else size)
    got, wanted, found, expected = beside_float64(call, torch.zeros_like, torch.ones_like)
    with torch.no_grad():
        alone = call.read()
    limit = 1e-6 if not call.softmax else 1e-6 * max(1.0, size)  # rounded scores of a hundred
    assert relative(got.free_energy, wanted.free_energy) < limit
    assert relative(alone.free_energy, wanted.free_energy) < limit
    if size > 1 and name not in KEYED and not call.softmax:
        for part, gradient in found.items():
            assert relative(gradient, expected[part]) < 5e-7 or gradient.abs().max() < 1e-9, part


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize("size", [1e-22, 1e22])
def test_features_whose_products_no_float32_holds_are_read_exactly(name, size):
    call = make(name, 80, decay=20.0)
    call = call.set(**{n: call.arguments[n] * size for n in "qk"})
    read, wanted, found, expected = beside_float64(call)
    assert all(relative(one, other) < 1e-5 for one, other in zip(read, wanted))
    for part, gradient in found.items():
        assert relative(gradient, expected[part]) < 1e-4, part


def test_features_of_float64_may_leave_float32():
    q, v = torch.full((1, 3, 1, 1), 1e50, dtype=torch.float64), column(1.0, 3.0, 8.0)
    read, state = keyed_scan_read(q, q, v, BETA, return_state=True)
    torch.testing.assert_close(read.mean, column(1.0, 2.0, 4.0))
    torch.testing.assert_close(keyed_scan_read(q, q, v, BETA, initial_state=state).mean, column(13 / 4, 16 / 5, 4.0))


@pytest.mark.parametrize("name", KEYED)
def test_a_spike_of_three_hundred_leaves_the_gradient_of_the_queries_exact(name):
    call = make(name, 80, batch=2, decay=1e-3)
    v = call.arguments["v"].clone()
    v[:, 20] = 300.0
    _, _, found, expected = beside_float64(call.set(v=v), torch.zeros_like)
    assert relative(found["q"], expected["q"]) < 1e-5


def test_a_light_key_of_an_earlier_chunk_has_its_gradient():
    """One key of the second chunk has all the weight that float32 can tell."""
    time = 129
    q, k, v = torch.ones(1, time, 1, 1), torch.full((1, time, 1, 1), 1e-9), torch.zeros(1, time, 1, 1)
    k[:, 64], v[0, :64, 0, 0] = 1.0, torch.linspace(-1, 1, 64)
    k.requires_grad_()
    reads = [keyed_scan_read(q, k, v, BETA, backend=name).free_energy[0, -1] for name in ("auto", "reference")]
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), k)[0] for x in reads), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [1.0, -1.0, -20.0])
@pytest.mark.parametrize("beta", [None, BETA, 30 * BETA])
def test_a_light_side_of_a_read_in_both_directions_has_its_gradient(place, value, beta):
    """The light token is before the heavy one or after it; the value of either is the larger one."""
    k, v = ONE.clone(), column(0.0, value).requires_grad_()
    k[0, place] = 1e-9 if value > -20 else 1.0
    k.requires_grad_()
    read = keyed_scan_read(ONE, k, v, beta, causal=False)
    found = (read.mean if beta is None else read.free_energy)[0, 0]
    p = (k / k.sum()).double()
    wanted = (p * v).sum() if beta is None else (p * (beta * v.double()).exp()).sum().log() / beta
    slopes = (torch.autograd.grad(x.sum(), (k, v)) for x in (found, wanted))
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("log_weight", [-15.0, -20.0, -23.5])
@pytest.mark.parametrize("read", ["softmax", "linear"])
def test_nothing_is_lost_where_the_processor_flushes_small_numbers_to_zero(read, log_weight):
    """The largest value, 0, is the last; the other rows see -60, then -87.6, which underflows beside it. A certificate
    below e^-80 would take what is left of a flushed sum for the whole."""
    v, beta = torch.full((1, 64, 1, 8), -87.6), torch.ones(1, 8)
    v[0, 0], v[0, -1] = -60.0, 0.0
    q, k = torch.ones(1, 64, 1, 16), torch.zeros(1, 64, 1, 16)
    k[0, 0] = log_weight / 4
    if read == "linear":  # around 0, or float64 would read it
        q, k, v = q[..., :4], k[..., :4].mul(4).exp(), v + 43.8
    call = (lambda **how: keyed_scan_read(q, k, v, beta, **how)) if read == "linear" else (
        lambda **how: softmax_read(q, k, v, beta, scale=0.25, **how))  # fmt: skip
    with flushed():
        found = call().free_energy
    assert (found - call(backend="reference").free_energy).abs().max() <= 1e-5 * v.abs().max()


@pytest.mark.parametrize("log_weight", [40.0, 85.0])
def test_a_state_of_great_weight_is_scaled_before_it_is_read(log_weight):
    """From e^88 on, what a query reads of such a state would be infinite in float32."""
    q, k = (torch.rand(1, 12, 1, 4) + 0.5 for _ in range(2))
    v, beta, past, ahead = torch.randn(1, 12, 1, 8), torch.ones(1, 8), slice(0, 6), slice(6, None)
    for part, size in ((past, log_weight), (ahead, -12.0)):
        k[:, part] *= math.exp(size)
        q[:, part] *= math.exp(-size)
    wanted = keyed_scan_read(q, k, v, beta, backend="reference")
    _, state = keyed_scan_read(q[:, past], k[:, past], v[:, past], beta, return_state=True)
    found = keyed_scan_read(q[:, ahead], k[:, ahead], v[:, ahead], beta, initial_state=state)
    assert all((one - other[:, ahead]).abs().max() <= 6e-7 for one, other in zip(found, wanted))


def test_the_mean_is_as_exact_without_a_free_energy_beside_it():
    k, v, decay = column(1.0, 0.0), column(5.0, 7.0), torch.full((1, 2, 1), -100.0)
    none = keyed_scan_read(ONE, k, v, BETA[:, :0], decay, free_values=v[..., :0])
    torch.testing.assert_close(none.mean, column(5.0, 5.0))


def test_documents_may_begin_by_a_decay_of_minus_infinity():
    call = make("aft with decay", 20)
    decay = call.arguments["log_decay"].clone()
    decay[:, 12] = -torch.inf
    documents = (torch.arange(20) >= 12).long()[None]
    assert all(map(torch.equal, call.set(log_decay=decay).read(), call.read(segment_ids=documents)))


def test_tokens_of_no_weight_are_passed_over():
    call = make("aft", 15)
    weight = call.arguments["log_weight"].clone()
    weight[:, :3] = weight[:, 7] = -torch.inf
    kept = [3, 4, 5, 6, *range(8, 15)]
    for got, wanted in zip(call.set(log_weight=weight).read(), call.at(kept).read()):
        assert not got[:, :3].any()
        torch.testing.assert_close(got[:, kept], wanted)


@pytest.mark.parametrize("how", ["both ways", "token by token"])
def test_a_document_without_weight_reads_nothing_of_another(how):
    v, weight, ids, state = torch.randn(1, 6, 1, 2), torch.randn(1, 6, 1, 2), torch.tensor([[0, 0, 0, 1, 1, 1]]), None
    weight[:, 3:] = -torch.inf
    if how == "both ways":
        read = channel_scan_read(weight, v, torch.ones(1, 2), causal=False, segment_ids=ids)
    for t in range(6 if how == "token by token" else 0):
        now = slice(t, t + 1)
        go_on = {"segment_ids": ids[:, now], "initial_state": state, "return_state": True}
        read, state = channel_scan_read(weight[:, now], v[:, now], torch.ones(1, 2), **go_on)
    assert not any(part[:, -1:].any() for part in read)


def test_a_state_that_is_not_read_may_hold_a_spike():
    call = make("ssm", 66, batch=2)
    v, c, rate = (call.arguments[n].clone() for n in ("v", "C", "A"))
    v[:, 2], c[:, 3:, 0] = 300.0, 0  # the state that keeps the spike is not read
    rate[..., 1:], rate[..., 0] = rate[..., 1:] - 30, 0.0
    mine = call.set(v=v, C=c, A=rate).leaves()
    got, wanted = mine.read(), mine.read(backend="reference")
    assert all(relative(one[:, 40:], other[:, 40:], 0.1) < 1e-5 for one, other in zip(got, wanted))
    assert all(x.isfinite().all() for x in gradients_of(mine, got, [torch.ones_like(part) for part in wanted]).values())


def test_a_row_with_one_likely_key_keeps_the_digits_of_its_small_gradient():
    """What reaches the query is the small difference of the other keys, not the rounding of the likely one."""
    q, k, v = torch.ones(1, 40, 1, 16), torch.randn(1, 40, 1, 16) / 10, torch.randn(1, 40, 1, 8) + 5
    k[0, 3] += 3
    weight, slopes = torch.randn(1, 40, 1, 8), []
    for dtype, backend in ((torch.float32, "plain"), (torch.float64, "reference")):
        leaf = q.to(dtype).requires_grad_()
        read = softmax_read(leaf, k.to(dtype), v.to(dtype), torch.ones(1, 8), scale=0.25, backend=backend)
        slopes.append(torch.autograd.grad((read.mean * weight).sum(), leaf)[0][0, 4:, 0].double())
    assert ((slopes[0] - slopes[1]).norm(dim=-1) <= 1e-4 * slopes[1].norm(dim=-1)).all()


BROAD = {"time": 127, "width": 8, "keys": 16, "weights": 16.0}
CASES = {  # the call, how far its values are from 0, how its results are weighted, and how far beta's gradient may err
    "narrow": (BROAD | {"spread": 0.2}, 0.0, torch.randn_like, 1e-5),
    "within a nat": (BROAD | {"spread": 0.05}, 0.0, torch.randn_like, 3e-5),
    "hardly any from 100": (BROAD | {"spread": 1e-3}, 100.0, torch.randn_like, 1e-2),
    "a small beta": ({"time": 64, "beta": 1e-2}, 0.0, torch.rand_like, 1e-4),
    "a smaller one": ({"time": 64, "beta": 1e-3}, 0.0, torch.rand_like, 1e-3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_narrow_spans_and_small_betas_keep_the_digits_of_the_temperatures_gradient(case, seed):
    """Around 100 the gradient was off by 6.7 times its size when e was not computed from differences."""
    torch.manual_seed(seed)
    sizes, offset, weight, limit = CASES[case]
    call = make("softmax", **sizes)
    _, _, found, wanted = beside_float64(call.set(v=call.arguments["v"] + offset), torch.zeros_like, weight)
    assert relative(found["beta"], wanted["beta"]) < limit


def test_a_decay_of_any_strength_is_read_in_both_directions():
    """A spike behind decays of a thousand nats a step: in the second direction, too, its weight is not lost."""
    torch.manual_seed(0)
    q, k = torch.rand(2, 2, 12, 3, 5).unbind(0)
    g = -1000 * torch.rand(2, 12, 3).square()
    v, beta = torch.randn(2, 12, 3, 4), torch.rand(3, 4) + 0.5
    v[:, ::4] += 1500.0
    wanted = keyed_scan_read(*(x.double() for x in (q, k, v, beta, g)), causal=False, backend="reference")
    found = keyed_scan_read(q, k, v, beta, g, causal=False)
    assert relative(found.free_energy, wanted.free_energy) < 1e-5
    assert relative(found.mean, wanted.mean) < 1e-5


def test_neither_direction_reads_beyond_a_decay_of_minus_infinity():
    """The second token has no weight for itself, and the others are forgotten on the way to it from either side."""
    decay, v = torch.tensor([0.0, -torch.inf, 0.0]).view(1, 3, 1), column(5.0, 1.0, 9.0)
    read = keyed_scan_read(column(1.0, 1.0, 1.0), column(1.0, 0.0, 1.0), v, BETA, decay, causal=False)
    for part in read:
        assert part.flatten().tolist() == [5.0, 0.0, 9.0]


@pytest.mark.parametrize("name", SCANS)
@torch.no_grad()
def test_what_was_read_may_be_changed_and_the_state_stays(name):
    call = make(name, 1)
    read, state = call.read(return_state=True)
    before = [x.clone() for x in state.memory.values()]
    for part in read:
        part.zero_()
    assert all(map(torch.equal, state.memory.values(), before))


@pytest.mark.parametrize("name", SCANS)
def test_a_nan_in_one_row_costs_the_other_no_digits(name):
    """Values this close are read in float64, and NaN compares with nothing."""
    call = make(name, 64, batch=2, spread=1e-3)
    alone = call.read()
    spoilt = call.set(v=call.arguments["v"].index_put((torch.tensor(1), torch.tensor(3)), torch.tensor(torch.nan)))
    for got, wanted in zip(spoilt.read(), alone):
        assert got[1].isnan().any()
        torch.testing.assert_close(got[0], wanted[0], rtol=3e-7, atol=0)


def test_no_gradient_of_a_state_space_that_weighs_next_to_nothing_overflows():
    """Its skip of 0 would weigh e^101 times as much as what it has kept."""
    call = make("ssm", 17)
    weak = {name: 1e-22 * call.arguments[name] for name in "BC"}
    leaves = call.set(D=torch.zeros_like(call.arguments["D"]), **weak).leaves(torch.float32)
    read = leaves.read()
    assert all(
        part.isfinite().all() for part in gradients_of(leaves, read, [torch.ones_like(x) for x in read]).values()
    )
