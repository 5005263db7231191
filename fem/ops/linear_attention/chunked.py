"""Linear attention over any items, in chunks, with a state: by torch, and by the kernels of flash-linear-attention.

    S_t = e^{g_t} S_{t-1} + k_t^T items_t        out_t = q_t S_t

No decay is ever divided by.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.torch_version import TorchVersion

CHUNK = 64

Features = Float[Tensor, "b h n c dk"]
Items = Float[Tensor, "b h n c d"]
States = Float[Tensor, "b h dk d"]


def chunked(
    q: Features, k: Features, items: Items, g: Tensor | None, state: States, rise: Float[Tensor, "b h n 1 d"] | None
) -> tuple[Items, Float[Tensor, "b h n dk d"], States]:
    """The rows, the state before each of n chunks, and the state after the last.

    g (B, H, N, C, 1 or d_k). rise: by how much the items of a chunk are smaller than those of the chunk before.
    """
    if g is None:
        kept, seen, through, scores = k, q, None, (q @ k.mT).tril()
    else:
        since = g.cumsum(-2)
        until = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
        kept, seen, through = k * until.exp(), q * since.exp(), since[..., -1:, :].mT.exp()
        scores = by_halves(q, k, g) if g.shape[-1] > 1 else (q @ k.mT) * between(g.squeeze(-1)).exp().tril()
    added, before = kept.mT @ items, []
    for n in range(q.shape[2]):
        state = state if rise is None else state * rise[:, :, n]
        before.append(state)
        state = (state if through is None else state * through[:, :, n]) + added[:, :, n]
    before = torch.stack(before, 2)
    return seen @ before + scores @ items, before, state


def between(g: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c c"]:
    """sum_{i<r<=t} g_r at (t, i), 0 for i >= t: summed, not subtracted."""
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(later, g.unsqueeze(-1), 0).cumsum(-2)


def by_halves(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """sum_c q_tc exp(sum_{i<r<=t} g_rc) k_ic for i <= t.

    Between two halves, as what is left of k at their border, times what of that is left at q; inside each, again.
    """
    time = q.shape[-2]
    if time == 1:
        return (q * k).sum(-1, keepdim=True)
    if time % 2:
        q, k, g = (F.pad(x, (0, 0, 0, 1)) for x in (q, k, g))
        return by_halves(q, k, g)[..., :time, :time]
    q, k, g = (x.unflatten(-2, (2, time // 2)) for x in (q, k, g))
    (first, second), since = by_halves(q, k, g).unbind(-3), g[..., 1, :, :].cumsum(-2)
    until = F.pad(g[..., 0, 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    across = (q[..., 1, :, :] * since.exp()) @ (k[..., 0, :, :] * until.exp()).mT
    return torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([across, second], -1)], -2)


def by_fla(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    items: Float[Tensor, "b t h d"],
    g: Tensor | None,
    state: States | None,
    opens: Bool[Tensor, "b t"] | None,
) -> tuple[Float[Tensor, "b t h d"], States]:
    """The rows, and the state after the last token; d is a multiple of 16, q, k and items have one dtype.

    g (B, T, H) or (B, T, H, d_k) and the state are float32; opens: where a document begins."""
    inputs, borders = [q, k, items, g], None
    if opens is not None:  # rows one after another, each document a sequence; the first of a row continues its state
        rows, time = opens.shape
        opens = opens.flatten()
        starts = (opens | (torch.arange(len(opens), device=opens.device) % time == 0)).nonzero().squeeze(1)
        borders = F.pad(starts, (0, 1), value=len(opens))
        finals = torch.searchsorted(starts, time * torch.arange(1, rows + 1, device=starts.device)) - 1
        inputs = [None if x is None else x.flatten(0, 1).unsqueeze(0) for x in inputs]
        if state is not None:
            state = torch.where(opens[starts, None, None, None], 0, state[starts // time])
    run = fla_kernel(g, inputs[0].shape[1])
    out, last = run(*inputs, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=borders)
    if opens is None:
        return out, last
    return out.view(rows, time, *out.shape[2:]), last.index_select(0, finals)


@cache
def miscompiled(device: torch.device) -> bool:
    """Whether Triton makes wrong code of fla's `chunk_simple_gla`: its versions 3.4.0 to 3.7.0 do on an H100 or H200.

    fla refuses the gradient of one decay per head there. A decay per key channel has other kernels, which read the same
    with that of the head in every channel. Without a decay products of bfloat16 gave wrong gradients on an H100 and
    read out of bounds on an H200; those of float32 were right on both.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return "3.4.0" <= TorchVersion(triton.__version__) < "3.7.1"


def fla_kernel(g: Tensor | None, time: int):
    """fla's kernel for such a decay (B, T, H), (B, T, H, d_k) or None, of a single token or of many."""
    if g is not None and g.ndim == 4:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla

        return fused_recurrent_gla if time == 1 else chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    return fused_recurrent_simple_gla if time == 1 else chunk_simple_gla
