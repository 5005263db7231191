"""The choice of a backend by measurement, with clocks and candidates put in."""

import subprocess
import sys

import pytest
import torch

from fem.experiments import doctor
from fem.ops.common import fastest
from fem.ops.common.backend import softmax_backend
from fem.ops.common.fastest import Fastest
from fem.ops.softmax import choice as softmax_choice
from fem.ops.softmax import read as softmax


class Clock:
    """Runs a step once and says what it was told."""

    def __init__(self, **seconds):
        self.seconds, self.calls = seconds, []

    def __call__(self, step):
        name = step()
        self.calls.append(name)
        return self.seconds[name]


def steps(*names):
    return {name: (lambda name=name: name) for name in names}


def test_the_fastest_is_taken_and_measured_once_for_each_kind():
    clock = Clock(a=2.0, b=1.0)
    choice = Fastest(clock)
    assert [choice.choose(kind, steps("a", "b")) for kind in ("one", "one", "two", "one")] == ["b"] * 4
    assert clock.calls == ["a", "b", "a", "b"]
    assert choice.seconds == {"one": {"a": 2.0, "b": 1.0}, "two": {"a": 2.0, "b": 1.0}}


def test_a_candidate_that_fails_is_out_and_the_first_stands_in_for_all():
    def fails():
        raise ValueError("too wide")

    choice = Fastest(Clock(b=1.0))
    assert choice.choose("some", {"a": fails} | steps("b")) == "b"
    assert choice.choose("none", {"a": fails, "b": fails}) == "a"


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch):
    clock = Clock(a=2.0, b=1.0)
    choice = Fastest(clock)
    monkeypatch.setattr(fastest, "_may_measure", lambda: False)
    assert choice.choose("kind", steps("a", "b")) == "a"
    assert clock.calls == []
    assert choice.seconds == {}
    monkeypatch.undo()
    assert choice.choose("kind", steps("a", "b")) == "b"
    monkeypatch.setattr(fastest, "_may_measure", lambda: False)
    assert choice.choose("kind", steps("a", "b")) == "b"


def reads(monkeypatch, **seconds):
    """auto chooses on this CPU as it does on CUDA, between backends that take so many seconds."""
    timed = []

    def clock(step):
        step()
        timed.append(step.args[0])
        return seconds[step.args[0]]

    monkeypatch.setattr(softmax, "softmax_backend", lambda backend, device: backend)
    monkeypatch.setattr(softmax_choice, "fastest", Fastest(clock))
    monkeypatch.setattr(softmax_choice, "CANDIDATES", tuple(seconds))
    return timed


def draw(time, trains=False):
    q, k, v = torch.randn(1, time, 2, 8), torch.randn(1, time, 2, 8), torch.randn(1, time, 2, 4)
    return q.requires_grad_(trains), k, v, torch.ones(2, 4)


def test_a_measurement_draws_nothing_from_the_random_state(monkeypatch):
    reads(monkeypatch, sdpa=2.0, plain=1.0)
    arguments = draw(9)
    before = torch.get_rng_state()
    softmax.softmax_read(*arguments)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("trains", [False, True])
def test_auto_reads_by_the_fastest_backend_and_by_nothing_else(monkeypatch, trains):
    timed = reads(monkeypatch, sdpa=2.0, plain=1.0)
    arguments = draw(9, trains)
    own = softmax.softmax_read(*arguments)
    assert timed == ["sdpa", "plain"]
    for a, b in zip(own, softmax.softmax_read(*arguments, backend="plain")):
        assert torch.equal(a, b)
    softmax.softmax_read(*draw(12, trains))
    assert len(timed) == 2
    softmax.softmax_read(*draw(19, trains))
    assert len(timed) == 4


def test_training_and_inference_masks_and_windows_are_kinds_of_their_own(monkeypatch):
    timed = reads(monkeypatch, sdpa=1.0, plain=2.0)
    softmax.softmax_read(*draw(9))
    softmax.softmax_read(*draw(9, trains=True))
    softmax.softmax_read(*draw(9), window=3)
    softmax.softmax_read(*draw(9), bias=torch.zeros(1, 9))
    assert len(timed) == 8
    rules = {kind.rules for kind in softmax_choice.fastest.seconds}
    assert rules == {("causal",), ("causal", "window"), ("causal", "bias")}


def test_float64_and_a_mean_alone_are_not_measured(monkeypatch):
    timed = reads(monkeypatch, sdpa=1.0, plain=2.0)
    q, k, v, beta = draw(5)
    softmax.softmax_read(q, k, v, None)
    softmax.softmax_read(q.double(), k.double(), v.double(), beta.double())
    assert timed == []


SCRIPT = """
import torch
from fem.ops.softmax import choice as softmax_choice, read as softmax
softmax.softmax_backend = lambda backend, device: backend
q, k, v, beta = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 4), torch.ones(2, 4)
read = torch.compile(lambda *x: softmax.softmax_read(*x).free_energy, backend="aot_eager", fullgraph=True)
torch.testing.assert_close(read(q, k, v, beta), softmax.softmax_read(q, k, v, beta, backend="sdpa").free_energy)
assert softmax_choice.fastest.seconds == {}
"""


def test_a_traced_read_takes_the_first_candidate_and_measures_nothing():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_backends_by_device():
    assert softmax_backend("auto", torch.device("cpu")) == "sdpa"
    assert softmax_backend("auto", torch.device("cuda")) == "auto"
    assert softmax_backend("sdpa", torch.device("cuda")) == "sdpa"
    assert softmax_backend("auto", torch.device("mps")) == "plain"
    with pytest.raises(ValueError, match="runs on CPU and CUDA"):
        softmax_backend("sdpa", torch.device("mps"))


def test_doctor_tells_what_was_measured_and_what_auto_takes_from_it(monkeypatch):
    measured = Fastest()
    kind = softmax_choice.ReadKind("cuda:0", "bfloat16", True, ("causal",), (64, 32), 1, 4096, 4096)
    measured.seconds[kind] = {"sdpa": 0.002, "triton": 0.001}
    measured.seconds[kind._replace(dtype="float32")] = {"sdpa": 0.002}
    monkeypatch.setattr(doctor, "fastest", measured)
    one, other = doctor.measured()
    assert (one["sdpa ms"], one["triton ms"], one["auto takes"]) == (2.0, 1.0, "triton")
    assert (other["triton ms"], other["auto takes"]) == (None, "sdpa")
