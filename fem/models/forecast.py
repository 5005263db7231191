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

from fem.config import FreeEnergyMixerConfig, build_config
from fem.mixer import FreeEnergyMixer

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
}
STILL = 1e-10  # variance over mean square of a column that stands still through a whole window
LEAST_VARIANCE = 1e-14  # of y, over its mean square, as float32 resolves it


class FEMForecaster(BaseModel):
    """Direct forecasts of every series by itself, from the patches of its history.

        z_n = W [y_n, x_n, f_n] + V s + position_n         n: `patch_len` rows, the last patch ending now
        z_m = W_f f_m + V s + position_m                   m: rows to forecast, where the future of f is known
        y = W_o [z_1, ..., z_M] + b_o    behind `n_layers` blocks  z + mixer(norm(z)),  z + MLP(norm(z))

    Every column is scaled by mean and deviation of its history in the window, and the forecast is scaled back, so that
    the loss is in the units of the data. Losses that are distributions have parameters without units, and with
    `exclude_insample_y` no history gives them: there neuralforecast scales the windows, `scaler_type="standard"`.

    h: rows to forecast; input_size: rows of history. hidden_size, n_heads, n_layers, patch_len, dropout: the model.
    hist_exog_list, futr_exog_list, stat_exog_list: columns x of the history, f of history and future, s of the series.
    prior_type, mixer: the mixers' prior and further fields of `FreeEnergyMixerConfig`; they have the linear weights of
    plain attention unless a width is named. loss: any of neuralforecast's; MQLoss for quantiles.
    training: what all models of neuralforecast take, such as max_steps, scaler_type or accelerator. A patch without any
    observed row is masked.

    Raises ValueError on sizes that no model can have, TypeError on unknown mixer fields.
    """

    EXOGENOUS_FUTR = EXOGENOUS_HIST = EXOGENOUS_STAT = True
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
        loss = MAE() if loss is None else loss
        without_units = loss.is_distribution_output or training.get("exclude_insample_y", False)
        scaler = "standard" if without_units else "identity"
        super().__init__(
            h=h,
            input_size=input_size,
            loss=loss,
            random_seed=random_seed,
            **TRAINING | {"scaler_type": scaler} | training,
        )
        self.without_units = without_units
        config = build_config(**{"n_embd": hidden_size, "n_head": n_heads, "prior_type": prior_type, **(mixer or {})})
        self.patch_len = patch_len
        columns = 1 + self.hist_exog_size + self.futr_exog_size
        patches = -(-input_size // patch_len)
        self.embedding = nn.Linear(columns * patch_len, hidden_size)
        self.future = self.static = None
        if self.futr_exog_size:
            patches += -(-h // patch_len)
            self.future = nn.Linear(self.futr_exog_size * patch_len, hidden_size)
        if self.stat_exog_size:
            self.static = nn.Linear(self.stat_exog_size, hidden_size, bias=False)
        self.position = nn.Parameter(0.02 * torch.randn(patches, hidden_size))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(PatchBlock(config, dropout) for _ in range(n_layers))
        self.norm = nn.RMSNorm(hidden_size)
        self.head = nn.Linear(patches * hidden_size, h * self.loss.outputsize_multiplier)

    def forward(self, windows_batch: dict[str, Tensor | None]) -> Float[Tensor, "b h outputs"]:
        z, observed, center, spread = self._tokens(windows_batch)
        z = self.dropout(z + self.position)
        for block in self.blocks:
            z = block(z, observed)
        z = self.norm(z) * observed[..., None]
        return self.head(z.flatten(1)).unflatten(1, (self.h, -1)) * spread[..., :1] + center[..., :1]

    def _tokens(
        self, windows_batch: dict[str, Tensor | None]
    ) -> tuple[Float[Tensor, "b n d"], Bool[Tensor, "b n"], Float[Tensor, "b 1 c"], Float[Tensor, "b 1 c"]]:
        """The embedded patches of history and of a known future, which of them have an observed row, and mean and
        deviation of every column, of which y is the first."""
        y, seen = windows_batch["insample_y"], windows_batch.get("insample_mask")
        columns = {"hist_exog": self.hist_exog_size, "futr_exog": self.futr_exog_size}
        rows = [y, *(windows_batch[name] for name, size in columns.items() if size)]
        rows = torch.cat([x[:, : y.shape[1]] for x in rows], -1)
        seen = torch.ones_like(y) if seen is None else seen.view_as(y)
        rows = torch.where(seen > 0, rows, 0)
        observed = (self._patches(seen) > 0).any(-1)
        center, spread = self._scale(rows, seen)
        z = self.embedding(self._patches((rows - center) / spread * seen))
        if self.future is not None:
            known = slice(-self.futr_exog_size, None)
            future = (windows_batch["futr_exog"][:, y.shape[1] :] - center[..., known]) / spread[..., known]
            future = self.future(self._patches(F.pad(future, (0, 0, 0, -self.h % self.patch_len))))
            z = torch.cat([z, future], 1)
            observed = F.pad(observed, (0, future.shape[1]), value=True)
        if self.static is not None:
            z = z + self.static(windows_batch["stat_exog"]).unsqueeze(1)
        return z, observed, center, spread

    def _scale(
        self, rows: Float[Tensor, "b l c"], seen: Float[Tensor, "b l 1"]
    ) -> tuple[Float[Tensor, "b 1 c"], Float[Tensor, "b 1 c"]]:
        """Mean and deviation of the observed rows of every column; 0 and 1 where neuralforecast has scaled them.

        A column that stood still has no deviation: what is known of its future is then relative to its value, or as it
        is where that was 0.
        """
        if self.without_units:
            zero = rows.new_zeros(len(rows), 1, rows.shape[2])
            return zero, zero + 1
        count = seen.sum(1, keepdim=True).clamp_min(1)
        center = rows.sum(1, keepdim=True) / count
        variance = ((rows - center).square() * seen).sum(1, keepdim=True) / count
        square = variance + center.square()
        spread = (variance + LEAST_VARIANCE * torch.where(square == 0, 1.0, square)).sqrt()
        still = variance <= STILL * square
        still[..., 0] = False  # y: its forecast is the constant that its history was
        return center, torch.where(still, torch.where(center == 0, 1.0, center.abs()), spread)

    def _patches(self, rows: Float[Tensor, "b l c"]) -> Float[Tensor, "b n p"]:
        """Rows side by side, from the last row back."""
        return F.pad(rows, (0, 0, -rows.shape[1] % self.patch_len, 0)).unflatten(1, (-1, self.patch_len)).flatten(2)


class PatchBlock(nn.Module):
    """z + mixer(norm(z)), then z + MLP(norm(z)): tokens (B, N, D); `observed` (B, N) is the mixer's mask."""

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
