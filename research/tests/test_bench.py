"""`fem bench`: what is compared, how it is measured, and what is written."""

import json
import subprocess
import sys
from statistics import median

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fem import cli
from fem_research.bench import cases, experiment, workloads
from fem_research.bench.cases import PARTS, PROFILES, Case
from fem_research.bench.workloads import BASELINE, Size
from fem_research.common import measure, mixers
from fem_research.common.mixers import BASELINES

CPU = torch.device("cpu")
SMALL = Size(1, 24, 32, 2)
TINY = [
    Case("read", SMALL, "float32", cases.READS),
    Case("read", SMALL, "bfloat16", cases.READS),
    Case("layer", SMALL, "float32", cases.LAYERS),
    Case("single", SMALL, "float32", cases.SINGLE),
    Case("heads", SMALL, "float32", (BASELINE, "attention/h4", "FEM")),
    Case("gpt2", SMALL, "float32", ("RWKV7", BASELINE, "FEM"), layers=1),
    Case("table5", SMALL, "float32", (BASELINE, "attention, FEM's layer", "DiffTrans"), layers=1),
    *(Case("decode", Size(1, time, 32, 2), "float32", cases.DECODES) for time in (8, 16)),
    Case("served", Size(1, 8, 32, 2), "float32", cases.SERVED),
    *(Case("context", Size(1, time, 32, 2), "float32", cases.CONTEXTS) for time in (16, 32)),
]


def grown(function, case, names, threads):
    return {name: {"forward_extra_bytes": 1, "train_extra_bytes": 2} for name in names}


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(measure, "FEWEST_TURNS", 1)
    monkeypatch.setattr(workloads, "STRETCH", 3)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def test_fla_core_is_not_taken_for_flash_linear_attention(monkeypatch):
    """It has the package fla and no fla.layers."""
    monkeypatch.setattr(mixers, "find_spec", lambda name: None if name == "fla.layers" else object())
    assert not mixers.available("DeltaNet", torch.device("cuda"))
    assert mixers.available("Mamba (mamba-ssm)", torch.device("cuda"))
    assert not mixers.available("Mamba (mamba-ssm)", CPU)


def test_every_mixer_of_every_profile_is_known():
    for case in (case for profile in PROFILES.values() for case in profile if case.part != "read"):
        for name in case.mixers:
            with torch.device("meta"):
                assert name in BASELINES or workloads.build_mixer(name, case.size)


@pytest.mark.parametrize("name", ["attention", "attention+LTG", "GLA+LTG", "attention, plain", "GLA"])
def test_mixers_have_equal_linear_weights(name):
    mixer = workloads.build_mixer(name, Size(1, 4, 256, 4))
    weights = sum(module.weight.numel() for module in mixer.modules() if isinstance(module, nn.Linear))
    assert abs(weights / (4 * 256**2) - 1) < 0.006


@pytest.mark.parametrize(
    "name, stream",
    [
        ("attention", workloads.stream),
        ("FEM", workloads.stream),
        ("FEM-GLA", workloads.stream),
        ("attention", workloads.served),
        ("attention+LTG", workloads.served),
    ],
)
@torch.no_grad()
def test_what_is_timed_token_by_token_is_what_the_layer_computes(name, stream, quickly):
    layer, tokens = workloads.build_mixer(name, SMALL).eval(), torch.randn(5, 2, 1, 32)
    prompt = torch.randn(2, 9, 32)
    generate, _ = stream(layer, prompt, tokens)
    whole = layer(torch.cat([prompt, *tokens], 1))
    for _ in range(2):
        torch.testing.assert_close(torch.cat(generate(), 1), whole[:, 9:], rtol=1e-5, atol=1e-5)


SERVED = """
import torch
from fem_research.bench import cases, workloads
torch.manual_seed(0)
with torch.no_grad():
    for name in cases.SERVED:
        layer = workloads.build_mixer(name, workloads.Size(1, 24, 32, 2)).eval()
        prompt, tokens = torch.randn(1, 9, 32), torch.randn(5, 1, 1, 32)
        whole = layer(torch.cat([prompt, *tokens], 1))
        generate, _ = workloads.served(layer, prompt, tokens)
        for _ in range(2):
            torch.testing.assert_close(torch.cat(generate(), 1), whole[:, 9:], rtol=1e-5, atol=1e-5)
"""


@pytest.mark.slow
def test_a_served_token_is_one_graph_and_what_the_layer_computes():
    """In a process of its own: the shape checks of the other tests break graphs."""
    subprocess.run([sys.executable, "-c", SERVED], check=True)


def test_attention_and_fem_keep_2_d_numbers_per_token(quickly):
    streams = {name: workloads.stream(workloads.build_mixer(name, SMALL), *drawn()) for name in ("attention", "FEM")}
    assert streams["attention"][1] == 4 * 2 * 32 * 9
    assert 4 * 2 * 32 * 9 <= streams["FEM"][1] <= 4 * 2 * 32 * 9 + 300  # and a shift, a beta and a place
    for name in cases.SERVED:
        assert workloads.served(workloads.build_mixer(name, SMALL), *drawn())[1] == 4 * 2 * 32 * 9


def drawn():
    return torch.randn(1, 9, 32), torch.randn(2, 1, 1, 32)


def test_medians_are_of_alternating_turns_without_the_first(monkeypatch):
    order, seconds = [], iter([100.0, 200.0, 3.0, 1.0, 1.0, 5.0, 2.0, 9.0])
    monkeypatch.setattr(measure, "cpu_seconds", lambda step: step() or next(seconds))
    found = measure.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 1.0, CPU)
    assert order == ["a", "b"] * 4
    assert found == {"a": median([3, 1, 2]), "b": median([1, 5, 9])}


def test_operations_are_those_of_the_matrix_products():
    layer, x = nn.Linear(32, 48, bias=False), torch.randn(7, 32)
    assert measure.operations(lambda: layer(x)) == 2 * 7 * 32 * 48


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured on Linux alone")
def test_memory_is_the_peak_beyond_what_was_held():
    block = 512 << 20  # more than what an earlier test may have freed and the allocator kept
    held = torch.ones(block // 4)
    grown = measure.cpu_growth(lambda: torch.ones(block // 4).sum() + held[0])
    assert 0.95 * block <= grown < 1.5 * block


@pytest.mark.slow
def test_memory_of_a_case_is_measured_in_a_process_of_its_own():
    case = Case("layer", Size(1, 512, 64, 2), "float32", ("attention", "attention+LTG, plain"))
    found = measure.in_fresh_process(workloads.cpu_growths, case, list(case.mixers), 1)
    bytes_of = {name: growth["train_extra_bytes"] for name, growth in found.items()}
    assert bytes_of["attention+LTG, plain"] > 1.3 * bytes_of["attention"] > 0


def test_the_papers_ratios_stand_beside_ours():
    case = Case("gpt2", SMALL, "float32", tuple(cases.TABLE7), layers=1)
    costs = {"parameters": 2**20, "forward_s": 2.0, "train_s": 3.0, "forward_flop": 5e9, "train_flop": 15e9}
    costs |= {"forward_extra_bytes": 2**20, "train_extra_bytes": 4 * 2**20}
    found = {"attention": costs, "FEM": costs | {"forward_s": 2.2}}
    rows = {row["mixer"]: row for row in experiment.rows("gpt2", [(case, found)])}
    assert rows["FEM"]["forward ratio"] == "1.10 (1.13)"
    assert rows["FEM"]["train ratio"] == "1.00 (1.26)"
    assert rows["attention"]["train peak ratio"] == "1.00 (1.00)"
    assert rows["FEM"]["forward peak ratio"] == "1.00 (1.57)"
    assert rows["FEM"]["train FLOP ratio"] == "1.00 (1.01)"
    assert (rows["FEM"]["forward peak MiB"], rows["FEM"]["train peak MiB"]) == (5, 8)
    assert rows["FEM"]["forward tokens/s"] == pytest.approx(24 / 2.2)
    assert (rows["FEM"]["forward GFLOP"], rows["FEM"]["train MFLOP/token"]) == (5, 15e3 / 24)
    assert rows["RWKV7"]["forward ratio"] == "(1.28)"
    assert rows["RWKV7"]["forward ms"] is None


def test_a_baseline_needs_a_gpu_and_its_library(monkeypatch):
    case = Case("gpt2", SMALL, "float32", tuple(cases.TABLE7), layers=1)
    assert not workloads.runs(case, "RWKV7", CPU)
    monkeypatch.setattr(mixers, "find_spec", lambda name: None)
    assert not workloads.runs(case, "RWKV7", torch.device("cuda"))
    monkeypatch.setattr(mixers, "find_spec", lambda name: name)
    assert workloads.runs(case, "RWKV7", torch.device("cuda"))


@pytest.mark.parametrize(
    "name, error", [("FEM", torch.cuda.OutOfMemoryError("full")), ("HGRN2", TypeError("another version"))]
)
def test_a_mixer_that_runs_out_of_memory_or_whose_library_fails_is_left_out(monkeypatch, quickly, name, error):
    def fail():
        raise error

    real = workloads.workload

    def some_fail(case, named, device):
        return workloads.Workload(fail, fail, fail, 0) if named == name else real(case, named, device)

    monkeypatch.setattr(workloads, "workload", some_fail)
    monkeypatch.setattr(workloads, "runs", lambda case, name, device: True)
    monkeypatch.setattr(workloads, "in_fresh_process", grown)
    with pytest.warns(UserWarning, match=f"{name} is left out of layer"):
        found = workloads.measure(Case("layer", SMALL, "float32", ("attention", name)), CPU, 1e-9)
    assert list(found) == ["attention"]


def test_every_part_has_a_section_a_table_and_its_picture(monkeypatch, tmp_path, quickly):
    monkeypatch.setitem(PROFILES, "laptop", TINY)
    monkeypatch.setattr(workloads, "in_fresh_process", grown)
    shown = CliRunner().invoke(cli.app, ["bench", "--seconds", "1e-9", "--output", str(tmp_path / "bench")])
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "bench" / "report.md").read_text()
    assert "`fem bench" in page
    for part in PARTS:
        assert f"## {experiment.TITLES[part]}\n" in page
        assert (tmp_path / "bench" / f"{part}.csv").exists()
        assert (tmp_path / "bench" / f"{part}.png").exists() == (part in ("decode", "context"))
    records = json.loads((tmp_path / "bench" / "results.json").read_text())["bench"]
    assert [record["part"] for record in records] == [case.part for case in TINY]
    for record in records:
        assert all(costs for costs in record["results"].values())
        assert {"attention", "FEM"} & record["results"].keys()


@pytest.mark.parametrize("part", ["layer", "decode"])
def test_a_table_begins_with_the_mixer_which_stays_in_sight_while_it_scrolls(part):
    case = Case(part, SMALL, "float32", (BASELINE,))
    cost = {"token_s": 1.0, "state_bytes": 1, "forward_s": 1.0, "train_s": 1.0, "train_extra_bytes": 1}
    (row,) = experiment.rows(part, [(case, {BASELINE: cost})])
    assert next(iter(row)) == "mixer"
