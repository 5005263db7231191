"""The forecaster for neuralforecast: patches of a series as tokens of a Free Energy Mixer."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from neuralforecast.common._base_model import BaseModel
from neuralforecast.core import MODEL_FILENAME_DICT
from neuralforecast.losses.pytorch import MAE
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.models.configuration import WIDTHS

TRAINING = {
    "valid_loss": None,
    "max_steps": 1000,
    "learning_rate": 1e-3,
    "num_lr_decays": -1,
    "val_check_steps": 100,
    "batch_size": 32,
    "valid_batch_size": None,
    "windows_batch_size": 128,
    "inference_windows_batch_size": 512,
    "start_padding_enabled": False,
    "scaler_type": "standard",
}


class FEMForecaster(BaseModel):
    """Direct forecasts of every series by itself, from the patches of its history.

        z_n = W x_n + position_n         x_n: `patch_len` rows, the last patch ending now
        y = W_o [z_1, ..., z_N] + b_o    behind `n_layers` blocks  z + mixer(norm(z)),  z + MLP(norm(z))

    h: rows to forecast; input_size: rows of history. hidden_size, n_heads, n_layers, patch_len, dropout: the model.
    prior_type, mixer: the mixers' prior and further fields of `FreeEnergyMixerConfig`; they have the linear weights of
    plain attention unless a width is named. loss: any of neuralforecast's; MQLoss for quantiles.
    training: what all models of neuralforecast take, such as max_steps, scaler_type (here "standard": each window by
    its own mean and deviation) or accelerator. A patch without an observed row is no token.

    Raises ValueError on sizes that no model can have, TypeError on unknown mixer fields.
    """

    EXOGENOUS_FUTR = EXOGENOUS_HIST = EXOGENOUS_STAT = False
    MULTIVARIATE = False
    RECURRENT = False

    @no_type_check  # Lightning reads the arguments from this frame
    def __init__(
        self,
        h: int,
        input_size: int,
        hidden_size: int = 64,
        n_heads: int = 8,
        n_layers: int = 2,
        patch_len: int = 16,
        dropout: float = 0.1,
        prior_type: str = "softmax",
        mixer: dict[str, Any] | None = None,
        loss=None,
        random_seed: int = 1,
        **training,
    ):
        for name, value in {"hidden_size": hidden_size, "n_layers": n_layers, "patch_len": patch_len}.items():
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}.")
        super().__init__(
            h=h,
            input_size=input_size,
            loss=MAE() if loss is None else loss,
            random_seed=random_seed,
            **TRAINING | training,
        )
        fields = {"n_embd": hidden_size, "n_head": n_heads, "prior_type": prior_type, **(mixer or {})}
        build = FreeEnergyMixerConfig if WIDTHS & fields.keys() else FreeEnergyMixerConfig.matched
        config = build(**fields)
        self.patch_len = patch_len
        patches = -(-input_size // patch_len)
        self.embedding = nn.Linear(patch_len, hidden_size)
        self.position = nn.Parameter(0.02 * torch.randn(patches, hidden_size))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PatchBlock(config, dropout) for _ in range(n_layers))
        self.norm = nn.RMSNorm(hidden_size)
        self.head = nn.Linear(patches * hidden_size, h * self.loss.outputsize_multiplier)

    def forward(self, windows_batch: dict[str, Tensor | None]) -> Float[Tensor, "b h outputs"]:
        x = windows_batch["insample_y"].squeeze(-1)
        seen = windows_batch.get("insample_mask")
        seen = torch.ones_like(x) if seen is None else seen.view_as(x)
        seen = self._patches(seen)
        observed = (seen > 0).any(-1)
        z = self.dropout(self.embedding(self._patches(x) * seen) + self.position)
        for block in self.blocks:
            z = block(z, observed)
        z = self.norm(z) * observed[..., None]
        return self.head(z.flatten(1)).unflatten(1, (self.h, -1))

    def _patches(self, rows: Float[Tensor, "b l"]) -> Float[Tensor, "b n p"]:
        return F.pad(rows, (-rows.shape[1] % self.patch_len, 0)).unflatten(1, (-1, self.patch_len))


class PatchBlock(nn.Module):
    """z + mixer(norm(z)), then z + MLP(norm(z)): tokens (B, N, D), of which `observed` (B, N) are there."""

    def __init__(self, config: FreeEnergyMixerConfig, dropout: float):
        super().__init__()
        width = config.n_embd
        self.mixer_norm = nn.RMSNorm(width)
        self.mixer = FreeEnergyMixer(config)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Float[Tensor, "b n d"], observed: Bool[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        z = z + self.dropout(self.mixer(self.mixer_norm(z), attention_mask=observed))
        return z + self.mlp(z)


MODEL_FILENAME_DICT[FEMForecaster.__name__.lower()] = FEMForecaster  # what NeuralForecast.save and .load look up
