"""The steps of every layer around its read: temperature and values before it, gates and output after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.gates import Temperature, TwoLevelGate
from fem.ops.common.read import Read
from fem.optim import AsksNoDecay
from fem.projection import Projection


class FreeEnergyLayer(AsksNoDecay, nn.Module):
    """o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t)) of a read that a subclass chooses.             (Eq. 11)

    A subclass makes its own maps, then calls `add_read_parts`.
    """

    takes_pairs = True  # whether the read takes values for the mean and values for the free energy

    def add_read_parts(self, config: FreeEnergyMixerConfig, beta_shape: tuple[int, ...]) -> None:
        """Make beta, the gates and the output map."""
        self.config, self.beta_shape = config, beta_shape
        self.beta = Temperature(config, beta_shape) if config.use_temperature else None
        self.gate = TwoLevelGate(config)
        self.dropout = nn.Dropout(config.dropout)
        self.output = Projection(config.fem_dim, config.n_embd, config.bias)

    def mixed(
        self,
        features: Float[Tensor, "b t f"] | list[Tensor | None],
        v: Float[Tensor, "b i hkv dv"],
        read: Callable[[Tensor, Tensor | None, Tensor | None], tuple[Read, Any]],
    ) -> tuple[Float[Tensor, "b t h d"], Any]:
        """g ((1 - lambda) mean + lambda F), with (mean, F), memory = read(values, beta, free_values); and the memory.

        lambda and g are of the features, or of their logits.                                      (Eq. 4, 7, 10, 11)
        """
        beta = self.temperature(v)
        v, free_values = self.pair(v, beta)
        found, memory = read(v, beta, free_values)
        return self.gate(features, found), memory

    def projected(self, o: Float[Tensor, "b t h d"]) -> Float[Tensor, "b t e"]:
        """W_O o."""
        return self.output(self.dropout(o.flatten(-2)))

    def temperature(self, like: Tensor) -> Tensor | None:
        """beta, in `Prior.beta_shape`; 1 where it is not learnt, None without a free energy."""
        if not self.config.use_lse:
            return None
        return like.new_ones(self.beta_shape) if self.beta is None else self.beta()

    def pair(
        self, v: Float[Tensor, "b t h dv"], beta: Tensor | None
    ) -> tuple[Float[Tensor, "b t h dm"], Float[Tensor, "b t h df"] | None]:
        """The values whose mean is read, and those whose free energy is read; None: the same ones."""
        v, free = self.parts(v, beta)
        if not (self.config.free_alone and self.takes_pairs):
            return v, free
        return v[..., :0], v if free is None else free

    def parts(
        self, v: Float[Tensor, "b t h dv"], beta: Tensor | None
    ) -> tuple[Float[Tensor, "b t h dm"], Float[Tensor, "b t h df"] | None]:
        """`pair`, with the mean of channels that read F alone."""
        config, free = self.config, v
        if config.free_share is not None:
            v, free = v.split([config.value_width - config.free_width, config.free_width], -1)
        cap = config.value_logexp_cap
        if cap is not None:
            free = ((beta * free).clamp(-cap, cap) / beta).to(v.dtype)
        return v, None if free is v else free
