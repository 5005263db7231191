"""The free-energy read across two sequences, and over a set: cross-attention and attention pooling, with FEM's read."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.checks import positive_int
from fem.config import build_config
from fem.functional import softmax_read
from fem.inspection import Reading, softmax_tables
from fem.ops.common.tokens import read_tokens
from fem.optim import AsksNoDecay, mark_undecayed
from fem.pipeline import FreeEnergyLayer
from fem.projection import Projection, check_tokens, move

FIELDS = (
    "fem_dim",
    "qk_dim",
    "n_kv_head",
    "bias",
    "dropout",
    "eps",
    "use_temperature",
    "use_lse",
    "use_outer_gate",
    "gate_rank",
    "beta_max_init",
    "lambda_init",
    "backend",
)


class FreeEnergyCrossMixer(FreeEnergyLayer):
    """Every query of x reads a memory; each of its channels picks tokens of its own.

        p_t(i) = softmax_i(q_t . k_i / sqrt(d_k))      q from x_t, k and v from memory_i, no positions
        o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))      mean and F as in Eq. 4, lambda and g from x_t

    x (B, T_q, D), memory (B, T, D_m) -> (B, T_q, D). memory_mask (B, T), bool or 0/1, True/1 = keep: masking a token
    equals deleting it, and a row without any token returns W_O's bias. The order of the memory does not matter.
    n_embd: D; n_head: heads, a divisor of D; memory_dim: D_m, or None for D. fields: those of `FreeEnergyMixerConfig`
    for widths, gates, beta and backend. device, dtype: of the parameters. Without a width the linear weights are 4 D^2,
    as in `matched` (of D_m = D).

    Raises ValueError on wrong shapes, TypeError on a float mask and on other fields.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        memory_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields,
    ):
        super().__init__()
        if unknown := [name for name in fields if name not in FIELDS]:
            raise TypeError(f"fields must be among {', '.join(FIELDS)} for a read across; got {', '.join(unknown)}.")
        config = build_config(n_embd=n_embd, n_head=n_head, causal=False, use_conv=False, use_rope=False, **fields)
        self.memory_dim = n_embd if memory_dim is None else positive_int("memory_dim", memory_dim)
        self.query = Projection(n_embd, config.qk_dim, config.bias)
        self.key = Projection(self.memory_dim, config.kv_heads * config.key_width, config.bias)
        self.value = Projection(self.memory_dim, config.kv_heads * config.value_width, config.bias)
        self.add_read_parts(config, (config.kv_heads, config.value_width))
        move(self, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "b tq d"],
        memory: Float[Tensor, "b t m"],
        memory_mask: Tensor | None = None,
        **unknown,
    ) -> Float[Tensor, "b tq d"]:
        _refuse(unknown, "memory_mask")
        q, k, v, options = self._read_of(x, memory, memory_mask)
        read = lambda v, beta, free: (softmax_read(q, k, v, beta, free_values=free, **options), None)  # noqa: E731
        return self.projected(self.mixed(x, v, read)[0])

    @torch.no_grad()
    def inspect(
        self, x: Float[Tensor, "b tq d"], memory: Float[Tensor, "b t m"], memory_mask: Tensor | None = None
    ) -> Reading:
        """Tables of what every query reads from the memory: see `FreeEnergyMixer.inspect`."""
        q, k, v, options = self._read_of(x, memory, memory_mask)
        if 0 in (*x.shape[:2], memory.shape[1]):
            raise ValueError(f"inspect needs rows, queries and a memory, got {tuple(x.shape)}, {tuple(memory.shape)}.")
        return softmax_tables(q, k, v, self.temperature(v), self.gate.factors(x), **options)

    def _read_of(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, dict]:
        """q, k, v and the options of `softmax_read`."""
        width = self.config.n_embd
        check_tokens("x", x, f"(batch, queries, {width})", width, self.query)
        check_tokens("memory", memory, f"(batch, tokens, {self.memory_dim})", self.memory_dim, self.key)
        if x.shape[0] != memory.shape[0]:  # len() would fix the batch of an exported graph
            raise ValueError(f"x and memory must have one batch size, got {x.shape[0]} and {memory.shape[0]}.")
        tokens, _ = read_tokens(tuple(memory.shape[:2]), memory.device, memory_mask, mask_name="memory_mask")
        memory = tokens.zero_masked(memory)
        q = self.query(x).unflatten(-1, (self.config.n_head, -1))
        k, v = (part(memory).unflatten(-1, (self.config.kv_heads, -1)) for part in (self.key, self.value))
        return q, k, v, {"causal": False, "key_mask": tokens.keep, "backend": self.config.backend}


class FreeEnergyPooling(AsksNoDecay, nn.Module):
    """Learnt queries read a set: x (B, T, D_m) -> (B, Q, D), where attention pooling only takes averages.

        y_q = FreeEnergyCrossMixer(query_q, x)

    queries: Q, how many vectors a set becomes; they start N(0, 1). Of an image (B, C, H, W) one vector (B, D) is
    pool(x.flatten(2).mT)[:, 0]. attention_mask (B, T), bool or 0/1: a masked element
    equals a deleted one, and an empty set becomes W_O's bias. The order of the elements does not matter.
    n_embd, n_head, memory_dim and fields are those of `FreeEnergyCrossMixer`, and so is what it raises; ValueError
    where queries is not positive.
    """

    undecayed = ("query",)

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        queries: int = 1,
        memory_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields,
    ):
        super().__init__()
        self.query = nn.Parameter(torch.empty(positive_int("queries", queries), positive_int("n_embd", n_embd)))
        self.read = FreeEnergyCrossMixer(n_embd, n_head, memory_dim, **fields)
        self.reset_parameters()
        mark_undecayed(self)
        move(self, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the queries anew."""
        nn.init.normal_(self.query)

    def forward(
        self, x: Float[Tensor, "b t m"], attention_mask: Tensor | None = None, **unknown
    ) -> Float[Tensor, "b q d"]:
        _refuse(unknown, "attention_mask")
        return self.read(*self._set(x, attention_mask))

    def inspect(self, x: Float[Tensor, "b t m"], attention_mask: Tensor | None = None) -> Reading:
        """Tables of what every query reads from the set: see `FreeEnergyMixer.inspect`."""
        return self.read.inspect(*self._set(x, attention_mask))

    def _set(self, x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        width = self.read.memory_dim
        check_tokens("x", x, f"(batch, tokens, {width})", width, self.read.key)
        tokens, _ = read_tokens(tuple(x.shape[:2]), x.device, attention_mask)  # which names this mask in its errors
        queries = self.query.to(x.dtype).expand(x.shape[0], -1, -1)
        return queries, x, tokens.keep


def _refuse(unknown: dict, mask: str) -> None:
    for name in unknown:
        raise TypeError(f"the call has no argument {name!r}; {mask} (batch, tokens) says what to read, with 1 = keep.")
