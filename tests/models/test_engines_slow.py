"""Continuous batching, FlexAttention, models and rows split over processes: each equals one model over whole rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import split_models
import torch
from processes import printed, torchrun
from test_engines import FAMILIES, left_padded, served, small_model, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("engine", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["full", "grouped", "window", "window_in_one_layer", "slim_gates", "split"])
def test_continuous_batching_writes_what_generate_writes(family, engine):
    """Prompts of 1 to 30 tokens, prefilled in chunks of at most 24 tokens: rows join and end while others run."""
    model, of = small_model(**FAMILIES[family]), torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 53, (n,), generator=of).tolist() for n in (1, 17, 5, 30, 3, 11)]
    how = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=7, pad_token_id=0)
    written = [model.generate(torch.tensor([p]), generation_config=how)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation(engine)
    small = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=24)
    done = model.generate_batch(prompts, generation_config=how, continuous_batching_config=small, progress_bar=False)
    numbered = sorted(done.items(), key=lambda item: int(item[0].rsplit("_", 1)[1]))
    assert [request.generated_tokens for _, request in numbered] == written


@pytest.mark.skipif(not shutil.which("g++"), reason="FlexAttention on a CPU is compiled by g++")
def test_flex_attention_reads_what_the_exact_form_reads():
    model, ids = small_model(), tokens(2, 13)
    mask = left_padded(ids, (13, 9))
    with torch.no_grad():
        exact, flex = model(ids, attention_mask=mask).logits, served(model, "flex_attention", ids, attention_mask=mask)
    torch.testing.assert_close(flex.logits[mask.bool()], exact[mask.bool()], rtol=1e-4, atol=1e-4)


def on_processes(what: str, processes: int, folder: Path) -> dict:
    """What tests/support/split_models.py finds under torchrun."""
    torchrun(processes, split_models.__file__, what, str(folder))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("processes", [2, 4])
def test_a_model_split_by_heads_reads_and_learns_as_one(processes, tmp_path):
    for name, found in on_processes("heads", processes, tmp_path).items():
        for what in ("logits", "loss", "weights"):
            assert found[what] < 1e-5, (name, what, found)
        assert found["same names"], name
        whole = "mamba" in name  # its mixers share B and C, and stay whole
        assert found["share"] < (0.95 if whole else 1 / processes + 0.15), (name, found)


@pytest.mark.parametrize("processes", [2, 4])
def test_rows_split_over_processes_are_read_and_learnt_from_as_whole_ones(processes, tmp_path):
    """Every prior, with the conditioner and without; padding, documents, a window, recomputed activations."""
    for name, found in on_processes("rows", processes, tmp_path).items():
        assert max(found.values()) < 1e-5, (name, found)


WHOLE = """
import torch
from small_models import small_model, tokens
model, ids = small_model(mixer={"use_conv": False}), tokens(1, 5)
model.set_attn_implementation("sdpa")
with torch.no_grad():
    compiled = torch.compile(model, backend="eager", fullgraph=True)(ids)
torch.testing.assert_close(compiled.logits, model(ids).logits)
"""


def test_a_model_of_an_engine_is_one_graph():
    """In a process of its own: the shape checks of the other tests break graphs."""
    printed("-c", WHOLE)
