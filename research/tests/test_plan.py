"""What `fem plan` says of a training, against models that are built and messages that were counted."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fem.mixer import FreeEnergyMixer
from fem.models import FEMForCausalLM
from fem.models.presets import count_parameters
from fem.train.recipe import PAPER_ROWS
from fem_research.plan.cost import (
    USABLE,
    Job,
    advice,
    cache_bytes,
    flops_per_token,
    longest,
    memory,
    messages,
    prediction,
    wires,
)
from fem_research.plan.model import FORMS, config_of, kept, weights
from fem_research.plan.settings import CARDS

ROOT = Path(__file__).parents[2]

COUNTED = [  # form, GPUs, of a layer, of a row, recompute: bytes that `benchmarks/titan_cpu.py count` counted
    ("full", 8, 1, 1, False, (6377856, 7426176, 0, 0)),
    ("full", 64, 1, 1, True, (6673152, 7721472, 0, 0)),
    ("full", 2, 2, 1, False, (0, 0, 2575360, 0)),
    ("full", 2, 1, 2, False, (6360448, 7408768, 0, 802816)),
    ("slim", 8, 1, 4, True, (6377600, 7425920, 0, 1507328)),
    ("split", 16, 2, 2, True, (3207808, 3731840, 1254912, 794624)),
    ("gla", 16, 4, 1, False, (1649344, 1911232, 2853888, 0)),
]
TINY = Job(size="tiny", form="slim", gpus=8, context=128, tokens=8 * 128)


@pytest.mark.parametrize("form", FORMS)
def test_planned_parameters_are_those_of_the_model(form):
    assert sum(w.count for w in weights("tiny", form)) == count_parameters(config_of("tiny", form))


@pytest.mark.parametrize(
    "form, counted", [("full", 121697048), ("slim", 159842648), ("split", 112939256), ("gla", 144922624)]
)
def test_planned_activations_are_what_a_block_keeps_on_a_card(form, counted):
    """counted: bytes kept of a row of 2048 tokens on the card that is not there (benchmarks/plan.py, docs/card.md)."""
    assert 2048 * kept("340m", form)[0] == pytest.approx(counted, rel=0.05)  # the plan's promise


@pytest.mark.parametrize("form", FORMS)
def test_planned_cache_is_keys_and_values_or_a_state_of_fixed_size(form):
    config = config_of("tiny", form)
    mixer = config.mixer_configs()[0]
    token = 2 * mixer.kv_heads * (mixer.key_width + mixer.value_width)  # bytes in bfloat16
    if form != "gla":
        assert cache_bytes("tiny", form, 300) - cache_bytes("tiny", form, 200) == 100 * config.num_hidden_layers * token
        return
    layer = FreeEnergyMixer(mixer).bfloat16().eval()
    with torch.no_grad():
        _, state = layer(torch.randn(1, 200, config.hidden_size).bfloat16(), return_state=True)
    kept = state.reorder(torch.zeros(1, dtype=torch.long)).nbytes  # every tensor by itself
    assert cache_bytes("tiny", form, 200) == config.num_hidden_layers * kept


def test_rows_over_any_number_of_processes_have_a_longest_row():
    job = Job(size="tiny", form="attention", gpus=12, rows_over=3, context=3072, tokens=12288)
    assert longest(job) % 1026 == 0


@pytest.mark.parametrize("form, gpus, tensor, rows_over, recompute, counted", COUNTED)
def test_planned_messages_are_those_that_torchtitan_sent(form, gpus, tensor, rows_over, recompute, counted):
    split = {"tensor": tensor, "rows_over": rows_over, "recompute": recompute}
    job = replace(TINY, form=form, gpus=gpus, micro=2, tokens=256 * gpus // (tensor * rows_over), **split)
    assert tuple(messages(job).values()) == counted


@pytest.mark.parametrize("form, reads", [("full", 2), ("slim", 2), ("split", 1), ("attention", 1)])
def test_planned_operations_are_those_of_fem_train_and_count_what_a_channel_reads(form, reads):
    from fem.train.throughput import flops_per_token as of_model

    job, (mixer, *more) = replace(TINY, form=form), config_of("tiny", form).mixer_configs()
    assert flops_per_token(job) == of_model(FEMForCausalLM(config_of("tiny", form)), 128)
    longer = flops_per_token(replace(job, gpus=1, context=256)) - flops_per_token(job)
    assert longer == 3 * 128 * (1 + len(more)) * (mixer.qk_dim + reads * mixer.fem_dim)


def test_shards_and_recomputing_take_less_memory():
    one, eight = memory(replace(TINY, gpus=1)), memory(TINY)
    assert eight["optimiser"] < one["optimiser"] / 7
    assert memory(TINY)["activations"] < memory(replace(TINY, recompute=False))["activations"] / 2


def test_the_longest_row_fits_and_twice_its_length_does_not():
    job = replace(TINY, context=longest(TINY), tokens=8 * longest(TINY))
    twice = replace(job, context=2 * job.context, tokens=2 * job.tokens)
    assert "and fits" in advice(job)
    assert "does not fit" in advice(replace(twice, micro=1)) or "no change" in advice(twice)


def test_messages_leave_the_machine_where_their_group_does():
    assert set(wires(TINY).values()) == {"NVLink"}
    larger = wires(replace(TINY, gpus=64, tensor=4, rows_over=4))
    assert larger == {"all-gather": "network", "reduce-scatter": "network", "all-reduce": "NVLink", "rows": "network"}


def test_no_step_is_faster_than_its_arithmetic():
    told = prediction(TINY)
    assert told["likely step"] >= told["step"] >= told["arithmetic"] > 0
    assert 0 < told["utilisation"] <= 1


def test_a_job_that_does_not_fit_is_told_what_to_change():
    job = Job(size="340m", form="full", gpus=8, micro=16, recompute=False)
    assert "does not fit: with micro=8 it needs" in advice(job)
    assert advice(replace(job, micro=8)).endswith("and fits.")


@pytest.mark.slow
def test_the_command_says_that_times_are_predictions():
    done = subprocess.run([sys.executable, "-m", "fem.cli", "plan", "--size", "tiny"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PREDICTED" in done.stdout
    assert "none of this ran on a GPU" in done.stdout


def test_the_paper_s_page_says_what_the_plan_says():
    page = (ROOT / "docs" / "paper.md").read_text()
    rows = re.findall(
        r"Table 2, .* (\d+)B tokens \| `?([\d.]+)`? (hours|days) .* `([\d.]+)` GB each.*fem plan (.*)` \|", page
    )
    assert len(rows) == 2
    for billions, time, unit, gigabytes, options in rows:
        words = options.replace("--", "").split()
        job = Job(**{name: int(x) if x.isdigit() else x for name, x in zip(words[::2], words[1::2])})
        days = int(billions) * 1e9 / prediction(job)["likely tokens a day"]
        assert float(time) == pytest.approx(days * (24 if unit == "hours" else 1), rel=0.1)
        assert gigabytes == f"{sum(memory(job).values()) / 1e9:.1f}"


def test_the_paper_s_page_trains_by_as_many_rows_as_a_gpu_holds():
    """Of DDP: weights, gradients and moments in float32, all of every block, logits in bfloat16, twice in float32."""
    page = (ROOT / "docs" / "paper.md").read_text()
    passes = re.findall(r"nproc-per-node (\d+) .*--recipe paper-340m(?: --micro-batch (\d+))?", page)
    assert len(passes) == 2
    count, config = sum(w.count for w in weights("340m", "full")), config_of("340m", "full")
    for processes, rows in passes:
        tokens = 4096 * int(rows or PAPER_ROWS // int(processes))
        activations = tokens * (config.num_hidden_layers * kept("340m", "full")[0] + 10 * config.vocab_size)
        assert 16 * count + activations < USABLE * CARDS["h100"].memory
