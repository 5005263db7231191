"""`fem train --model` with the models of flash-linear-attention, whose kernels run in Triton's interpreter."""

import json
from dataclasses import asdict
from importlib.util import find_spec

import pytest
from processes import printed
from trainings import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("fla") is None or find_spec("fla.models") is None or find_spec("triton") is None,
        reason="needs free-energy-mixer[baselines] and Triton",
    ),
]
MODELS = {
    "delta_net": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2, "head_dim": 24, "expand_v": 1.0},
    "gsa": {"num_heads": 2, "num_slots": 16},
    "retnet": {"num_heads": 2, "expand_v": 1.0},
    "hgrn": {},
    "hgrn2": {"expand_ratio": 32},
    "mamba2": {"head_dim": 16, "state_size": 16, "chunk_size": 16},
    "gla": {"num_heads": 2},
}
# Three things need help in the interpreter: the autotuner, which has no driver to time with, takes the first
# configuration; Python's `range` gives integers without `.to`; and masks are not always of bools.
SCRIPT = """
import builtins, json, os, sys
from pathlib import Path
os.environ["TRITON_INTERPRET"] = "1"
import triton.runtime.autotuner as autotuner
from triton.runtime import interpreter
autotuner.Autotuner._bench = lambda self, *arguments, config=None, **options: [0.0, 0.0, 0.0]
class Index(int):
    def to(self, *_): return self
def kept(of_int):
    def call(self, other):
        found = of_int(self, other)
        return Index(found) if type(found) is int else found
    return call
for name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"):
    setattr(Index, name, kept(getattr(int, name)))
plain = lambda x: int(x.handle.data.item()) if hasattr(x, "handle") else int(x)
import fla.models
for name, module in list(sys.modules.items()):
    if name.startswith("fla.ops.") or name.startswith("fla.modules."):
        module.range = lambda *a: (Index(i) for i in builtins.range(*map(plain, a)))
builder = interpreter.InterpreterBuilder
def masked(method, at):
    def call(self, *arguments):
        arguments[at].data = arguments[at].data.astype(bool)
        return method(self, *arguments)
    return call
builder.create_masked_load = masked(builder.create_masked_load, 1)
builder.create_masked_store = masked(builder.create_masked_store, 2)
from fem.train import train
from fem.train.recipe import TrainRecipe
results = train.run(TrainRecipe(**json.loads(sys.argv[1])), Path(sys.argv[2]))["train"]
print("RESULT", json.dumps(results))
"""


@pytest.mark.parametrize("model", MODELS)
def test_a_baseline_of_table_2_trains_two_steps(data, tmp_path, model):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": True}
    recipe = tiny(data, architecture=model, model=json.dumps(sizes | MODELS[model]), max_steps=2, warmup_steps=1)
    given = json.dumps(asdict(recipe) | {"context": 32, "log_steps": 1})
    results = json.loads(printed("-c", SCRIPT, given, str(tmp_path)).partition("RESULT ")[2])
    assert results["step"] == 2
    assert results["val_loss"] == pytest.approx(5.6, abs=0.4)  # log 300
    assert results["grad_norm"] > 0
