"""The conditioner's kernels in Triton's interpreter, against the definition: `test_kernels.py` runs this file.
Errors are relative to the norm of what is compared.
"""

import interpreted  # noqa: F401  (before any kernel)

# isort: split

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from layers import stirred
from naive_conditioner import naive_conditioner
from torch import Tensor, nn

from fem import FreeEnergyMixerConfig
from fem.conditioner import TimeDecayConditioner
from fem.ops.common.tokens import Tokens, read_tokens
from fem.ops.conditioner import fused_conditioner as fused
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

torch.set_num_threads(1)
NAMES = ("h", "last", "f", "u", "a", "weight", "bias", "hidden")  # gradients from the third on
# batch, time, width, and what else is said of a case
CASES = {
    "documents and padding in two chunks": (2, 71, 5, {"documents": True, "padding": True}),
    "one token": (2, 1, 16, {}),
    "a shut gate without a state before": (1, 37, 8, {"a": -20.0, "hidden": False}),
    "the paper's form": (1, 37, 8, {"form": "paper"}),
    "documents": (2, 37, 8, {"documents": True}),
    "padding": (2, 37, 8, {"padding": True}),
    "the gradient of h alone": (1, 37, 8, {"grads": ["h"]}),
    "the gradient of the last state alone": (1, 37, 8, {"grads": ["last"]}),
    "no memory": (1, 37, 8, {"f": 14.0}),
    "the authors' form": (1, 37, 8, {"form": "authors"}),
    "a prime number of tokens in three chunks": (1, 131, 24, {"documents": True}),
    "chunks of many tiles": (2, 67, 5, {"NUMBERS": 64, "MOST": 2, "padding": True}),
    "more chunks than are added up at a time": (2, 97, 5, {"NUMBERS": 64, "documents": True}),
    "a long memory": (1, 131, 5, {"f": -12.0}),
    "a gate shut beyond the least length": (1, 37, 8, {"a": -30.0}),
    "a wide gate": (1, 37, 8, {"a": 30.0}),
    "large inputs": (1, 37, 8, {"u": 1000.0}),
    "bfloat16": (2, 37, 24, {"dtype": torch.bfloat16, "documents": True}),
    "float16": (2, 37, 24, {"dtype": torch.float16, "padding": True}),
    "float32 out of bfloat16": (1, 37, 8, {"dtype": torch.bfloat16, "out": torch.float32}),
}

# A card's e^-12, e^-20 and e^-30 are off by 16, 25 and 37 roundings; three products in TF32 keep 22 bits of 24.
OF_A_CARD = {
    "a long memory": (2, 2e-6),
    "a shut gate without a state before": (2, 2e-6),
    "a gate shut beyond the least length": (2, 5e-6),
    "large inputs": (4, 1e-6),
}


def relative(x: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return ((x.double() - wanted).norm() / wanted.norm().clamp_min(1e-9)).item()


def errors(batch: int, time: int, width: int, said: dict) -> dict[str, tuple[float, float]]:
    """Of every result, the error of the kernels and of the plain form."""
    dtype = said.get("dtype", torch.float32)
    out, graded = said.get("out", dtype), said.get("grads", NAMES[:2])
    autocast = torch.autocast("cpu", dtype, enabled=out != dtype)
    shifts = torch.tensor([said.get(name, 0.0) for name in "fua"]).repeat_interleave(width)
    projected = (1.5 * torch.randn(batch, time, 3 * width) + shifts).to(dtype)
    weight, bias = 1 + 0.3 * torch.randn(width), 0.3 * torch.randn(width)
    hidden = torch.randn(batch, width) if said.get("hidden", True) else None
    keep = torch.rand(batch, time) > 0.3 if "padding" in said else None
    start = torch.rand(batch, time) > 0.9 if "documents" in said else None
    if keep is not None and start is not None:
        start &= keep
    grads = torch.randn(batch, time, width).to(out), torch.randn(batch, width)
    tokens, name = Tokens(keep, start, None, None), said.get("form", "scaled")
    multiplied = ConvForm.named(name, width)

    def by_kernels(projected, weight, bias, hidden):
        """With the identity for a map, and no norm before it."""
        norm, project = nn.LayerNorm(width), nn.Linear(3 * width, 3 * width)
        norm.weight, norm.bias = weight, bias
        project.weight, project.bias = nn.Parameter(torch.eye(3 * width).to(out)), None
        maps = nn.Identity(), project, norm
        assert fused.fits("triton", projected, hidden, *maps)
        with autocast:
            features, last = fused.fused_condition(projected.to(out), tokens, hidden, *maps, multiplied)
        assert torch.equal(features[..., : 3 * width], projected.to(out))
        return features[..., 3 * width :], last

    def by_torch(projected, weight, bias, hidden):
        norm = partial(F.layer_norm, normalized_shape=(width,), weight=weight.to(dtype), bias=bias.to(dtype))
        h, last = plain_condition(projected, tokens, hidden, norm, multiplied)
        return h.to(out), last

    def by_definition(projected, weight, bias, hidden):
        return naive_conditioner(projected, weight, bias, keep, start, hidden, form=name)

    def results(form, real) -> list[Tensor]:
        leaves = [None if x is None else nn.Parameter(x.to(real)) for x in (projected, weight, bias, hidden)]
        leaves[0] = nn.Parameter(projected.to(real if real == torch.float64 else dtype))
        outputs = form(*leaves)
        pairs = [(y, d.to(y.dtype)) for name, y, d in zip(NAMES, outputs, grads) if name in graded]
        torch.autograd.backward(*zip(*pairs))
        gradients = [None if x is None else torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return [*outputs, *gradients[0].chunk(3, -1), *gradients[1:]]

    wanted = results(by_definition, torch.float64)
    found, again, other = (results(form, torch.float32) for form in (by_kernels, by_kernels, by_torch))
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(found, again)), "another result the second time"
    every = zip(NAMES, found, other, wanted)
    return {name: (relative(x, y), relative(p, y)) for name, x, p, y in every if x is not None}


@pytest.mark.parametrize("case", CASES)
def test_kernels_err_no_more_than_the_plain_form(case, monkeypatch):
    """In float32 by at most twice as much, or 8 roundings; in 16 bits, where the kernels round less, by no more."""
    *sizes, said = CASES[case]
    for constant in {"NUMBERS", "MOST"} & said.keys():
        monkeypatch.setattr(fused, constant, said[constant])
    found = errors(*sizes, said)
    assert len(found) == (8 if said.get("hidden", True) else 7)
    factor, least = OF_A_CARD.get(case, (1.02 if "float" in case else 2, 1e-6))
    worse = {name: errors for name, errors in found.items() if not errors[0] <= max(factor * errors[1], least)}
    assert not worse, f"errors of the kernels and of the plain form: {worse}"


def layer(backend: str, **fields) -> TimeDecayConditioner:
    torch.manual_seed(0)
    sizes = {"n_embd": 136, "n_head": 4, "conv_hidden": 8}
    return stirred(TimeDecayConditioner(FreeEnergyMixerConfig(**sizes, backend=backend, **fields)))


def differentiated(call, twice: bool = False) -> list[Tensor]:
    """[x, h], the last state and all gradients of a layer with documents and padding; twice: of the first one."""
    x = (0.5 + torch.randn(2, 37, 136, generator=torch.Generator().manual_seed(1))).requires_grad_()
    mask = torch.arange(37).expand(2, -1) > torch.tensor([[0], [5]])
    ids = torch.arange(37).div(9, rounding_mode="floor").expand(2, -1)
    features, last = call(x, read_tokens((2, 37), x.device, mask, ids)[0])
    loss = features.square().sum() + last.square().sum()
    leaves = [x, *call.parameters()]
    gradients = torch.autograd.grad(loss, leaves, create_graph=twice)
    if twice:
        gradients = torch.autograd.grad(gradients[0].square().sum(), leaves, materialize_grads=True)
    return [features, last, *gradients]


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(map(relative, found, wanted))


BARE = {"conv_norm_first": False, "bias": False}


@pytest.mark.parametrize("twice, fields, within", [(False, {}, 3e-6), (True, {}, 1e-5), (False, BARE, 3e-6)])
def test_a_layer_by_kernels_is_the_plain_one_twice_differentiable(twice, fields, within):
    found, wanted = (differentiated(layer(backend, **fields), twice) for backend in ("triton", "plain"))
    assert far(found, wanted) < within


def test_a_compiled_layer_calls_the_kernels_in_one_graph():
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if "conditioner" in str(node.target)])
        return graph.forward

    conditioner = layer("triton")
    found = differentiated(torch.compile(conditioner, backend=keep, fullgraph=True))
    assert far(found, differentiated(conditioner)) < 3e-6
    assert list(map(len, graphs)) == [1]
    traced = differentiated(torch.compile(conditioner, backend="aot_eager", fullgraph=True, dynamic=True))
    assert far(traced, found) < 3e-6
