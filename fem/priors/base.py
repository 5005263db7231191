"""The base of every prior: a selection distribution over the tokens, and the read of values under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.backend import transformed
from fem.ops.common.read import Read
from fem.ops.common.rope import frequencies, rotate_all
from fem.ops.common.scan import ScanCall
from fem.ops.common.tokens import Tokens
from fem.prior_table import PRIORS, Widths
from fem.projection import Projection


class Prior(nn.Module, ABC):
    """A non-negative score s_t(i), normalised over the tokens a row may see: p_t(i) = s_t(i) / sum_r s_t(r).

    A subclass holds the score, its parameters and its memory, and nothing of gates or conditioning. Buffers are saved
    with the weights. Features are [x, h], (B, T, D + H_c); values v are (B, T, H, d_v).        (Section 2.3.3)
    """

    name: ClassVar[str]
    map_names: ClassVar[tuple[str, ...]] = ()  # of the linear maps of the features
    uses: ClassVar[tuple[str, ...]] = ()  # fields of the configuration that not every prior reads
    takes_pairs: ClassVar[bool] = True  # whether `read` takes free_values
    per_channel: ClassVar[bool] = False  # whether every value channel has its own distribution

    def __init__(self, config: FreeEnergyMixerConfig | None):
        super().__init__()
        registered = PRIORS.get(self.name) is type(self)
        if not isinstance(config, FreeEnergyMixerConfig) and (registered or config is not None):
            raise TypeError(f"config must be a FreeEnergyMixerConfig, got a {type(config).__name__}.")
        if registered and config.prior_type != self.name:
            raise ValueError(f"config must have prior_type={self.name!r} for this prior, got {config.prior_type!r}.")
        self.config = config
        self._frequencies: dict[torch.device, Tensor] = {}  # rotary ones, by `_frequency`; saved nowhere

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_frequencies": {}}  # a file may be loaded to another device than they are kept for

    def check(self, config: FreeEnergyMixerConfig) -> None:
        """Raise ValueError on a layer's configuration that the prior cannot follow."""

    @staticmethod
    @abstractmethod
    def widths(config: FreeEnergyMixerConfig) -> Widths:
        """The prior's linear weights under `config`, and how many maps of key width it has (Appendix H.7)."""
        raise NotImplementedError("a prior must say what it costs by a static method widths(config), got none.")

    def maps(self) -> list[nn.Module]:
        """The linear maps of the features, for which `read` may get what they made of them (`fem.joint_maps`)."""
        return [getattr(self, name) for name in self.map_names]

    @abstractmethod
    def read(
        self,
        features: Float[Tensor, "b t f"],
        v: Float[Tensor, "b t h d"],
        beta: Float[Tensor, "..."] | None,
        tokens: Tokens,
        memory: dict[str, Tensor] | None,
        free_values: Float[Tensor, "b t h df"] | None = None,
    ) -> tuple[Read, dict[str, Tensor] | None]:
        """The mean of v and the free energy of free_values (None: of v itself), and the memory after them.

        memory: what the call before returned, every tensor with the batch first; {} at the start of a sequence; None:
        no memory is kept, and None is returned.
        beta has `beta_shape`, or is None where only the mean is read.
        """

    def forward(self, features, v, beta, tokens, memory, free_values=None):
        """`read`, as a module's call: hooks that load parameters when it is called, such as accelerate's, know it."""
        found = self.read(features, v, beta, tokens, memory, free_values)
        pair = type(found) is tuple and isinstance(found[0], Read)
        if not pair or (memory is not None and not isinstance(found[1], dict)):
            got = "no dict" if pair else type(found[0] if type(found) is tuple else found).__name__
            raise TypeError(
                f"read of the prior {self.name!r} must return a Read and the memory after it, which is a dict where "
                f"memory is one, got {got}."
            )
        read = found[0]
        if (read.free_energy is None) != (beta is None):
            raise ValueError(
                f"read of the prior {self.name!r} must return a free energy, or None where beta is None, got "
                f"{'None' if read.free_energy is None else 'one without a beta'}."
            )
        if torch.compiler.is_compiling():  # a comparison would become a guard of the graph
            return found
        for name, x in (found[1] if memory is not None else {}).items():
            if not isinstance(x, Tensor) or x.shape[:1] != v.shape[:1]:
                got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"memory of the prior {self.name!r} must hold tensors with the batch first, here {len(v)} rows, "
                    f"got {got} as {name!r}."
                )
        grouped = 1 if self.config is None else self.config.n_head // self.config.kv_heads  # a prior alone has none
        heads = v.shape[2] * grouped  # tensor parallelism has a part of them
        for name, x, values in zip(Read._fields, read, (v, v if free_values is None else free_values)):
            wanted = (*v.shape[:2], heads, values.shape[3])
            if x is not None and tuple(x.shape) != wanted:
                raise ValueError(
                    f"read of the prior {self.name!r} must return a {name} of shape {wanted}, got {tuple(x.shape)}."
                )
        return found

    @staticmethod
    def beta_shape(config: FreeEnergyMixerConfig) -> tuple[int, ...]:
        """The shape of beta: a temperature for each channel of each value head that reads a free energy."""
        return (config.kv_heads, config.free_width)

    def selection(
        self, features: Float[Tensor, "b t f"], v: Float[Tensor, "b t h d"], tokens: Tokens
    ) -> tuple[Float[Tensor, "b t heads d n"], Float[Tensor, "b t heads d n"]]:
        """p_t as a table, and the values it selects among, for `FreeEnergyMixer.inspect`: O(T) reads, for small T.

        The mean is linear in the values, so the mean of the indicator of token i is p_t(i).
        """
        return selected(lambda one: self.read(features, one, None, tokens, None)[0], v)

    def project(self, width: int) -> Projection:
        """A linear map from the features to `width` channels."""
        return Projection(self.config.n_embd, width, self.config.bias, self.config.context_width)

    def rotated(self, tensors: tuple[Tensor, ...], position: Tensor) -> tuple[Tensor, ...]:
        """Queries and keys (B, T, H, d_k) turned by position (T) or (B, T), as the configuration says."""
        config = self.config
        if not config.use_rope:
            return tensors
        width, device = tensors[0].shape[-1], tensors[0].device
        return tuple(rotate_all(tensors, position, self._frequency(width, device), config.rope_factor))

    def _frequency(self, width: int, device: torch.device) -> Float64[Tensor, " planes"]:
        """Radians per position of every rotary plane, kept on each device: a list copied there by every call would make
        a GPU wait. A graph makes its own: with what is kept it would depend on the calls before.
        """
        keeps = not (torch.compiler.is_compiling() or transformed())
        if keeps and device in self._frequencies:
            return self._frequencies[device]
        with torch.inference_mode(False):  # training may use what inference made
            made = frequencies(width, self.config.rope_theta, device, self.config.rope_frequencies)
        if keeps and type(made) is Tensor:
            self._frequencies[device] = made
        return made

    def scan(self, op, *inputs, tokens: Tokens, memory: dict[str, Tensor] | None, free_values: Tensor | None = None):
        """One of the scans of `fem.ops` with this prior's configuration and memory."""
        read = op(*inputs, free_values=free_values, call=self.scan_call(tokens, memory))
        return read if memory is not None else (read, None)

    def scan_call(self, tokens: Tokens, memory: dict[str, Tensor] | None) -> ScanCall:
        """How a scan of `fem.ops` reads the tokens under this prior's configuration."""
        config = self.config
        return ScanCall(config.causal, tokens, memory or None, memory is not None, config.normalize, config.backend)


def selected(read: Callable[[Tensor], Read], v: Tensor) -> tuple[Tensor, Tensor]:
    """The p_t of a read of the mean, and the values it selects among, (B, T, H, d, T) both."""
    weights = torch.stack([read(one).mean for one in indicators(v)], -1).clamp(min=0)  # which rounding may cross
    values = v.repeat_interleave(weights.shape[2] // v.shape[2], 2).permute(0, 2, 3, 1)
    return weights, values[:, None].expand_as(weights)


def indicators(v: Float[Tensor, "b t h d"]):
    """For every token, values that are 1 at the token and 0 elsewhere."""
    for token in torch.eye(v.shape[1], dtype=v.dtype, device=v.device):
        yield token[:, None, None].expand_as(v).contiguous()
