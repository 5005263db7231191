"""The doubtful free energies of a fused softmax layer, those that R does not prove: their kernels' launches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem.ops.softmax.fused import doubt_kernels as kernels
from fem.ops.softmax.fused.layer_form import SPANS, Form, Sizes


class Proof(NamedTuple):
    """What a free energy was read from, and what proves it."""

    q: Float[Tensor, "b t h dk"]
    k: Float[Tensor, "b t hkv dk"]
    f: Float[Tensor, "b t hkv df"] | None
    lse: Float[Tensor, "b h t"]
    out: Float[Tensor, "b t h w"]
    first: Int[Tensor, "#b t"] | None  # the keys that a row sees, as in `Support`
    end: Int[Tensor, "#b t"] | None
    scheme: Float[Tensor, "b 2 c"] | None
    beta: Float[Tensor, "hkv df"] | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Queries, keys, and numbers between the bounds of sequences."""
        apart = 0 if self.first is None or len(self.first) == 1 else self.first.stride(0)
        return self.q.shape[1], self.k.shape[1], apart


def settle(proof: Proof, exact, flags, gates, ups, o, scale, eps, form: Form, sizes: Sizes) -> None:
    """Compute the doubtful free energies: write them to `exact`, or where that is o, mixed and gated, to o."""
    kernels.doubtful_rows_kernel[sizes.spans](
        *proof, exact, flags, *gates, *ups, o, *proof.sizes, sizes.tiles, scale, eps, *(x.stride(1) for x in proof[:2]),
        *proof.f.stride()[1:3], *(x.stride(1) for x in gates), **sizes.doubt, SHARED=form.shared, GATED=form.gated,
        MIXED=exact is o, RANK=form.rank, COLUMNS=sizes.mix["COLUMNS"], FLAGS=sizes.flags,
    )  # fmt: skip


class Doubt(NamedTuple):
    """What the gradient of a free energy needs of its entries that R does not prove, and what tiles give theta."""

    exact: Float[Tensor, "b t h df"]  # float32: bfloat16 would lose what theta's gradient is made of
    d_free: Float[Tensor, "b t h df"]
    tilted: Float[Tensor, "n df"]
    query_parts: Float[Tensor, "nq df"]  # parts of tilted
    value_parts: Float[Tensor, "nv df"]

    @classmethod
    def of(cls, q: Tensor, beta: Tensor, form: Form, sizes: Sizes) -> Doubt:
        exact = torch.empty(*q.shape[:3], form.free, dtype=torch.float32, device=q.device)
        counts = [math.prod(grid) for grid in (sizes.reads, sizes.values)]
        tilted = beta.new_empty(sum(counts), form.free)
        return cls(exact, torch.empty_like(exact, dtype=q.dtype), tilted, *tilted.split_with_sizes(counts))

    def theta_parts(self, form: Form) -> Float[Tensor, "n hkv df"]:
        """What all tiles give theta, of queries and of values."""
        if form.heads == form.kv_heads:
            return self.tilted.view(-1, form.kv_heads, form.free)
        by_groups = self.query_parts.view(-1, form.kv_heads, form.heads // form.kv_heads, form.free).sum(2)
        return torch.cat([by_groups, self.value_parts.view(-1, form.kv_heads, form.free)])


def through_doubt(
    d_q, d_k, d_v, proof: Proof, flags, doubtful: Doubt, form: Form, scale: float, sizes: Sizes
) -> Int[Tensor, "b hkv"]:
    """Add to d_q and d_k what goes through doubtful entries, and where that is raised write it to d_v's f."""
    d_f, batch = d_v[..., form.width - form.free :], len(d_q)
    exact, d_free, _, query_parts, _ = doubtful
    inputs, rows = (*proof, exact, flags, d_free), (*(x.stride(1) for x in proof[:2]), *proof.f.stride()[1:3])
    raised = flags.new_empty(batch, form.kv_heads)
    kernels.doubtful_queries_backward_kernel[sizes.spans](
        *inputs, d_q, query_parts, *proof.sizes, sizes.tiles, scale, *rows, d_q.stride(1), **sizes.doubt,
        FLAGS=sizes.flags,
    )  # fmt: skip
    kernels.doubtful_keys_backward_kernel[(form.kv_heads, SPANS, batch)](
        *inputs, d_k, d_f, raised, *proof.sizes, sizes.tiles, scale, *rows, d_k.stride(1), *d_f.stride()[1:3],
        **sizes.doubt, FLAGS=sizes.group_flags,
    )  # fmt: skip
    return raised
