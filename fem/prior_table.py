"""The cost of each prior and the fields that it reads, without torch, for the configuration and for the priors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

BACKENDS = ("auto", "plain", "sdpa", "triton", "reference")
ROTARY = ("rope_frequencies", "rope_factor")  # read by every prior whose queries and keys turn by position

PRIORS: dict[str, type] = {}  # the classes by name; fem.priors fills it, and users may add their own


class Widths(NamedTuple):
    """The cost of a prior: its linear weights, and the number of projections whose width is qk_dim."""

    linear: int
    key_maps: int


class PriorRow(NamedTuple):
    """A prior of the library: the fields that not every prior reads, and its `Widths` under a configuration."""

    uses: tuple[str, ...]
    widths: Callable[..., Widths]
    takes_pairs: bool = True  # whether it reads the mean of some values and the free energy of others


def gla_decay_width(config) -> int:
    """The number of decays that GLA has for each token."""
    return {"scalar": 1, "head": config.n_head, "channel": config.qk_dim}[config.decay]


def _queries_and_keys(config) -> Widths:
    return Widths(config.n_embd * (config.qk_dim + config.kv_heads * config.key_width), key_maps=2)


def _gla(config) -> Widths:
    linear = _queries_and_keys(config).linear + config.n_embd * gla_decay_width(config)
    return Widths(linear, key_maps=3 if config.decay == "channel" else 2)


def _rnn(config) -> Widths:
    return Widths(config.n_embd * config.fem_dim, key_maps=0)


def _mamba(config) -> Widths:
    return Widths(config.n_embd * (config.fem_dim + 2 * config.ssm_rank), key_maps=0)


def _mamba_interactive(config) -> Widths:
    return Widths(_mamba(config).linear + config.fem_dim * config.value_width, key_maps=0)


ROWS = {
    "softmax": PriorRow(("window", "n_kv_head", "rope_theta", *ROTARY), _queries_and_keys),
    "linear": PriorRow(("rope_theta", *ROTARY), _queries_and_keys),
    "gla": PriorRow(("decay", "rope_theta", *ROTARY), _gla),
    "rnn_softmax": PriorRow((), _rnn),
    "rnn_decay": PriorRow((), _rnn),
    "mamba": PriorRow(("ssm_rank",), _mamba),
    "mamba_interactive": PriorRow(("ssm_rank",), _mamba_interactive, takes_pairs=False),
}


def known_priors() -> dict[str, PriorRow | type]:
    """Every prior by name, each with `uses`, `widths` and `takes_pairs`: the library's, and those that users added."""
    return {**ROWS, **PRIORS}
