"""Forward and backward as one graph. In a process of its own: the shape checks of the other tests break graphs."""

import shutil
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from layers import FAMILIES
from processes import printed

from fem.ops.common.backend import exporting
from fem.ops.common.operator import operator

SCRIPT = """
import sys, torch
from fem import FreeEnergyMixer, FreeEnergyMixerConfig
torch.set_num_threads(1)
torch.manual_seed(0)
backend, families = sys.argv[1], eval(sys.argv[2])
for name, fields in families.items():
    for causal in (True, False):
        layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=32, n_head=4, causal=causal, **fields))
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        x, keep = torch.randn(2, 13, 32), torch.rand(2, 13) > 0.3
        for mask in (None, keep):
            results = []
            for run in (layer, compiled):
                layer.zero_grad()
                y = run(x, attention_mask=mask)
                y.square().sum().backward()
                results.append([y, *(p.grad.clone() for p in layer.parameters())])
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
        documents = (torch.arange(13) // 4).expand(2, -1)
        with torch.no_grad():
            found = [run(x, keep, documents)[keep] for run in (layer, compiled)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        torch.compiler.reset()
        if causal:
            with torch.no_grad():
                _, state = layer(x[:, :9], return_state=True)
                def step(x, state):
                    y, state = layer(x, state=state, return_state=True)
                    return y, state.clone().detach().tensors()
                compiled = torch.compile(step, fullgraph=True, backend="eager")
                for more in (x[:, 9:10], x[:, 9:]):
                    torch.testing.assert_close(compiled(more, state), step(more, state), rtol=1e-5, atol=1e-6)
            torch.compiler.reset()
    print("whole:", name, flush=True)
"""


GRAPHS = """
import sys, torch
from torch._dynamo.backends.common import aot_autograd
from functorch.compile import make_boxed_func
from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
torch.set_num_threads(1)
for name in PRIORS.keys() - {"softmax"}:
    torch._dynamo.reset()
    layer, graphs = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=16, n_head=2, prior_type=name)), []
    count = lambda graph, _: graphs.append(1) or make_boxed_func(graph.forward)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    for time in (3, 16, 17, 63, 64, 65, 128, 129, 300, 1100):
        x = torch.randn(2, time, 16)
        y = compiled(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2, (name, len(graphs))  # forward and backward
    for sizes in (None, ({1: torch.export.Dim("T", min=2, max=4096)},)):
        exported = torch.export.export(layer, (torch.randn(2, 70, 16),), dynamic_shapes=sizes).module()
        x = torch.randn(2, 70 if sizes is None else 133, 16)
        torch.testing.assert_close(exported(x), layer(x), rtol=1e-4, atol=1e-5)
"""

SPLIT = """
import torch
from fem import FreeEnergyMixer, FreeEnergyMixerConfig
layer, x = FreeEnergyMixer(FreeEnergyMixerConfig.split(n_embd=32, n_head=4)), torch.randn(2, 7, 32)
compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(x), layer(x))
"""

CONVOLVED = """
import torch
from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.priors import OperatorPrior
taps, pad = torch.rand(16, 1, 3), torch.nn.functional.pad
op = lambda x: torch.conv1d(pad(x.mT, (2, 0)), taps, groups=16).mT
layer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=32, n_head=4, use_conv=False), OperatorPrior(op))
x, compiled = torch.randn(2, 9, 32), torch.compile(layer, dynamic=True)
torch.testing.assert_close(compiled(x), layer(x))
"""


@pytest.mark.slow
def test_any_length_of_a_scan_is_one_graph_and_exports():
    printed("-c", GRAPHS)


def test_the_share_of_split_values_is_no_symbol_of_a_graph_of_any_length():
    printed("-c", SPLIT)


def run(backend, families):
    assert printed("-c", SCRIPT, backend, repr(families)).count("whole:") == len(families)


@pytest.mark.parametrize("graphed", [False, True])
def test_what_no_cuda_graph_holds_is_refused_where_they_are_made_of_parts(graphed):
    """Inductor loses data there; the settings of the process stay as they were."""
    from torch._inductor import config
    from torch._subclasses import FakeTensorMode

    copied = operator(f"copied_{graphed}(Tensor x) -> Tensor", graphed=graphed)(lambda x: x.clone())
    copied.register_fake(torch.empty_like)
    before = config.save_config_portable()
    with FakeTensorMode():
        on_card = torch.empty(2, device="cuda")
        for graphs, parts, device in product((False, True), (False, True), ("cuda", "cpu")):
            refused = not graphed and graphs and parts and device == "cuda"
            with config.patch({"triton.cudagraphs": graphs, "graph_partition": parts}):
                expected = pytest.raises(RuntimeError, match="graph_partition") if refused else nullcontext()
                with expected:
                    copied(on_card if device == "cuda" else torch.empty(2))
    assert config.save_config_portable() == before


def test_a_stored_graph_calls_no_operator_of_other_arguments():
    """Inductor stores graphs on disk, which call operators by name and may outlive the version that made them."""
    one, other = (operator(f"stored(Tensor x{more}) -> Tensor")(torch.clone) for more in ("", ", int n"))
    assert one._qualname != other._qualname


def test_no_operator_has_two_arguments_of_one_name():
    """Inductor, which compiles for users, makes a Python signature of them; the other backends do not."""
    own = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fem::")]
    assert any(schema.name.startswith("fem::channel_scan_") for schema in own)
    for schema in own:
        names = [argument.name for argument in schema.arguments]
        assert len(names) == len(set(names)), schema


def test_a_compiled_graph_is_not_an_exported_one():
    assert torch.compile(lambda x: x + exporting(), backend="eager")(torch.zeros(1)) == 0


@pytest.mark.slow
def test_every_layer_is_one_graph_forward_and_backward():
    run("aot_eager", FAMILIES)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the path")
def test_inductor_computes_the_same():
    run("inductor", {name: FAMILIES[name] for name in ("softmax", "softmax window", "rnn_decay")})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the path")
def test_inductor_compiles_a_convolution_as_a_prior_for_any_length():
    printed("-c", CONVOLVED)
