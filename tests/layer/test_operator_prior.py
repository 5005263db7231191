"""An operator of the user's own as a prior: what it may do, and in which precision it runs."""

import pytest
import torch
from layers import HEADS, WIDTH, tokens

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.ops.common.tokens import PLAIN, Tokens
from fem.priors import OperatorPrior

pytestmark = pytest.mark.usefixtures("as_users_run")


class Filter(torch.nn.Module):
    """A causal convolution of two taps with weights of its own."""

    def __init__(self):
        super().__init__()
        self.taps = torch.nn.Parameter(torch.tensor([1.0, 0.3]))
        self.register_buffer("fixed", torch.eye(2))
        self.register_buffer("order", torch.arange(2))

    def forward(self, x):
        return torch.stack([x, torch.nn.functional.pad(x, (0, 0, 1, -1))], -1) @ self.fixed[self.order] @ self.taps


def with_operator(op, dtype=torch.float32):
    torch.manual_seed(0)
    return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS), OperatorPrior(op)).to(dtype)


def test_an_operator_may_work_in_place():
    x = tokens(dtype=torch.float32)
    wanted = with_operator(lambda z: z.cumsum(1))(x)
    torch.testing.assert_close(with_operator(lambda z: z.cumsum_(1))(x), wanted, rtol=0, atol=0)


def test_an_operator_with_parameters_and_buffers_runs_in_a_half_precision_layer():
    x = tokens(dtype=torch.bfloat16)
    layer = with_operator(Filter(), torch.bfloat16)
    y = layer(x)
    y.float().square().sum().backward()
    assert layer.prior.op.taps.grad.abs().min() > 0
    wanted = layer.double()(x.double())
    assert (y.double() - wanted).abs().max() <= 0.02 * (1 + wanted.abs().max())


def by_fft(x):
    taps = torch.linspace(1, 0.1, x.shape[1])[:, None].to(x.dtype)
    product = torch.fft.rfft(x, 2 * len(taps), 1) * torch.fft.rfft(taps, 2 * len(taps), 0)
    return torch.fft.irfft(product, dim=1)[:, : len(taps)]


def test_an_fft_that_lost_the_small_sums_is_refused():
    v, beta = 12 * torch.linspace(-1, 0, 64)[None, :, None, None].expand(1, 64, 1, 4), torch.ones(1, 4)
    read = lambda op, dtype=torch.float32: OperatorPrior(op).read(None, v.to(dtype), beta, PLAIN, None)[0]  # noqa: E731
    with pytest.raises(ValueError, match="under 6 for an op by FFT unless that runs in float64"):
        read(by_fft)
    wanted = read(by_fft, torch.float64).free_energy.float()
    torch.testing.assert_close(read(lambda x: by_fft(x.double()).to(x)).free_energy, wanted, rtol=1e-6, atol=1e-5)


def test_an_operator_that_first_met_one_token_is_tried_by_the_next_call():
    layer = with_operator(lambda x: x.flip(1))
    layer(tokens(time=1, dtype=torch.float32))
    with pytest.raises(ValueError, match="op must be causal"):
        layer(tokens(time=2, dtype=torch.float32))


def test_what_an_fft_is_off_by_is_no_weight_where_a_layer_is_inspected():
    p = with_operator(by_fft).inspect(tokens(dtype=torch.float32)).prior
    assert p.min() >= 0
    torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:-1]))


def test_an_operator_counts_its_own_matrices_alone():
    """Beside value, lambda, gate and output, and no queries and keys."""
    linear = lambda op: with_operator(op).parameter_report()["linear"]  # noqa: E731
    config = FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS)
    around = 4 * WIDTH * config.fem_dim
    assert linear(lambda z: z.cumsum(1)) == linear(Filter()) == around
    assert linear(torch.nn.Linear(7, 5)) == around + 35
    assert FreeEnergyMixer(config).parameter_report()["linear"] == config.linear_weights > around


def test_an_operator_runs_in_float32_under_autocast():
    layer, x = with_operator(Filter()), tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert (y.float() - layer(x)).abs().max() < 0.05


@pytest.mark.parametrize("shape", [(0, 5, WIDTH), (2, 0, WIDTH)])
def test_an_operator_reads_nothing_from_nothing(shape):
    layer, x = with_operator(lambda z: z.cumsum(1)), torch.zeros(shape, requires_grad=True)
    for documents in (None, torch.zeros(shape[:2], dtype=torch.long)):
        y = layer(x, segment_ids=documents)
        y.sum().backward()
        assert y.shape == shape


@pytest.mark.parametrize("op", [lambda z: z.cumsum(1), lambda z: z.roll(1, 1) * (torch.arange(13)[:, None] > 0)])
def test_rows_that_see_nothing_pass_no_gradient(op):
    """Those before the first token that is kept, and the first token of an operator that sees earlier ones alone."""
    layer, x = with_operator(op), 30 * tokens(dtype=torch.float32)
    layer(x.requires_grad_(), torch.arange(13).expand(2, -1) > 5).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in [x, *layer.parameters()])


def test_a_small_beta_keeps_the_digits_of_the_free_energy_and_of_its_gradients():
    """A masked token far away leaves the others as they are. At e785e87 F lost 7e-4, and beta's gradient all."""
    keep = torch.ones(2, 64, dtype=torch.bool)
    keep[:, 5] = False
    place = (keep.cumsum(1) - 1).clamp_min(0)
    marks, prior = Tokens(keep, None, None, place), OperatorPrior(lambda x: x.cumsum(1))
    v, beta = torch.randn(2, 64, 2, 4), 1e-4 + 1e-4 * torch.rand(2, 4)
    v[:, 5] = 1e4
    exact, exact_beta = (x.double().requires_grad_() for x in (v, beta))
    sums = ((exact_beta * exact).expm1() * keep[..., None, None]).cumsum(1)
    wanted = (sums / keep.cumsum(1)[..., None, None]).log1p() / exact_beta
    mine, beta = v.requires_grad_(), beta.requires_grad_()
    got = prior.read(None, mine, beta, marks, None)[0].free_energy
    assert ((got - wanted)[keep]).abs().max() <= 2e-6
    cotangent = torch.randn_like(v) * keep[..., None, None]
    found = torch.autograd.grad((got * cotangent).sum(), (mine, beta))
    slopes = torch.autograd.grad((wanted * cotangent).sum(), (exact, exact_beta))
    for one, other, allowed in zip(found, slopes, (1e-5, 3e-2)):
        assert (one - other).abs().max() <= allowed * other.abs().max()


def test_masks_map_under_vmap_and_documents_do_not():
    layer, x = with_operator(lambda x: x.cumsum(1)), tokens(dtype=torch.float32)
    keep = torch.ones(2, 13, dtype=torch.bool)
    by_row = lambda x, marks, name: layer(x[None], **{name: marks[None]})[0]  # noqa: E731
    torch.testing.assert_close(torch.vmap(by_row, in_dims=(0, 0, None))(x, keep, "attention_mask"), layer(x, keep))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(by_row, in_dims=(0, 0, None))(x, keep.long(), "segment_ids")


@pytest.mark.parametrize("taps", [[-1.0, -0.3], [0.3, -1.0], [torch.nan, 1.0]])
def test_weights_that_turn_negative_after_the_first_call_are_refused_where_a_sum_shows_it(taps):
    layer, x = with_operator(Filter()), tokens(dtype=torch.float32)
    layer(x)
    with torch.no_grad():
        layer.prior.op.taps.copy_(torch.tensor(taps))
    with pytest.raises(ValueError, match="or op has a negative weight"):
        layer(x)
