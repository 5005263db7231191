"""Models of neuralforecast, and `FEMForecaster` as one of them: trained by neuralforecast, tested on our windows."""

from __future__ import annotations

import logging
import time
import warnings
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from neuralforecast import NeuralForecast
from neuralforecast.common._base_model import BaseModel
from neuralforecast.losses.pytorch import MSE
from neuralforecast.models import DLinear, PatchTST, iTransformer
from pytorch_lightning import Callback
from rich.progress import Progress
from torch import Tensor

from fem.models.forecast import FEMForecaster
from fem_research.forecast.settings import Job
from fem_research.forecast.training import record, score

MODELS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "dlinear": (DLinear, {"learning_rate": 1e-3, "windows_batch_size": 256}),
    "patchtst": (PatchTST, {"learning_rate": 3e-4, "windows_batch_size": 128}),
    "itransformer": (iTransformer, {"learning_rate": 3e-4, "hidden_size": 128, "d_ff": 256, "windows_batch_size": 32}),
    "femforecaster": (FEMForecaster, {"learning_rate": 5e-4, "windows_batch_size": 128}),
}
CHECKS = 10
PATIENCE = 3
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
QUIET |= {"num_sanity_val_steps": 0}


class Steps(Callback):
    """Moves the progress bar at every training step, and keeps the validation losses."""

    def __init__(self, bars: Progress, title: str, steps: int):
        self.bars, self.bar = bars, bars.add_task(title, total=steps)
        self.curve: list[dict] = []

    def __deepcopy__(self, memo):
        return self  # models copy their arguments, and the copies report here

    def on_train_batch_end(self, trainer, *_):
        self.bars.update(self.bar, completed=trainer.global_step)

    def on_validation_end(self, trainer, *_):
        loss = trainer.callback_metrics.get("ptl/val_loss")
        if loss is not None:
            self.curve.append({"step": trainer.global_step, "validation_mse": loss.item()})


def train_baseline(job: Job, bars: Progress) -> dict:
    """Train one of `MODELS` by neuralforecast, with its own rule for early stopping, which keeps the last weights. Of
    several lookbacks the one of the smallest squared error on the validation rows is tested."""
    tried = []
    for lookback in job.lookbacks:
        windows = job.windows(lookback)
        model, seconds, curve = fitted(job, lookback, bars)
        error = score(partial(forecast, model), windows["validation"]).mse if len(job.lookbacks) > 1 else 0.0
        tried.append((error, model, windows["test"], seconds, curve))
    _, model, test, _, curve = min(tried, key=lambda one: one[0])
    return record(job, model, partial(forecast, model), test, sum(seconds for *_, seconds, _ in tried), curve)


def fitted(job: Job, lookback: int, bars: Progress) -> tuple[BaseModel, float, list[dict]]:
    """The trained model, the CPU seconds of its training and its validation losses."""
    for chatty in ("pytorch_lightning", "lightning_fabric"):  # from the model's first word on
        logging.getLogger(chatty).setLevel(logging.ERROR)
    kind, settings = MODELS[job.model]
    steps = Steps(bars, f"{job.title}, lookback {lookback}", job.recipe.peer_steps)
    model = kind(
        h=job.horizon,
        input_size=lookback,
        loss=MSE(),
        max_steps=job.recipe.peer_steps,
        val_check_steps=max(1, job.recipe.peer_steps // CHECKS),
        early_stop_patience_steps=PATIENCE,
        batch_size=len(job.series.channels),
        step_size=job.recipe.peer_stride,
        random_seed=job.seed,
        callbacks=[steps],
        accelerator="auto",
        **({"n_series": len(job.series.channels)} if kind.MULTIVARIATE else {}),
        **settings,
        **QUIET,
    )
    first, last = job.series.splits["validation"]
    started = time.process_time()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forecaster = NeuralForecast(models=[model], freq=1)
        forecaster.fit(long_table(job.series.scaled()[:last].numpy()), val_size=last - first)
    seconds = time.process_time() - started
    trained = forecaster.models[0].cpu().eval()
    bars.update(steps.bar, completed=job.recipe.peer_steps)
    return trained, seconds, steps.curve


def long_table(rows: np.ndarray) -> pd.DataFrame:
    """rows (T, C) in neuralforecast's format: a line per time and channel."""
    length, channels = rows.shape
    return pd.DataFrame(
        {
            "unique_id": np.repeat([f"{channel:04d}" for channel in range(channels)], length),
            "ds": np.tile(np.arange(length), channels),
            "y": rows.T.ravel(),
        }
    )


def forecast(model: BaseModel, history: Float[Tensor, "b l c"]) -> Float[Tensor, "b h c"]:
    """A trained model's forecast of every channel, each window scaled as in its training."""
    batch, _, channels = history.shape
    if not model.MULTIVARIATE:
        history = history.transpose(1, 2).flatten(0, 1)[..., None]
    x = model.scaler.transform(history, torch.ones_like(history))
    y = model.scaler.inverse_transform(model({"insample_y": x, "insample_mask": torch.ones_like(x)}))
    return y if model.MULTIVARIATE else y.view(batch, channels, -1).transpose(1, 2)
