"""`backend="auto"` takes kernels on CUDA where a check on that card has passed, and the plain form wherever not."""

import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fem.experiments.doctor import checks
from fem.ops.common import backend, self_check
from fem.ops.common.backend import scan_backend
from fem.ops.common.self_check import Kind

GPU = torch.device("cuda:0")
KIND = Kind("decay_scan", torch.float32)


@pytest.fixture(autouse=True)
def a_card(monkeypatch, tmp_path):
    """A machine with one card, where nothing has been checked yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(self_check, "card", lambda index: "a card")
    monkeypatch.setattr(self_check, "_known", {})
    monkeypatch.setattr(self_check, "_warned", False)
    self_check.setting.cache_clear()
    yield
    self_check.setting.cache_clear()


def says(why, status=0, errors=""):
    """A process that ends so; it counts how often it is started."""

    def process(kind, device):
        process.started += 1
        return subprocess.CompletedProcess([], status, "noise\n" + json.dumps({"why": why}) + "\n", errors)

    process.started = 0
    return process


def auto(dtype=torch.float32, device=GPU):
    return scan_backend("auto", device, "decay_scan", dtype)


def test_kernels_that_passed_are_taken_and_checked_once_on_a_card(monkeypatch):
    process = says(None)
    monkeypatch.setattr(self_check, "_in_a_process", process)
    assert auto() == auto() == "triton"
    monkeypatch.setattr(self_check, "_known", {})  # as in the next process
    assert auto() == "triton"
    assert process.started == 1
    assert auto(torch.bfloat16) == "triton"  # another kind
    assert process.started == 2
    monkeypatch.setattr(self_check, "_known", {})
    monkeypatch.setattr(self_check, "card", lambda index: "another card")
    self_check.setting.cache_clear()
    auto()
    assert process.started == 3


class PTXASError(Exception):
    pass


@pytest.mark.parametrize(
    "error", [KeyError("maxnreg"), PTXASError("ptxas died"), RuntimeError("x"), OSError("no fork")]
)
def test_a_failure_of_any_type_is_read_by_the_plain_form_with_one_warning(monkeypatch, error):
    def fails(kind, device):
        raise error

    monkeypatch.setattr(self_check, "_in_a_process", fails)
    with pytest.warns(UserWarning, match=rf"without our kernels: .*{type(error).__name__}.*fem doctor"):
        assert auto() == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert auto() == auto(torch.bfloat16) == "plain"
    assert list(self_check.verdicts()) == []  # it may work tomorrow


@pytest.mark.parametrize(("process", "kept"), [(says("off by 3"), 1), (says(None, 1, "Fatal\nCUDA error: x"), 0)])
def test_only_a_check_that_came_to_its_end_is_kept(monkeypatch, process, kept):
    monkeypatch.setattr(self_check, "_in_a_process", process)
    with pytest.warns(UserWarning, match="off by 3|CUDA error: x"):
        assert auto() == "plain"
    assert [found["passed"] for found in self_check.verdicts()] == [False] * kept


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(self_check, "_in_a_process", says(None))
    assert auto() == "triton"
    assert list(self_check.verdicts()) == []


def test_half_a_file_is_no_verdict(monkeypatch):
    monkeypatch.setattr(self_check, "_in_a_process", says(None))
    auto()
    (path,) = self_check.folder().glob("*.json")
    path.write_text(path.read_text()[:20])
    assert self_check.stored(KIND, 0) is None
    assert list(self_check.verdicts()) == []


def test_nothing_is_checked_while_a_graph_is_traced(monkeypatch):
    process = says(None)
    monkeypatch.setattr(self_check, "_in_a_process", process)
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def read(x):
        return x + (1 if scan_backend("auto", GPU, "decay_scan", torch.float32) == "triton" else 2)

    with pytest.warns(UserWarning, match="no eager call has checked"):
        seen.append(read(torch.zeros(())).item())
    assert process.started == 0
    assert auto() == "triton"  # an eager call checks
    torch.compiler.reset()
    seen.append(read(torch.zeros(())).item())
    assert (seen, process.started) == ([2, 1], 1)


def test_processors_float64_and_named_backends_are_never_checked(monkeypatch):
    process = says(None)
    monkeypatch.setattr(self_check, "_in_a_process", process)
    assert auto(device=torch.device("cpu")) == auto(torch.float64) == "plain"
    assert scan_backend("plain", GPU, "decay_scan", torch.float32) == "plain"
    monkeypatch.setattr(backend, "triton_interprets", lambda: True)
    assert auto() == "plain"
    assert process.started == 0


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (Linux only)")
def test_the_process_checks_and_says_what_it_found():
    root = Path(__file__).parents[2]
    for interpret, found in (("1", None), ("0", "runs on CUDA tensors")):
        environment = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        command = [sys.executable, "-W", "ignore", "-m", self_check.__name__, json.dumps(KIND.encoded()), "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        why = json.loads(done.stdout.splitlines()[-1])["why"]
        assert why is None if found is None else found in why


def test_every_read_names_a_kind_that_has_an_example(monkeypatch):
    from recurrences import case

    from fem.functional import decay_scan, keyed_scan_read
    from fem.ops.softmax.composed import composed_read

    kinds = []

    def record(requested, device, op, dtype, *arguments):
        kinds.append(Kind(op, dtype, arguments))
        return "plain"

    for read in ("linear_attention", "channel_scan", "ssm", "decay_scan"):
        monkeypatch.setattr(f"fem.ops.{read}.read.scan_backend", record)
    for kind in ("aft", "decay", "both", "ssm"):
        case(kind, 3).read()
    x = torch.rand(1, 3, 2, 5)
    decay_scan(-x, x)
    for decay in (None, -x[..., 0], -x):
        keyed_scan_read(x, x, x, None, decay)
    monkeypatch.setattr("fem.ops.softmax.recompute.scan_backend", record)
    composed_read(x, x, x, torch.ones(2, 5), None, None, None, True, 1.0)
    assert len(kinds) == 9
    if find_spec("triton") is not None:
        for kind in list(kinds):  # reading an example asks for a backend again
            example = self_check.example_of(kind, torch.Generator())
            assert example.read("plain", example.tokens | example.exact)


def test_doctor_checks_all_kinds_of_a_card_and_keeps_their_verdicts(monkeypatch):
    def process(kind, device):
        return says("off by 3" if kind.op == "ssm" else None)(kind, device)

    monkeypatch.setattr(self_check, "_in_a_process", process)
    rows = list(checks.scans(GPU))
    kinds = list(checks.kinds(GPU))
    assert [row["result"] for row in rows] == ["off by 3" if kind.op == "ssm" else "ok" for kind in kinds]
    assert len(list(self_check.verdicts())) == len(kinds) > 60
