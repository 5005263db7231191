"""How many steps each row of an ablation may take, so that all train as long as the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fem.models import FEMForCausalLM
from fem.runs.run import note, read_json, write_json
from fem.train.model import build_model
from fem_research.common.measure import Step, alternate
from fem_research.lm.ablate_recipe import AblateRecipe, row_fields
from fem_research.lm.small import model_config

SECONDS = 60.0  # for all rows
COSTS = "costs.json"


def step_seconds(recipe: AblateRecipe, output: Path) -> dict[str, float]:
    """Median seconds of forward, backward and AdamW of every row's model, the rows in turn; on a CPU, process time.

    They are measured once and kept in `output`, so that the same command goes on with the same steps. Raises ValueError
    where those kept are of other models, or damaged.
    """
    language = recipe.language(recipe.rates()[0], recipe.seed)
    sizes = ("layers", "width", "heads", "mlp_width", "vocabulary", "context", "batch")
    model = {name: getattr(recipe, name) for name in sizes} | {"prior": recipe.prior, "threads": recipe.threads}
    if (output / COSTS).exists():
        kept = read_json(output / COSTS) or {"model": None}
        if kept["model"] != model or not kept["seconds"].keys() >= set(recipe.row_names()):
            raise ValueError(
                f"{str(output / COSTS)!r} holds what other models cost, or is damaged; remove it to measure again, or "
                "give another --output."
            )
        return {row: kept["seconds"][row] for row in recipe.row_names()}
    note("measuring what a step of every row costs.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.randint(recipe.vocabulary, (recipe.batch, recipe.context), device=device)
    steps = {}
    for row in recipe.row_names():
        config = model_config(language, row_fields(row, recipe.prior), recipe.vocabulary)
        steps[row] = _step(build_model(config, recipe.seed).to(device), ids)
    seconds = alternate(steps, SECONDS, device)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / COSTS, {"model": model, "seconds": seconds})
    return seconds


def steps_of(row: str, steps: int, seconds: Mapping[str, float]) -> int:
    """Steps of a row in the time that the fastest takes for `steps`."""
    return max(1, round(steps * min(seconds.values()) / seconds[row]))


def _step(model: FEMForCausalLM, ids: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
