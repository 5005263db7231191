"""Every row of the paper's Tables 1 to 5 and 7 by its name: two steps at toy size on a CPU, or what it lacks, said."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from fem.models import FEMForImageClassification
from fem.train.model import build_model, know, model_config
from fem.train.recipe import TrainRecipe
from fem_research.bench import cases, workloads
from fem_research.bench.cases import Case, Size
from fem_research.common.mixers import BASELINES, PUBLISHED, available
from fem_research.forecast.experiment import TABLE_4_MODELS
from fem_research.forecast.settings import BASELINES as FORECASTERS
from fem_research.forecast.settings import PROFILES as FORECASTS
from fem_research.forecast.settings import ForecastRecipe
from fem_research.forecast.training import build_backbone as build_forecaster
from fem_research.lm.suites import paper_rows
from fem_research.mad.experiment import TABLE1
from fem_research.mad.settings import Job, MADRecipe, Setting, Training
from fem_research.mad.training import train
from fem_research.vision import training as vision
from fem_research.vision.experiment import IN_TABLE_3, PAPER
from fem_research.vision.settings import VisionRecipe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CARD = "needs a card and flash-linear-attention"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
TOY = {"vocab_size": 64, **SIZES}
OFF = {"use_conv": False, "use_lse": False, "use_temperature": False, "use_outer_gate": False}
LANGUAGE = {  # what `fem train` takes for the rows of Table 2: a preset's family and mixer fields, or a model type
    "attention": ("fem-sm", OFF),
    "attention+C": ("fem-sm", OFF | {"use_conv": True}),
    "attention+CL": ("fem-sm", {"use_temperature": False, "use_outer_gate": False}),
    "attention+CLT": ("fem-sm", {"use_outer_gate": False}),
    "FEM": ("fem-sm", {}),
    "GLA": ("fem-gla", OFF | {"normalize": False}),
    "FEM-GLA": ("fem-gla", {}),
}
OF_LIBRARIES = {
    **{name: {} for name in ("delta_net", "gated_deltanet", "gsa", "retnet", "hgrn", "hgrn2")},
    "diffllama": {"num_key_value_heads": 4},
}
ROWS_OF_LIBRARIES = {"DeltaNet", "GatedDeltaNet", "GSA", "RetNet", "HGRN", "HGRN2", "DiffTrans"}


def two_steps(loss_of, parameters):
    """Two steps of AdamW; the second loss is another."""
    optimiser, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for _ in range(2):
        loss = loss_of()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert torch.isfinite(torch.tensor(losses)).all()
    assert losses[0] != losses[1]


def here_or_skip(baseline):
    if not available(baseline, DEVICE):
        pytest.skip(f"{baseline} {CARD}")


@pytest.mark.parametrize("mixer", [name for name, _ in TABLE1])
def test_a_row_of_table_1(mixer):
    if mixer in PUBLISHED:
        here_or_skip(PUBLISHED[mixer])
    sizes = {"heads": 4, "batch": 4, "warmup": 0.0, "bfloat16": False, "checkpoints": 1, "test_examples": 4}
    job = Job(
        mixer=mixer,
        setting=Setting("memorization", {"vocab_size": 11, "seq_len": 8}, 8, 2),
        initialisation="normal",
        learning_rate=1e-2,
        weight_decay=0.0,
        seed=0,
        training=Training(width=32, mlp_width=352, **sizes),
    )
    found = train(job, DEVICE)
    assert found["curve"][-1]["step"] == 2
    if mixer not in PUBLISHED:
        assert MADRecipe(profile="paper", mixers=mixer, seeds=1, mlp="kept").jobs()[0].mixer == mixer


def test_table_2_has_no_row_that_is_not_trained():
    assert {name.partition(" ")[2] for name in paper_rows()} == LANGUAGE.keys() | ROWS_OF_LIBRARIES
    assert len(ROWS_OF_LIBRARIES) == len(OF_LIBRARIES)


@pytest.mark.parametrize("row", LANGUAGE)
def test_a_row_of_table_2(row):
    family, mixer = LANGUAGE[row]
    fields = json.dumps(TOY | {"mixer": mixer})
    recipe = TrainRecipe(preset=f"{family}-tiny", mlp="kept", model=fields, context=16)
    language_steps(recipe)


@pytest.mark.parametrize("model_type", OF_LIBRARIES)
def test_a_baseline_of_table_2(model_type):
    """fla's train in tests/train/test_fla_models.py, in Triton's interpreter."""
    if model_type != "diffllama" and not (know(model_type) and DEVICE.type == "cuda"):
        pytest.skip(f"{model_type} {CARD}")
    sizes = TOY if model_type == "diffllama" else {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 2}
    fields = json.dumps(sizes | OF_LIBRARIES[model_type])
    language_steps(TrainRecipe(architecture=model_type, model=fields, context=16))


def language_steps(recipe):
    model = build_model(model_config(recipe, 64), 0).to(DEVICE)
    ids = torch.randint(64, (2, 16), device=model.device)
    two_steps(
        lambda: F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), model.parameters()
    )


@pytest.mark.parametrize("row", PAPER)
def test_a_row_of_table_3(row):
    mixer = {shown: mixer for mixer, shown in IN_TABLE_3.items()}.get(row)
    if mixer is None:
        pytest.skip(f"{row} for images is in no library")
    job = VisionRecipe(mixers=mixer, mlp="kept", width=32, layers=2, heads=4, image_size=8, patch_size=2)
    model = FEMForImageClassification(vision.model_config(job, ["a", "b", "c"]))
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    two_steps(lambda: model(images, labels=labels).loss, model.parameters())


def test_table_4_has_every_model_of_its_profile():
    names = ForecastRecipe(**FORECASTS["paper"] | {"data": ""}).model_names
    assert len(names) == len(TABLE_4_MODELS) + 2  # and attention and no mixer
    assert [name for name in names if name in FORECASTERS] == ["itransformer", "patchtst", "dlinear"]


@pytest.mark.parametrize(
    "model", [name for name in ForecastRecipe(**FORECASTS["paper"]).model_names if name not in FORECASTERS]
)
def test_a_row_of_table_4(model):
    """iTransformer, PatchTST and DLinear are neuralforecast's: research/tests/test_forecast_neural.py trains them."""
    sizes = {"width": 32, "layers": 2, "heads": 4, "dropout": 0.0, "mlp": "kept"}
    backbone = build_forecaster(model, 3, 24, 4, **sizes)
    history, future = torch.randn(2, 24, 3), torch.randn(2, 4, 3)
    two_steps(lambda: F.mse_loss(backbone(history), future), backbone.parameters())


@pytest.mark.parametrize(
    "part, row", [("gpt2", row) for row in cases.TABLE7] + [("table5", row) for row in cases.TABLE5]
)
def test_a_row_of_tables_5_and_7(part, row):
    if row in BASELINES:
        here_or_skip(row)
    case = Case(part, Size(1, 16, 64, 4), "float32", (row,), layers=2)
    assert workloads.runs(case, row, DEVICE)
    work = workloads.workload(case, row, DEVICE)
    for _ in range(2):
        work.train()
    work.forward()
    paper = [known for known in cases.PROFILES["paper"] if known.part == part]
    assert all(row in known.mixers for known in paper)
    assert replace(paper[0], mixers=(row,)).layers in (8, 12)
