"""The Python of the README, of the tutorial and of the pages on new priors and on serving runs as it stands."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
from fem.priors import OperatorPrior

ROOT = Path(__file__).parents[2]
TYPED = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


def blocks(page: str | Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def names_after(page: str) -> dict:
    """The page's names after its code has run, as one script."""
    names = {}
    torch.manual_seed(0)
    for block in blocks(page):
        exec(block, names)
    return names


def test_the_readmes_examples_run_one_after_the_other():
    names = names_after("README.md")
    torch.testing.assert_close(names["y"], names["layer"](names["x"]))


def test_a_new_prior_streams_like_any_other_and_an_operator_reads_by_its_weights():
    page = names_after("docs/add_a_prior.md")
    for name in ("fixed_decay", "cosine"):
        PRIORS.pop(name)
    whole = page["layer"](page["x"])
    torch.testing.assert_close(torch.cat([page["y"], page["rest"]], 1), whole, rtol=1e-5, atol=1e-6)
    config = FreeEnergyMixerConfig(n_embd=64, n_head=4, use_conv=False)
    layer = FreeEnergyMixer(config, prior=OperatorPrior(page["CausalConvolution"](config.fem_dim, 8)))
    reading = layer.inspect(torch.randn(1, 9, 64))
    torch.testing.assert_close(reading.prior.sum(-1), torch.ones(1, 4, 8, 9), rtol=1e-5, atol=1e-6)
    assert (reading.mean <= reading.free_energy + 1e-6).all()


def test_every_block_of_the_tutorial_runs_without_a_warning_and_prints_what_stands_beside_it(caplog):
    pytest.importorskip("transformers", reason="the tutorial's models need the extra 'lm'")
    names = {}
    assert len(blocks("docs/tutorial.md")) > 10
    for block in blocks("docs/tutorial.md"):
        assert block.count("print(") == len(PRINTED.findall(block)), f"every print says what it prints:\n{block}"
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(block, names)
        assert output.getvalue().splitlines() == PRINTED.findall(block), block
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


def test_every_python_block_of_the_pages_is_python_and_what_it_imports_is_there():
    pytest.importorskip("transformers", reason="the pages' models need the extra 'lm'")
    found = [block for page in TYPED for block in blocks(page)]
    assert len(found) > 20
    for block in found:
        compile(block, "page", "exec")
        exec("\n".join(re.findall(r"^(?:from \S+ )?import .*", block, re.MULTILINE)), {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_python_of_the_serving_page_runs_on_a_checkpoint(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the language model needs the extra 'lm'")
    from fem.models import FEMConfig, FEMForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = FEMConfig(vocab_size=53, max_position_embeddings=64, mixer={"use_conv": False}, **sizes)
    FEMForCausalLM(config).save_pretrained(tmp_path / "runs" / "my-model")
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        names = {}
        for block in blocks("docs/serving.md"):
            if "tp_size=2" not in block:  # two processes: tests/models/test_engines.py
                exec(block, names)
    finally:
        dist.destroy_process_group()
    assert sorted(len(answer.generated_tokens) for answer in names["answers"].values()) == [8, 8]
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
