"""The kernels of the decaying sum and of the channel scan against float64.

In the interpreter with TRITON_INTERPRET=1, or on a GPU:

python -m pytest tests/ops/recurrent/kernels_channel_scan.py -o addopts=
"""

import pytest
import torch
from interpreter import DEVICE, patch_the_language_once
from recurrences import (
    case,
    check_gradients_through_the_state,
    check_that_backends_continue_each_other,
    error,
    gradients,
)
from torch.library import opcheck

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.functional import channel_scan_read, decay_scan
from fem.ops.channel_scan.kernels import launch as channel_scan_triton
from fem.ops.decay_scan.kernels import launch as decay_scan_triton
from fem.ops.decay_scan.naive import naive_decay_scan

CHUNK = 4
patch_the_language_once()
pytestmark = pytest.mark.filterwarnings("ignore")
every_kind = pytest.mark.parametrize("kind", ["aft", "decay", "both"])


@pytest.fixture(autouse=True)
def on_device_in_short_chunks(monkeypatch):
    monkeypatch.setattr(decay_scan_triton, "CHUNK", CHUNK)
    with torch.device(DEVICE):
        yield


def compare(inputs, **options):
    """Forward and every gradient against the definition in float64."""
    mine, theirs = inputs.leaves(), inputs.map(lambda x: x.double()).leaves()
    got, wanted = mine.read(backend="triton", **options), theirs.definition(**options)
    seen = options.get("key_mask", torch.ones(wanted.mean.shape[:2])).bool()
    weights = [torch.randn_like(part) * seen[:, :, None, None] for part in wanted]
    for name, one, other in zip(("mean", "free_energy"), got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert error(one[seen], other[seen]) < 2e-6, name
    expected = gradients(wanted, theirs, weights)
    for name, gradient in gradients(got, mine, weights).items():
        scale = (
            0.1 if name != "beta" else inputs.along["v"].abs().max() + 0.1
        )  # beta's is a difference of averages of v
        assert error(gradient, expected[name], scale) < 5e-6, name


@every_kind
@pytest.mark.parametrize("time", [1, CHUNK, 9])
def test_read_and_gradients_are_those_of_the_definition(kind, time):
    compare(case(kind, time))


@pytest.mark.parametrize(("causal", "normalize"), [(True, True), (True, False), (False, True)])
def test_masks_and_documents_are_those_of_the_definition(causal, normalize):
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1]])
    ids = torch.tensor([[5, 5, 5, 2, 7, 2, 5, 5, 5, 5, 1], [0, 0, 1, 9, 1, 1, 1, 0, 0, 0, 0]])
    compare(case("both", 11), causal=causal, normalize=normalize, key_mask=mask, segment_ids=ids)


def test_masks_and_documents_need_neither_weights_nor_decays():
    mask, ids = torch.rand(2, 9) > 0.3, torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0]).expand(2, -1)
    for kind in ("aft", "decay"):
        compare(case(kind, 9), key_mask=mask, segment_ids=ids)


@pytest.mark.parametrize("span", [0, 80, 500])
def test_any_span_of_values(span):
    inputs = case("both", 11, batch=1)
    compare(inputs.set(v=torch.rand_like(inputs.along["v"]) * span / 2))


def test_a_spike_that_decayed_away_leaves_no_trace():
    inputs = case("both", 11, batch=1)
    v, decay = inputs.along["v"].clone(), inputs.along["log_decay"].clone()
    v[:, 2], decay[:, 5:7] = 250.0, -400.0
    compare(inputs.set(v=v, log_decay=decay))


@pytest.mark.parametrize("level", [0.0, -0.2, -15.0, -1000.0])
def test_any_decay(level):
    inputs = case("both", 11, batch=1)
    compare(inputs.set(log_decay=torch.full_like(inputs.along["log_decay"], level)))


def test_decays_that_sum_to_a_thousand_are_exact():
    inputs = case("both", 11, batch=1)
    compare(inputs.set(log_decay=-torch.rand_like(inputs.along["v"]) * 2000 / 11))


def test_tokens_that_are_nearly_forgotten_are_told_apart():
    inputs = case("both", 11, batch=1)
    weight = torch.full_like(inputs.along["v"], -200.0)
    weight[:, 0] = 50.0
    compare(inputs.set(log_weight=weight, log_decay=torch.full_like(weight, -7.0)))


@pytest.mark.parametrize("kind", ["aft", "both"])
def test_log_weights_of_any_size(kind):
    inputs = case(kind, 11, batch=1)
    compare(inputs.set(log_weight=torch.randn_like(inputs.along["v"]) * 100))


def test_values_far_from_zero_keep_the_digits_of_their_differences():
    inputs = case("both", 11, batch=1).map(lambda x: x.double())
    v = (inputs.along["v"] * 256).round() / 256 + 1000  # in float32 too
    exact = inputs.set(v=v).leaves()
    near, far = inputs.set(v=v - 1000).map(lambda x: x.float()).leaves(), exact.map(lambda x: x.float()).leaves()
    reads = [part.read(backend="triton") for part in (near, far)]
    weights = [torch.randn_like(part) for part in reads[0]]
    wanted, got = (gradients(read, leaves, weights) for read, leaves in zip(reads, (near, far), strict=True))
    for name in ("v", "log_weight", "log_decay"):
        assert error(got[name], wanted[name]) < 2e-4, name


@every_kind
def test_gradients_pass_through_the_state(kind):
    check_gradients_through_the_state(case(kind, 11), 2e-6, 5e-6)


def test_the_plain_scan_continues_the_state_of_the_kernels_and_they_its():
    check_that_backends_continue_each_other(case("both", 12))


def test_future_tokens_change_no_bit():
    inputs = case("both", 11)
    before = inputs.read(backend="triton")
    changed = inputs.map(torch.clone)
    changed.along["v"][:, 7:] = changed.along["log_weight"][:, 7:] = 1e4
    for got, wanted in zip(changed.read(backend="triton"), before, strict=True):
        assert torch.equal(got[:, :7], wanted[:, :7])


def test_gradients_repeat_bit_by_bit():
    inputs, runs = case("both", 9, spread=20.0).leaves(), []
    for _ in range(2):
        read = inputs.read(backend="triton")
        runs.append(gradients(read, inputs, [torch.ones_like(part) for part in read]))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_rows_that_see_nothing_read_zero_and_pass_no_gradient():
    inputs = case("both", 9)
    weight, mask = inputs.along["log_weight"].clone(), torch.ones(2, 9, dtype=torch.bool)
    weight[0, :3] = weight[0, 7] = -torch.inf
    mask[1] = False
    mine = inputs.set(log_weight=weight).leaves()
    read = mine.read(backend="triton", key_mask=mask)
    for part in read:
        assert (part[0, :3] == 0).all()
        assert (part[1] == 0).all()
    for name, gradient in gradients(read, mine, [torch.ones_like(part) for part in read]).items():
        assert gradient.isfinite().all(), name
        assert name in inputs.shared or (gradient[1] == 0).all(), name


def test_the_mean_alone_needs_no_beta():
    inputs = case("both", 11)
    alone = inputs.set(beta=None).read(backend="triton")
    assert alone.free_energy is None
    torch.testing.assert_close(alone.mean, inputs.read(backend="triton").mean)
    v = inputs.along["v"].clone().requires_grad_()
    (running,) = torch.autograd.grad(channel_scan_read(None, v, None, backend="triton").mean.sum(), v)
    wanted = (1 / torch.arange(1, 12)).flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(running, wanted[:, None, None].expand_as(v))


def test_half_precision_comes_back_in_its_dtype():
    inputs = case("both", 11).map(lambda x: x.bfloat16())
    for got, wanted in zip(inputs.read(backend="triton"), inputs.map(lambda x: x.double()).read(), strict=True):
        assert got.dtype == torch.bfloat16
        assert error(got, wanted) < 2**-8


def test_the_operators_keep_to_what_they_are_registered_as():
    v, rate = torch.rand(1, 5, 3).requires_grad_(), torch.rand(3)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(decay_scan_triton._forward, (-v.detach(), v, torch.rand(1, 3)), test_utils=checks)
    opcheck(channel_scan_triton._forward, (-v.detach(), v, v, rate, torch.ones(6, 1, 3)), test_utils=checks)
    opcheck(channel_scan_triton._forward, (None, None, v, None, torch.ones(3, 1, 3)), test_utils=checks)


def test_float64_is_refused():
    with pytest.raises(ValueError, match="computes in float32, got float64"):
        case("both", 3, dtype=torch.float64).read(backend="triton")


@pytest.mark.parametrize(
    ("time", "channels", "level"),
    [(1, 3, None), (CHUNK, 3, None), (11, 131, None), (9, 3, 0.0), (9, 3, -1000.0), (9, 3, -torch.inf)],
)
def test_decaying_sums_and_their_gradients_are_those_of_the_recurrence(time, channels, level):
    decay = torch.randn(2, time, channels).exp().neg() if level is None else torch.full((2, time, channels), level)
    given = [decay, torch.randn(2, time, channels), torch.randn(2, channels)]
    mine, exact = ([x.to(dtype).requires_grad_() for x in given] for dtype in (torch.float32, torch.float64))
    got, wanted = decay_scan(*mine, backend="triton"), naive_decay_scan(*exact)
    weights = torch.randn_like(wanted)
    results = [got, *torch.autograd.grad((got.double() * weights).sum(), mine)]
    expected = [wanted, *torch.autograd.grad((wanted * weights).sum(), exact)]
    for one, other in zip(results, expected, strict=True):
        assert error(one, other) < 1e-6


def test_slight_decays_do_not_drift():
    decay, u = torch.full((1, 300, 1), -1e-3), torch.ones(1, 300, 1)
    got = decay_scan(decay, u, backend="triton")
    assert error(got, naive_decay_scan(decay, u)) < 1e-6


def test_a_layer_reads_by_the_kernels_of_its_conditioner_and_its_prior():
    config = {"n_embd": 16, "n_head": 2, "prior_type": "rnn_softmax", "use_conv": True, "conv_hidden": 4}
    layers = [FreeEnergyMixer(FreeEnergyMixerConfig(**config, backend=backend)) for backend in ("triton", "plain")]
    layers[1].load_state_dict(layers[0].state_dict())
    x, mask = torch.randn(2, 9, 16), torch.rand(2, 9) > 0.2
    one, other = (layer(x, attention_mask=mask) for layer in layers)
    torch.testing.assert_close(one[mask], other[mask], rtol=1e-4, atol=1e-5)
