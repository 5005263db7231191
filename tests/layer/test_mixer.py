"""The layer: every line of its contract, for every prior."""

from collections import Counter

import pytest
import torch
from layers import ABLATIONS, EVERY, FAMILIES, HEADS, SPLIT, TIME, WIDTH, make_layer, some_pairs, streamed, tokens
from reads import documents_of

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig

families = pytest.mark.parametrize("family", FAMILIES)
every_family = pytest.mark.parametrize("family", EVERY)  # an operator too
EXACT = 1e-9  # in float64, for sums taken in another order
MASKS = {
    "left": [[0] * 5 + [1] * 8, [1] * 13],
    "right": [[1] * 8 + [0] * 5, [1] * 13],
    "interior": [[1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1], [0, 1] * 6 + [1]],
    "first only": [[1] + [0] * 12, [0] * 12 + [1]],
}


def close(got, wanted, tolerance=EXACT):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


IDS = [  # one document, one that returns, two, and documents of few tokens
    *([7] * 13, [7] * 4 + [2] + [7] * 8, [0] * 9 + [1] * 4, [7, 7, 9, 7, 2, 2, 2, 5, 5, 5, 5, 5, 5], [1] * 12 + [2]),
]


@pytest.mark.parametrize("family, causal", [*((name, True) for name in EVERY), *((name, False) for name in FAMILIES)])
def test_masking_a_token_is_deleting_it_and_documents_are_separate_runs(family, causal):
    """A window counts tokens as they stand, masked ones between others too: it takes no holes."""
    whole, both = "window" in EVERY[family], {} if causal else {"causal": False, "conv_bidirectional": True}
    keeps = [mask for name, rows in MASKS.items() if name != "interior" or not whole for mask in rows]
    keep, ids = (torch.tensor(rows) for rows in zip(*some_pairs([*keeps, [1] * 13], IDS)))
    layer, x = make_layer(**EVERY[family], **both), tokens(batch=len(keep))
    y = layer(x, attention_mask=keep, segment_ids=ids)
    assert y.isfinite().all()
    for row in range(len(keep)):
        for document in documents_of(keep[row].bool(), ids[row]):
            close(y[row, document], layer(x[row, document][None])[0])


@every_family
def test_future_tokens_change_nothing(family):
    layer, x = make_layer(torch.float32, **EVERY[family]), tokens(dtype=torch.float32)
    y = layer(x)
    for size in (1e4, -1e4) if family in FAMILIES else (5.0, -5.0):  # beyond, an operator says that it loses digits
        spiked = x.clone()
        spiked[:, 7:] += size
        assert (layer(spiked)[:, :7] - y[:, :7]).abs().max() <= 5e-6 * (1 + y.abs().max())


KEEP = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]]).bool()
MARKS = {"attention_mask": KEEP, "segment_ids": torch.tensor([[3, 3, 3, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3], [1] * 13])}


@families
@pytest.mark.parametrize("sizes", [[1] * 13, [1, 4, 7, 1], [12, 1]], ids=["steps", "chunks", "a step after a prompt"])
def test_pieces_equal_the_whole(family, sizes):
    """With masks and documents; and where the ids end, a state stays in its document."""
    layer, x = make_layer(**FAMILIES[family]), tokens()
    whole, (y, states) = layer(x, **MARKS), streamed(layer, x, sizes, **MARKS)
    close(y[KEEP], whole[KEEP])
    assert isinstance(states[-1].nbytes, int)
    _, state = layer(x[:, :9], **{name: mark[:, :9] for name, mark in MARKS.items()}, return_state=True)
    later = KEEP[:, 9:]
    close(layer(x[:, 9:], attention_mask=later, state=state)[later], whole[:, 9:][later])


@families
@torch.no_grad()
def test_the_default_dtype_of_torch_changes_nothing(family):
    layer, x, keep = make_layer(torch.float32, **FAMILIES[family]), tokens().float(), torch.tensor(MASKS["interior"])
    x[:, -1] *= 100  # leaves the range of packed values

    def outputs():
        y, state = layer(x[:, :-1], keep[:, :-1], return_state=True)
        return torch.cat([y, layer(x[:, -1:], keep[:, -1:], state=state)], 1)

    wanted = outputs()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(outputs(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@families
def test_a_state_is_never_changed_and_reorders_like_rows(family):
    layer, x = make_layer(**FAMILIES[family]), tokens(batch=3)
    _, state = layer(x[:, :6], return_state=True)
    order = torch.tensor([2, 0, 0])
    expected = layer(x[order])[:, 6:]
    close(layer(x[order, 6:], state=state.reorder(order)), expected)
    layer(x[:, 6:], state=state, return_state=True)
    close(layer(x[order, 6:], state=state.reorder(order)), expected)
    assert state.to("cpu").nbytes == state.nbytes


@every_family
def test_rows_without_any_token_return_the_output_bias_and_no_gradient(family):
    layer, x = make_layer(**EVERY[family]), tokens().requires_grad_()
    keep = torch.zeros(2, TIME, dtype=torch.bool)
    keep[1] = True
    y = layer(x, attention_mask=keep)
    close(y[0], layer.output.bias.expand(TIME, -1))
    y[0].sum().backward()
    assert not x.grad.any()
    assert not [name for name, p in layer.named_parameters() if name != "output.bias" and p.grad.any()]


@pytest.mark.parametrize("family, causal", [*some_pairs(FAMILIES, [True, False], 2), ("operator", True)])
def test_gradients_match_finite_differences(family, causal):
    layer, x = make_layer(causal=causal, **EVERY[family]), tokens(batch=1, time=5).requires_grad_()
    direction, step = torch.randn_like(x), 1e-6
    weights = torch.randn(1, 5, WIDTH, dtype=x.dtype)
    (gradient,) = torch.autograd.grad((layer(x) * weights).sum(), x)
    with torch.no_grad():
        slope = ((layer(x + step * direction) - layer(x - step * direction)) * weights).sum() / (2 * step)
    close((gradient * direction).sum(), slope, 1e-6)


@families
def test_without_causality_reversal_commutes_with_the_layer(family):
    """So that later tokens matter as earlier ones do."""
    layer, x = make_layer(causal=False, use_rope=False, use_conv=False, **FAMILIES[family]), tokens()
    close(layer(x.flip(1)), layer(x).flip(1))


@pytest.mark.parametrize("family, ablation", some_pairs(FAMILIES, [*ABLATIONS, "split"], 2))
def test_every_ablation_runs_trains_and_streams(family, ablation):
    fields = FAMILIES[family] | ABLATIONS.get(ablation, SPLIT)
    if ablation == "split" and not PRIORS[fields["prior_type"]].takes_pairs:
        fields |= {"free_share": None}
    if not fields.get("use_temperature", True) and not fields.get("use_outer_gate", True):
        fields.pop("gate_rank", None)  # a rank of no gate is refused
    layer, x = make_layer(**fields), tokens()
    y = layer(x)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    with torch.no_grad():
        close(streamed(layer, x, [5, 1, 1, 6])[0], y)


@pytest.mark.parametrize("family", [*PRIORS, "softmax slim"])
def test_the_conditioner_starts_silent_and_then_matters(family):
    torch.manual_seed(3)
    x = tokens(dtype=torch.float32)
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS, **FAMILIES[family]))
    plain = layer(x)
    with torch.no_grad():
        layer.conditioner.project.weight.normal_()
    close(layer(x), plain)
    trained = make_layer(torch.float32, **FAMILIES[family])
    before = trained(x)
    with torch.no_grad():
        trained.conditioner.project.weight.mul_(2)
    assert (trained(x) - before).abs().max() > 1e-4


@families
def test_inspect_shows_what_forward_computes(family):
    layer, x = make_layer(**FAMILIES[family]), tokens()
    keep = torch.tensor(MASKS["interior"])
    reading = layer.inspect(x, attention_mask=keep)
    rows = keep.bool()[:, None, :]
    assert reading.posterior.shape == (2, HEADS, WIDTH // 2 // HEADS, TIME, TIME)
    sums = reading.prior.sum(-1)
    if layer.config.normalize:
        kept = rows.expand(sums.shape) if sums.ndim == 3 else rows[:, None].expand(sums.shape)
        close(sums[kept], torch.ones_like(sums[kept]))
    assert reading.prior[..., ~keep[0].bool()][0].abs().max() == 0
    u = torch.lerp(reading.mean, reading.free_energy, reading.lambda_) * reading.gate
    close(layer.output(u.flatten(2))[keep.bool()], layer(x, attention_mask=keep)[keep.bool()])
    beta = reading.beta if reading.beta.ndim == 2 else reading.beta[:, None].expand(HEADS, WIDTH // 2 // HEADS)
    assert (reading.hidden_beta >= 0).all()
    assert (reading.hidden_beta <= beta * (1 + 1e-9)).all()


def test_inspect_shows_the_posterior_of_the_values_that_were_clipped():
    layer, x = make_layer(value_logexp_cap=1.0, use_conv=False), tokens()
    with torch.no_grad():
        layer.value.weight.mul_(40)
    reading = layer.inspect(x)
    beta, v = layer.temperature(x), layer.value(x).unflatten(-1, (HEADS, -1))
    free = (beta * v).clamp(-1, 1) / beta
    close(reading.free_energy - reading.gap / beta, torch.einsum("bhti,bihd->bthd", reading.prior, free).detach())


@pytest.mark.parametrize("family", [name for name in FAMILIES if "unnormalised" in name])
def test_inspect_shares_out_weights_that_are_small_in_half_precision(family):
    layer, x = make_layer(torch.float16, **FAMILIES[family]), tokens(dtype=torch.float16)
    with torch.no_grad():
        for projection in (layer.prior.query, layer.prior.key) if "gla" in family else (layer.prior.ssm.b,):
            projection.weight.zero_()
            projection.bias.fill_(2e-3 if "gla" in family else -12.0)
    if "mamba" in family:
        layer.prior.ssm.d.data.fill_(-12.0)
    posterior = layer.inspect(x).posterior
    torch.testing.assert_close(posterior.sum(-1), torch.ones_like(posterior.sum(-1)))


def test_dropout_leaves_gradients_finite_and_eval_untouched():
    layer, x = make_layer(torch.float32, dropout=0.1), tokens(time=22, dtype=torch.float32)
    close(layer(x), layer(x))
    layer.train()
    layer(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("family, dtype", some_pairs(EVERY, [torch.bfloat16, torch.float16], 2))
def test_half_precision_follows_float64(family, dtype):
    reference, x = make_layer(**EVERY[family]), tokens()
    layer = make_layer(dtype, **EVERY[family])
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    reference.load_state_dict({name: p.double() for name, p in layer.state_dict().items()})
    wanted = reference(x.to(dtype).double())
    assert (y.double() - wanted).abs().max() <= 16 * torch.finfo(dtype).eps * (1 + wanted.abs().max())


@families
def test_bfloat16_autocast_trains(family):
    layer, x = make_layer(torch.float32, **FAMILIES[family]), tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        first, state = layer(x[:, :5], return_state=True)
        second = layer(x[:, 5:], state=state)
    assert (y.float() - layer(x)).abs().max() < 0.1 * (1 + y.abs().max())
    assert (torch.cat([first, second], 1).float() - y.float()).abs().max() < 0.05 * (1 + y.abs().max())
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


BY_CHANNEL = [name for name, fields in FAMILIES.items() if PRIORS[fields["prior_type"]].takes_pairs]  # a cap needs it


@pytest.mark.parametrize("family", BY_CHANNEL)
def test_the_cap_clips_the_log_sum_exp_branch_alone(family):
    x = tokens() * 3
    exact, loose, tight = (make_layer(value_logexp_cap=cap, **FAMILIES[family]) for cap in (None, 1e6, 0.1))
    close(loose(x), exact(x))
    assert (tight(x) - exact(x)).abs().max() > 1e-3
    close(tight.inspect(x).mean, exact.inspect(x).mean)
    _, state = tight(x[:, :4], return_state=True)
    close(tight(x[:, 4:], state=state), tight(x)[:, 4:])


@pytest.mark.parametrize(
    "fields",
    [{"fem_dim": 32}, {"free_share": 0.5}, {"use_temperature": False}, ABLATIONS["-G,T,L"]],
    ids=["pairs at half the width", "split", "F alone", "the mean alone"],
)
def test_the_cache_of_every_form_is_attentions(fields):
    """Values and their exponentials are as wide as the keys; a scale a head, where there are exponentials, aside."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(**{"n_embd": 64, "n_head": 4, "fem_dim": 64, "qk_dim": 64} | fields))
    _, state = layer(torch.randn(1, 10, 64), return_state=True)
    assert state.memory["value"].numel() == state.memory["key"].numel() == 10 * 64


@pytest.mark.parametrize("family", ["softmax", "gla"])
def test_every_part_is_called_as_a_module(family):
    """Hooks see the call, and so does what loads parameters by them, such as accelerate's offloading."""
    layer, called = make_layer(**FAMILIES[family]), []
    for part in layer.children():
        part.register_forward_hook(lambda module, inputs, output: called.append(module))
    layer(tokens())
    assert Counter(called) == Counter(layer.children())


# Split values, of which some channels read the mean and the others F; and F alone, of layers that read no mean


def in_both_ways(split, x, **marks):
    """What the split layer must give, from the paper's reading of all its channels."""
    whole = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS, prior_type=split.config.prior_type, **{
        name: getattr(split.config, name) for name in ("fem_dim", "causal", "use_conv", "conv_hidden")
    })).double()  # fmt: skip
    weights, d_f = split.state_dict(), split.config.free_width
    weights |= {name: x for name, x in whole.state_dict().items() if name.startswith("gate.inner")}
    weights["beta.theta"] = torch.nn.functional.pad(weights["beta.theta"], (split.config.value_width - d_f, 0))
    whole.load_state_dict(weights)
    reading = whole.inspect(x, **marks)
    u = torch.cat([reading.mean[..., :-d_f], reading.free_energy[..., -d_f:]], -1)
    return whole.output((reading.gate * u).flatten(-2))


@pytest.mark.parametrize("prior", [name for name, prior in PRIORS.items() if prior.takes_pairs])
@pytest.mark.parametrize("share, causal", [(0.5, True), (0.25, False), (1.0, True)])
def test_the_last_channels_read_the_free_energy_and_the_others_the_mean(prior, share, causal):
    layer, x = make_layer(prior_type=prior, free_share=share, fem_dim=32, causal=causal), tokens()
    close(layer(x), in_both_ways(layer, x))
    close(layer(x, **MARKS)[KEEP], in_both_ways(layer, x, **MARKS)[KEEP])


def pair(family, **fields):
    """The layer, and one of its weights whose channels are read in pairs of mean and F."""
    alone = make_layer(**FAMILIES[family], use_temperature=False, **fields)
    both = make_layer(**FAMILIES[family], use_temperature=False, **fields)
    both.load_state_dict(alone.state_dict())
    both.pair = both.parts
    return alone, both


@pytest.mark.parametrize("family, cap", [*((name, None) for name in FAMILIES), *((name, 0.5) for name in BY_CHANNEL)])
def test_f_alone_is_f_beside_the_mean(family, cap):
    layers, x = pair(family, value_logexp_cap=cap), tokens()
    mask = torch.rand(x.shape[:2]) > 0.3
    found = []
    for layer in layers:
        y = layer(x, attention_mask=mask)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    alone, both = (layer.inspect(x) for layer in layers)
    torch.testing.assert_close(alone.mean, both.mean)  # which is shown although it is not read
    assert alone.gap.shape == alone.mean.shape
