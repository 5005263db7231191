"""What the conditioner's kernels err by in Triton's interpreter, and the plain form, as JSON.

Against the definition in float64, relative to the norm of what is compared: h, the last state, and the gradients of
f, u, a, LayerNorm's weight and bias, and the state before. Arguments: cases as JSON, or the name of a function below.
"""

import json
import sys
from functools import partial

import interpreted  # noqa: F401  (before any kernel)
import torch
import torch.nn.functional as F
from naive_conditioner import naive_conditioner
from torch import Tensor, nn

from fem import FreeEnergyMixerConfig
from fem.conditioner import TimeDecayConditioner
from fem.ops.common.tokens import Tokens, read_tokens
from fem.ops.conditioner import fused_conditioner as fused
from fem.ops.conditioner.plain_conditioner import ConvForm, plain_condition

NAMES = ("h", "last", "f", "u", "a", "weight", "bias", "hidden")
SIZES = {name: getattr(fused, name) for name in ("NUMBERS", "MOST")}


def relative(x: Tensor, wanted: Tensor) -> float:
    return ((x.double() - wanted).norm() / wanted.norm().clamp_min(1e-9)).item()


def errors(batch: int, time: int, width: int, said: dict) -> dict[str, tuple[float, float]]:
    """Of every result, the error of the kernels and of the plain form."""
    torch.manual_seed(0)
    dtype = getattr(torch, said.get("dtype", "float32"))
    out, graded = getattr(torch, said.get("out", said.get("dtype", "float32"))), said.get("grads", NAMES[:2])
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


def layer(backend: str, **fields) -> TimeDecayConditioner:
    torch.manual_seed(0)
    conditioner = TimeDecayConditioner(
        FreeEnergyMixerConfig(n_embd=136, n_head=4, conv_hidden=8, backend=backend, **fields)
    )
    with torch.no_grad():
        for parameter in conditioner.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return conditioner


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


def layers() -> dict[str, float]:
    """How far a layer that takes the kernels is from one that does not, once and twice differentiated."""
    far = {}
    bare = {"conv_norm_first": False, "bias": False}
    for name, twice, fields in (("once", False, {}), ("twice", True, {}), ("no first norm, no bias", False, bare)):
        found, wanted = (differentiated(layer(backend, **fields), twice) for backend in ("triton", "plain"))
        far[name] = max(relative(x, y.double()) for x, y in zip(found, wanted, strict=True))
    return far


def compiled() -> dict[str, int | float]:
    """How far a compiled layer is from itself, and how often its one graph calls the kernels."""
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if "conditioner" in str(node.target)])
        return graph.forward

    conditioner = layer("triton")
    found = differentiated(torch.compile(conditioner, backend=keep, fullgraph=True))
    far = max(relative(x, y.double()) for x, y in zip(found, differentiated(conditioner)))
    traced = differentiated(torch.compile(conditioner, backend="aot_eager", fullgraph=True, dynamic=True))
    far = max(far, *(relative(x, y.double()) for x, y in zip(traced, found)))
    return {"far": far, "graphs": len(graphs), "calls": sum(map(len, graphs))}


if __name__ == "__main__":
    if sys.argv[1] in ("layers", "compiled"):
        print(json.dumps(globals()[sys.argv[1]]()))
    else:
        found = {}
        for name, (*shape, said) in json.loads(sys.argv[1]).items():
            for constant, usual in SIZES.items():
                setattr(fused, constant, said.get(constant, usual))
            found[name] = errors(*shape, said)
        print(json.dumps(found))
