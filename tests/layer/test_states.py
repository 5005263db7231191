"""States: what they hold and keep alive, who may read them, how they travel."""

import copy
import io

import pytest
import torch
from layers import EVERY, FAMILIES, HEADS, TIME, WIDTH, make_layer, some_pairs, tokens
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig, MixerState

pytestmark = pytest.mark.usefixtures("as_users_run")
families = pytest.mark.parametrize("family", FAMILIES)


def prompt(family, dtype=torch.float64, **fields):
    layer, x = make_layer(dtype, **FAMILIES[family] | fields), tokens(dtype=dtype)
    keep = torch.tensor([[1] * 9, [0, 0] + [1] * 7]).bool()
    return layer, x[:, 9:], layer(x[:, :9], attention_mask=keep, return_state=True)[1]


@families
def test_nbytes_is_what_a_state_keeps_alive(family):
    layer = make_layer(torch.float32, **FAMILIES[family])
    _, state = layer(torch.randn(2, 300, WIDTH), return_state=True)
    for _ in range(3):
        parts = [*state.memory.values(), *vars(state.cache_position).values(), state.conditioner]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts if x is not None}
        assert sum(storages.values()) == state.nbytes
        assert state.nbytes <= 1.13 * sum(x.nbytes for x in state.state_dict().values())
        _, state = layer(torch.randn(2, 1, WIDTH), state=state, return_state=True)


def test_a_window_after_1000_tokens_keeps_and_saves_its_window():
    layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=32, n_head=4, window=64)).eval()
    with torch.no_grad():
        _, state = layer(torch.randn(1, 1000, 32), return_state=True)
        _, after = layer(torch.randn(1, 1, 32), state=state, return_state=True)
    assert after.nbytes <= state.nbytes + 1000
    file = io.BytesIO()
    torch.save(state, file)
    assert state.nbytes < 64 * 4 * (32 + 2 * 16) + 2000  # keys, and values with their exponentials
    assert file.tell() < state.nbytes + 8000


def test_a_state_keeps_no_mask_of_its_callers():
    layer, x = make_layer(prior_type="softmax"), tokens()
    mask = torch.ones(2, 9, dtype=torch.bool)
    _, state = layer(x[:, :9], attention_mask=mask, return_state=True)
    wanted = layer(x[:, 9:], state=state)
    mask.zero_()
    torch.testing.assert_close(layer(x[:, 9:], state=state), wanted, rtol=0, atol=0)


@families
def test_it_travels_by_torch_save_and_by_safetensors(family, tmp_path):
    layer, rest, state = prompt(family)
    wanted = layer(rest, state=state)
    torch.save(state, tmp_path / "state.pt")
    save_file(state.detach().state_dict(), tmp_path / "state.safetensors")
    for read in (
        torch.load(tmp_path / "state.pt"),
        MixerState.from_state_dict(load_file(tmp_path / "state.safetensors")),
    ):
        assert (read.layer, read.dtype) == (state.layer, state.dtype)
        torch.testing.assert_close(layer(rest, state=read), wanted, rtol=0, atol=0)


@families
def test_detached_it_ends_the_graph(family):
    layer, rest, state = prompt(family)
    assert any(x.requires_grad for x in state.memory.values())
    cut = state.detach()
    assert not any(x.requires_grad for x in [*cut.memory.values(), *vars(cut.cache_position).values()])
    torch.testing.assert_close(layer(rest, state=copy.deepcopy(cut)), layer(rest, state=state), rtol=0, atol=0)


@pytest.mark.parametrize("family, dtype", some_pairs(FAMILIES, [torch.float32, torch.bfloat16], 2))
def test_cast_it_serves_a_layer_of_that_dtype(family, dtype):
    layer, rest, state = prompt(family)
    cast = state.to(dtype)
    assert all(not x.is_floating_point() for x in vars(cast.cache_position).values())
    sums = [x for name, x in cast.memory.items() if x.is_floating_point() and not name.endswith(("key", "value"))]
    assert all(x.dtype == torch.float32 for x in sums)
    wanted = layer(rest, state=state)
    got, after = layer.to(dtype)(rest.to(dtype), state=cast, return_state=True)
    assert (got.double() - wanted).abs().max() <= 32 * torch.finfo(dtype).eps * (1 + wanted.abs().max())
    assert after.dtype == dtype


@families
def test_a_dict_without_one_of_a_states_tensors_is_refused(family):
    saved = prompt(family)[2].state_dict()
    for name in saved:
        with pytest.raises(ValueError, match=f"MixerState.state_dict returned, got none named '{name}'"):
            MixerState.from_state_dict({other: x for other, x in saved.items() if other != name})
    for name in saved.keys() - {"layer", "names", "dtype"}:
        with pytest.raises(ValueError, match="tensors must be on one device, got cpu and meta"):
            MixerState.from_state_dict(saved | {name: saved[name].to("meta")})
    with pytest.raises(ValueError, match=r"MixerState\.state_dict returned, got none named"):
        MixerState.from_state_dict({name: saved[name] for name in ("layer", "names", "dtype")})
    with pytest.raises(ValueError, match=r"'layer' of torch\.float16; MixerState\.to casts a state"):
        MixerState.from_state_dict({name: tensor.half() for name, tensor in saved.items()})


def test_a_state_written_before_positions_said_who_had_started_loads():
    _, _, state = prompt("gla")
    more = torch.tensor(list(b"\ncache_position.started [2] torch.bool"), dtype=torch.uint8)
    saved = state.state_dict() | {"cache_position.started": torch.ones(2, dtype=torch.bool)}
    again = MixerState.from_state_dict(saved | {"names": torch.cat([saved["names"], more])})
    assert all(map(torch.equal, again.tensors(), state.tensors()))


@families
def test_training_through_one_rows_state_has_gradients_for_values_of_any_size(family):
    layer, x = make_layer(torch.float32, **FAMILIES[family]), tokens(batch=1, dtype=torch.float32)
    torch.nn.init.normal_(layer.value.weight, std=30.0)
    y, _ = layer(x, return_state=True)
    y.sum().backward()
    assert layer.value.weight.grad.isfinite().all()


OTHERS = {
    "use_rope": ("linear", {"use_rope": False}),
    "rope_theta": ("softmax", {"rope_theta": 500.0}),
    "normalize": ("gla", {"normalize": False}),
    "eps": ("linear", {"eps": 0.1}),
    "use_lse": ("gla", {"use_lse": False, "use_temperature": False}),
    "use_temperature": ("gla", {"use_temperature": False}),
    "beta_max_init": ("rnn_decay", {"beta_max_init": 0.0}),
    "ssm_rank": ("mamba", {"ssm_rank": 4}),
    "decay": ("gla", {"decay": "channel"}),
    "window": ("softmax", {"window": 5}),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_state_of_a_layer_that_differs_in_one_field_is_refused_by_its_name(field):
    prior, fields = OTHERS[field]
    _, rest, state = prompt(prior, **fields)
    layer = make_layer(prior_type=prior)
    with pytest.raises(ValueError, match=f"state belongs to another layer: it has .*{field}={fields[field]}"):
        layer(rest, state=state)


@pytest.mark.parametrize("fields", [{"dropout": 0.1}, {"backend": "plain"}, {"lambda_init": 1.0}], ids=str)
def test_what_no_state_holds_may_differ(fields):
    _, rest, state = prompt("gla")
    make_layer(prior_type="gla", **fields)(rest, state=state)


@pytest.mark.parametrize("family, shape", some_pairs(FAMILIES, [(0, 5), (2, 0), (0, 0)], 2))
def test_no_rows_and_no_tokens_are_an_answer_too(family, shape):
    layer = make_layer(**FAMILIES[family])
    x = torch.zeros(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    y, state = layer(x, attention_mask=torch.ones(shape).bool(), return_state=True)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in layer.parameters())
    more = tokens()[: shape[0]]
    torch.testing.assert_close(layer(more, state=state), layer(more), rtol=1e-9, atol=1e-9)
    _, before = layer(tokens()[: shape[0], :4], return_state=True)
    _, after = layer(x[:, :0], state=before, return_state=True)
    torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        y, _ = layer(more[:0, :1], state=before.reorder(torch.zeros(0, dtype=torch.long)), return_state=True)
    assert y.shape == (0, 1, WIDTH)


@pytest.mark.parametrize("family, what", some_pairs(FAMILIES, [float("nan"), float("inf")], 2))
def test_what_stands_in_padding_reaches_no_output_state_or_gradient(family, what):
    layer, x = make_layer(**FAMILIES[family]), tokens()
    keep = torch.ones(2, TIME, dtype=torch.bool)
    keep[0, :4] = keep[1, 6] = False
    results = []
    for content in (0.0, what):
        layer.zero_grad()
        filled = x.masked_fill(~keep[..., None], content).requires_grad_()
        y, state = layer(filled, attention_mask=keep, return_state=True)
        y.square().sum().backward()
        gradients = [filled.grad[keep], *(p.grad.clone() for p in layer.parameters())]
        results.append([y, *gradients, *state.state_dict().values()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("family, what", some_pairs(FAMILIES, [float("nan"), float("inf")], 2))
def test_visible_nan_shows_from_its_token_on_and_in_no_other_batch_row(family, what):
    layer, x = make_layer(**FAMILIES[family]), tokens()
    clean = layer(x)
    x[0, 5, 3] = what
    y = layer(x)
    assert y[0, 5:].isnan().all()
    torch.testing.assert_close(y[1], clean[1])


@pytest.mark.parametrize("family", EVERY)
def test_meta_layers_have_shapes_and_meet_no_real_tensors(family):
    """Nor do the checks of an operator."""
    layer, x = make_layer(torch.float32, **EVERY[family]), tokens(dtype=torch.float32)
    layer = layer.to("meta")
    y = layer(x.to("meta"), attention_mask=torch.ones(2, TIME, dtype=torch.bool, device="meta"))
    assert (y.shape, y.device.type) == (x.shape, "meta")
    with pytest.raises(ValueError, match="x must be on the layer's device, meta, got x on cpu"):
        layer(x)


@pytest.mark.parametrize("family", [*PRIORS, "softmax slim"])
def test_a_layer_that_was_sharded_without_values_starts_as_one_that_was_built(family, mesh):
    config = FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS, **FAMILIES[family])
    built, other = (dict(FreeEnergyMixer(config).named_parameters()) for _ in range(2))
    layer = FreeEnergyMixer(config, device="meta")
    fully_shard(layer, mesh=mesh).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    for part in layer.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for name, parameter in layer.named_parameters():
        value = parameter.full_tensor()
        assert value.isfinite().all()
        assert torch.equal(value, built[name]) or not torch.equal(built[name], other[name]), name  # the rest is drawn


def test_a_layers_file_has_no_angles_of_the_device_that_wrote_it(tmp_path):
    layer = FreeEnergyMixer(n_embd=16, n_head=2)
    layer(torch.randn(1, 3, 16))
    torch.save(layer, tmp_path / "layer.pt")
    assert layer.prior._frequencies
    assert not torch.load(tmp_path / "layer.pt", map_location="meta", weights_only=False).prior._frequencies
