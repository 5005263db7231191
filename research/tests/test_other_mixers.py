"""Differential attention and Hyena against their papers' equations, written out as loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from fem.optim import decayed_names
from fem_research.common.blocks import build_mixer, initialise, mixer_blocks
from fem_research.common.diff_attention import DifferentialAttention
from fem_research.common.hyena import HORIZON, SHIFT, Hyena
from fem_research.common.mixers import OTHERS, known
from fem_research.common.names import colour, display


def drawn(layer, seed=0):
    """The layer in float64, every parameter away from where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def turned(x, position):
    """RoPE at one position: planes (j, j + d / 2)."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    first, second = x[:half], x[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


@pytest.mark.parametrize("number", [1, 4])
def test_differential_attention_is_that_of_its_paper(number):
    width, heads, time = 24, 6, 5  # three heads, of two maps of 4 channels
    layer, x = drawn(DifferentialAttention(width, heads, number)), torch.randn(1, time, width, dtype=torch.float64)
    d, start = 4, 0.8 - 0.6 * math.exp(-0.3 * (number - 1))
    q1, k1, q2, k2 = layer.lambdas
    weight = torch.exp(sum(q1 * k1)) - torch.exp(sum(q2 * k2)) + start
    q, k, v = (part(x)[0] for part in (layer.query, layer.key, layer.value))
    rows = []
    for t in range(time):
        of_heads = []
        for head in range(heads // 2):
            maps = []
            for which in (0, 1):
                at = slice((2 * head + which) * d, (2 * head + which + 1) * d)
                scores = [turned(q[t, at], t) @ turned(k[i, at], i) / math.sqrt(d) for i in range(t + 1)]
                maps.append(torch.stack(scores).softmax(0))
            read = (maps[0] - weight * maps[1]) @ v[: t + 1, head * 2 * d : (head + 1) * 2 * d]
            normed = read / (read.square().mean() + 1e-5).sqrt() * layer.norm.weight
            of_heads.append((1 - start) * normed)
        rows.append(torch.cat(of_heads))
    torch.testing.assert_close(layer(x)[0], layer.output(torch.stack(rows)), atol=1e-6, rtol=1e-6)


def test_differential_attention_has_the_weights_of_attention_and_knows_its_layer():
    blocks = mixer_blocks("DiffTrans", 32, 4, 3, 64)
    layers = [module for module in blocks.modules() if isinstance(module, DifferentialAttention)]
    assert [layer.layer for layer in layers] == [1, 2, 3]
    assert [round(layer.lambda_init, 4) for layer in layers] == [0.2, 0.3555, 0.4707]
    assert sum(m.weight.numel() for m in layers[0].modules() if isinstance(m, torch.nn.Linear)) == 4 * 32**2
    with pytest.raises(ValueError, match="width must be a multiple of 4 x 3 heads, got 32"):
        DifferentialAttention(32, 6)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_hyena_is_that_of_its_paper(order):
    width, time = 6, 7
    layer, x = drawn(Hyena(width, order)), torch.randn(1, time, width, dtype=torch.float64)
    projected = F.pad(layer.project(x)[0].T, (2, 0))  # (N + 1) D channels, two zeros before the beginning
    taps, offset = layer.short.weight[:, 0], layer.short.bias
    u = torch.stack([(taps * projected[:, t : t + 3]).sum(1) + offset for t in range(time)], 1)
    gates, z = u[: order * width].unflatten(0, (order, width)), u[order * width :]
    filters = layer.filter(time)
    for n in range(order):
        h = filters[:, n * width : (n + 1) * width]
        sums = [sum(h[t - i] * z[:, i] for i in range(t + 1)) + layer.bias[n] * z[:, t] for t in range(time)]
        z = gates[n] * torch.stack(sums, 1)
    torch.testing.assert_close(layer(x)[0], layer.output(z.T), atol=1e-8, rtol=1e-6)


def test_hyenas_filters_are_those_of_its_paper():
    layer = drawn(Hyena(4)).filter
    t = 5 / HORIZON
    h = torch.tensor([t, math.cos(2 * math.pi * t), -math.sin(2 * math.pi * t)], dtype=torch.float64)
    for linear in layer.maps:
        h = torch.sin(layer.frequency * (linear.weight @ h + linear.bias))
    window = torch.exp(-layer.alpha * t) + SHIFT
    torch.testing.assert_close(layer(8)[5], (layer.last.weight @ h) * window, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layer(8), layer(300)[:8])


@pytest.mark.parametrize("name", OTHERS)
def test_other_mixers_are_named_and_see_no_future(name):
    assert known(name) == display(name) == name
    assert colour(name).startswith("#")
    torch.manual_seed(0)
    layer, x = build_mixer(name, 32, 4), torch.randn(2, 9, 32)
    changed = x.clone()
    changed[:, 6:] += 1
    before, after = layer(x), layer(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], atol=1e-5, rtol=1e-5)
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-3
    torch.testing.assert_close(layer(x[:, :4]), before[:, :4], atol=1e-5, rtol=1e-5)


def test_one_rule_leaves_the_maps_of_hyenas_filters_alone():
    blocks = mixer_blocks("Hyena", 32, 4, 1, 192)
    before = blocks[0].layer.filter.last.weight.clone()
    initialise(blocks, "normal")
    assert torch.equal(blocks[0].layer.filter.last.weight, before)
    decayed = set(decayed_names(blocks)) - set(decayed_names(mixer_blocks("softmax", 32, 4, 1, 192)))
    assert decayed == {"0.layer.project.weight", "0.layer.short.weight"}
    assert blocks[0].layer.project.weight.std().item() == pytest.approx(0.02, rel=0.1)
