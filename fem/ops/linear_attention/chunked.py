"""The scan of linear attention by torch: chunks of tokens by matrix products, with a state between them.

    S_t = e^{g_t} S_{t-1} + k_t^T items_t        sums_t = q_t S_t        items = [v | e | 1]

No decay is ever divided by.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.backend import by_kernels
from fem.ops.common.precision import upcast
from fem.ops.common.read import NO_WEIGHT, Terms, log
from fem.ops.common.slabs import STATELESS, SlabScan
from fem.ops.common.sums import Shift, Sums, entering, leaving, shift_for, suspect
from fem.ops.linear_attention.linear_log_space import LinearInputs, decay, linear_step

TOKENS_AT_A_TIME = 2**12  # of a slab, over rows and heads: intermediate results fit the CPU's cache
LARGE_FEATURE = 2.0**23  # and the inverse of a small one: from here on products of features are summed in float64

Features = Float[Tensor, "b h n c dk"]
Items = Float[Tensor, "b h n c d"]
States = Float[Tensor, "b h dk d"]


class _LinearScan(SlabScan):
    name, Inputs = "linear_attention", LinearInputs

    def step(self, memory, x):
        if not by_kernels(*(part for part in x if part is not x.opens), *memory):
            return linear_step(memory, self._cast(x, upcast))
        from fem.ops.linear_attention.linear_token import linear_token  # by Triton, which the library does not require

        return linear_token(memory, x)

    def slab(self, memory, kernels, x):
        if not kernels:
            return self._in_chunks(memory, x)
        from fem.ops.linear_attention.fla_read import fla_read  # by Triton, which the library does not require

        found = fla_read(self.again, kernels != STATELESS, memory, x)
        return None if found is None else (*found, 0)

    def size(self, x):
        chunk, rows = _chunk_tokens(x.k), torch.sym_max(1, x.v.shape[0] * x.v.shape[2])
        return chunk * torch.sym_max(1, TOKENS_AT_A_TIME // (rows * chunk))

    def rough(self, x):
        """Whether features are so large or small that their products are summed in float64."""
        most = torch.stack([x.q.amax(), x.k.amax()])
        return bool((most > LARGE_FEATURE).any() | ((most < 1 / LARGE_FEATURE) & (most > 0)).any())

    def _in_chunks(self, memory: Terms, x: LinearInputs) -> tuple[Terms, Terms, int] | None:
        """`slab`; chunks in doubt are read token by token, and none is where a memory is in doubt."""
        chunk = _chunk_tokens(x.k)
        cut = LinearInputs(*(_chunks(part, chunk) for part in (x.q, x.k, decay(x), None, x.v, x.f)), x.beta)
        q, k, g, _, v, f = (None if part is None else part.permute(0, 3, 1, 2, 4) for part in cut[:-1])
        rate = x.beta.unsqueeze(1)
        shift, fall = _shifts(memory, k, f, rate)
        first, last = (Shift(*(part[:, :, n] for part in shift)) for n in (0, -1))
        items = torch.cat([v, shift.exponent(f, rate.unsqueeze(1)).exp(), v.new_ones(*v.shape[:-1], 1)], -1)
        state = torch.cat(entering(memory, first, rate), -1)
        found = chunked(q, k * (-shift.weight).exp(), items, g, state, fall)
        rows, starts, end = (Sums.split(sums, x.beta) for sums in found)

        floor = q.detach().sum(-1, keepdim=True)
        suspected = bool(suspect(rows, floor) | suspect(end))
        read, doubt = leaving(rows, shift, rate.unsqueeze(1), floor, suspected)
        after, lost = leaving(end, last, rate, suspected=suspected)
        read, again = Terms(*(part.permute(0, 2, 3, 1, 4) for part in read)), 0  # (B, N, C, H, d)
        if doubt is not None or lost is not None:
            held = _held(memory, k)
            if _any_held(lost, held[:, :, -1]):
                return None
            if doubt is not None:
                seen = held[:, :, :-1].any(-1, keepdim=True) | ((k > 0).any(-1).cumsum(-1) > 0)
                doubt = doubt.squeeze(-1) & (q > 0).any(-1) & seen
                where = doubt.any(3).any(1).nonzero(as_tuple=True)  # row and chunk
                starts, lost = leaving(starts, shift, rate.unsqueeze(1))
                if _any_held(lost, held[:, :, :-1], where):
                    return None
                read, again = self._token_by_token(read, starts, cut, where)
        return Terms(*(part.flatten(1, 2)[:, : x.v.shape[1]] for part in read)), after, again

    def _token_by_token(self, read: Terms, starts: Terms, cut: LinearInputs, where) -> tuple[Terms, int]:
        """The read, some of its chunks from the definition, and of how many entries."""
        if not len(where[0]):
            return read, 0
        start = Terms(*(part.transpose(1, 2)[where] for part in starts))
        tokens = LinearInputs(*(None if part is None else part[where] for part in cut[:-1]), cut.beta)
        exact, _ = self.exact(start, tokens)
        return Terms(*(part.index_put(where, y) for part, y in zip(read, exact))), exact.free_energy.numel()


LINEAR_SCAN = _LinearScan()


def _chunk_tokens(k: Float[Tensor, "b t h d"]) -> int:
    """On a CPU the scores within chunks of many narrow heads would leave the cache; elsewhere launches count chunks."""
    return 32 if k.device.type == "cpu" and k.shape[-1] <= 32 else 64


def _chunks(x: Float[Tensor, "b t h d"] | None, chunk: int) -> Float[Tensor, "b n c h d"] | None:
    """The tokens in chunks of C, the last filled up with 0."""
    if x is None:
        return None
    size = min(chunk, x.shape[1])
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def _shifts(memory: Terms, k: Features, f: Items, rate: Tensor) -> tuple[Shift, Float[Tensor, "b h n 1 _"] | None]:
    """The shift of each chunk, (B, H, N, 1, ..), and by how much sums fall from the one before; None of one chunk.

    It rises with the highest value so far: a spike to come takes no digits from the chunks before it.
    """
    highest = f.detach().amax(3, keepdim=True).cummax(2).values
    heaviest = log(k.detach().amax((2, 3, 4)))[..., None, None]
    weight, lowest, _ = shift_for(memory, highest[:, :, 0], heaviest, rate)
    value = torch.maximum(highest, lowest.unsqueeze(2))
    count = value.shape[2]
    middle = Shift(weight, value, value).about(f, rate, 2, 3).middle.expand_as(value)
    shift = Shift(weight.unsqueeze(2).expand(-1, -1, count, -1, -1), value, middle)
    if count == 1:
        return shift, None
    before = torch.cat([value[:, :, :1], value[:, :, :-1]], 2)
    fall = (rate.detach().unsqueeze(1) * (before - value)).exp()
    ones = fall.new_ones(*fall.shape[:-1], memory.mean.shape[-1])
    return shift, torch.cat([ones, fall, fall.new_ones(*fall.shape[:-1], 1)], -1)


def _held(memory: Terms, k: Features) -> Bool[Tensor, "b h more dk"]:
    """Which key channels hold anything before each chunk, and after the last."""
    before = (memory.log_weight > NO_WEIGHT).mT
    return torch.cat([before, (k > 0).any(3)], 2).cumsum(2) > 0


def _any_held(lost: Tensor | None, held: Tensor, where: tuple[Tensor, Tensor] | None = None) -> bool:
    """Whether a key channel whose sums are in doubt holds anything; where: in these rows and chunks."""
    if lost is None:
        return False
    doubt = lost.squeeze(-1) & held
    return bool((doubt if where is None else doubt.transpose(1, 2)[where]).any())


def chunked(
    q: Features, k: Features, items: Items, g: Tensor | None, state: States, fall: Float[Tensor, "b h n 1 d"] | None
) -> tuple[Items, Float[Tensor, "b h n dk d"], States]:
    """The rows, the state before each of n chunks, and the state after the last.

    g (B, H, N, C, 1 or d_k). fall: by how much the items of a chunk are smaller than those of the chunk before.
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
        state = state if fall is None else state * fall[:, :, n]
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
