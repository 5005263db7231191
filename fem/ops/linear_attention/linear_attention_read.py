"""The read of the priors `linear` and `gla`: linear attention, gated by a decay where there is one."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import by_kernels, scan_backend
from fem.ops.common.precision import compute_dtype
from fem.ops.common.read import NO_WEIGHT, Read, Terms, log, read_free
from fem.ops.common.scan import ScanCall, memory_before
from fem.ops.common.slabs import STATELESS, SlabScan
from fem.ops.common.sums import Shift, Sums, entering, leaving, shift_for, suspect
from fem.ops.common.tokens import Tokens, filled
from fem.ops.linear_attention.chunked import CHUNK, chunked
from fem.ops.linear_attention.linear_log_space import LinearInputs, decay, linear_step

TOKENS_AT_A_TIME = 2**12  # of a slab, over rows and heads: intermediate results fit the CPU's cache
LARGE_FEATURE = 2.0**23  # and the inverse of a small one: from here on products of features are summed in float64


def linear_attention_read(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    free_values: Float[Tensor, "b t h df"] | None = None,
    *,
    call: ScanCall,
) -> Read | tuple[Read, dict[str, Tensor]]:
    """`fem.functional.keyed_scan_read` of checked arguments.

    state: what each key channel has kept, as the read of all tokens before under its own weights, batch first:
    log_weight (B, H, d_k), mean (B, H, d_k, d_v) and free_energy (B, H, d_k, d_f), in fp32 (float64 for float64).
    """
    backend = scan_backend(call.backend, v.device, compute_dtype(q, k, v, log_decay))
    f, rate = read_free(v, free_values, beta)
    one_way = partial(_linear_one_way, backend=backend)
    terms, state = call.both_ways(one_way, (q, k, v, f, log_decay), rate, widen=backend != "triton")
    return call.result(terms, state, rate, v.dtype, beta)


def by_kernels_of_fla(backend: str, x: Tensor) -> bool:
    """Whether kernels of flash-linear-attention read such a tensor's products."""
    return scan_backend(backend, x.device, compute_dtype(x)) == "triton"


def _linear_one_way(
    q, k, v, f, log_decay, beta, tokens: Tokens, state, present: bool, backend: str
) -> tuple[Terms, dict[str, Tensor]]:
    """The read of the tokens up to each (before each, unless `present`), and the state after the last."""
    q, k, v, f, g = _kept(q, k, v, f, log_decay, tokens)
    beta = beta.to(compute_dtype(q, k, v, g))
    if not present:
        q, k, v, f = _delayed(q, k, v, f, g, tokens.start)
    cells = k.shape[0], *k.shape[2:]
    memory = memory_before(state, beta, (*cells, 1), (*cells, v.shape[-1]), (*cells, f.shape[-1]))
    x = LinearInputs(q, k, g, tokens.start, v, f, beta)
    terms, after = LINEAR_SCAN(memory, backend, x, stateless=state is None)
    return terms, after._replace(log_weight=after.log_weight.squeeze(-1))._asdict()


def _kept(q, k, v, f, log_decay, tokens: Tokens) -> tuple[Tensor | None, ...]:
    """Inputs in which masked tokens read, add and decay nothing, and the decay (B, T, H, 1 or d_k)."""
    g = log_decay.unsqueeze(-1) if log_decay is not None and log_decay.ndim == 3 else log_decay
    if tokens.keep is None:
        return q, k, v, f, g
    keep = tokens.keep[:, :, None, None]
    q, k, g = (None if x is None else torch.where(keep, x, 0) for x in (q, k, g))
    return q, k, filled(v, keep), filled(f, keep), g


def _delayed(q, k, v, f, g, opens) -> tuple[Tensor, ...]:
    """Keys and values that each come one token later, and so are never read by their own; nor does a first one read."""
    later = lambda x: torch.cat([x[:, :1], x[:, :-1]], 1)  # noqa: E731
    k, v, f = F.pad(k[:, :-1], (0, 0, 0, 0, 1, 0)), later(v), later(f)
    q, k = F.pad(q[:, 1:], (0, 0, 0, 0, 1, 0)), k if g is None else k * g.exp()
    if opens is not None:
        q, k = (torch.where(opens[:, :, None, None], 0, x) for x in (q, k))
    return q, k, v, f


def _chunks(x: Tensor) -> Tensor:
    """(B, N, C, H, d) of (B, T, H, d)."""
    size = min(CHUNK, x.shape[1])
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def _shifts(memory: Terms, k: Tensor, f: Tensor, rate: Tensor) -> tuple[Shift, Tensor | None]:
    """The shift of each chunk, (B, H, N, 1, ..), and by how much sums fall from the one before.

    It rises with the highest value so far: a spike to come takes no digits from the chunks before it.
    """
    highest = f.detach().amax(3, keepdim=True).cummax(2).values
    heaviest = log(k.detach().amax((2, 3, 4)))[..., None, None]
    weight, lowest, _ = shift_for(memory, highest[:, :, 0], heaviest, rate)
    value = torch.maximum(highest, lowest.unsqueeze(2))
    shift = Shift(weight.unsqueeze(2), value, value).about(f, rate, 2, 3)
    shift = shift._replace(middle=shift.middle.expand_as(value))
    if value.shape[2] == 1:
        return shift, None
    before = torch.cat([value[:, :, :1], value[:, :, :-1]], 2)
    fall = (rate.detach().unsqueeze(1) * (before - value)).exp()
    ones = fall.new_ones(*fall.shape[:-1], memory.mean.shape[-1])
    return shift, torch.cat([ones, fall, fall.new_ones(*fall.shape[:-1], 1)], -1)


class _LinearScan(SlabScan):
    name, Inputs, keeps_graph = "linear_attention", LinearInputs, True

    def step(self, memory, x):
        if not by_kernels(*(part for part in x if part is not x.opens), *memory):
            return linear_step(memory, x)
        from fem.ops.linear_attention.linear_token import linear_token  # by Triton, which the library does not require

        return linear_token(memory, x)

    def slab(self, memory, kernels, x):
        if not kernels:
            return self._in_chunks(memory, x)
        from fem.ops.linear_attention.kernel_read import kernel_read  # by Triton, which the library does not require

        found = kernel_read(self.again, kernels != STATELESS, memory, x)
        return None if found is None else (*found, 0)

    def size(self, x):
        return CHUNK * torch.sym_max(1, TOKENS_AT_A_TIME // (torch.sym_max(1, x.v.shape[0] * x.v.shape[2]) * CHUNK))

    def rough(self, x):
        """Whether features are so large or small that their products are summed in float64."""
        most = torch.stack([x.q.amax(), x.k.amax()])
        return bool((most > LARGE_FEATURE).any() | ((most < 1 / LARGE_FEATURE) & (most > 0)).any())

    def _in_chunks(self, memory: Terms, x: LinearInputs) -> tuple[Terms, Terms, int] | None:
        """A slab by matrix products, chunk by chunk, and step by step what is in doubt."""
        beta, rate, time = x.beta, x.beta.unsqueeze(1), x.v.shape[1]
        tokens = [None if part is None else _chunks(part) for part in (x.q, x.k, decay(x), x.v, x.f)]
        q, k, g, v, f = (None if part is None else part.permute(0, 3, 1, 2, 4) for part in tokens)  # (B, H, N, C, d)
        shift, rise = _shifts(memory, k, f, rate)
        items = torch.cat([v, shift.exponent(f, rate.unsqueeze(1)).exp(), v.new_ones(*v.shape[:-1], 1)], -1)
        light = k * (-shift.weight).exp()
        first, last = (Shift(shift.weight[:, :, 0], shift.value[:, :, n], shift.middle[:, :, n]) for n in (0, -1))
        sums, before, sums_after = chunked(q, light, items, g, torch.cat(entering(memory, first, rate), -1), rise)
        rows, ends, floor = Sums.split(sums, beta), Sums.split(sums_after, beta), q.detach().sum(-1, keepdim=True)
        suspected = bool(suspect(rows, floor) | suspect(ends))
        read, doubt = leaving(rows, shift, rate.unsqueeze(1), floor, suspected)
        after, lost = leaving(ends, last, rate, suspected=suspected)
        read = [part.permute(0, 2, 3, 1, 4) for part in read]  # (B, N, C, H, d)
        again = 0
        if doubt is not None or lost is not None:
            held, keys = (memory.log_weight > NO_WEIGHT).mT, (k > 0).any(3)
            at_end = held | (
                keys.cumsum(2) > 0
            )  # whether a key channel holds anything after each chunk, (B, H, N, d_k)
            at_start = held | (keys.cumsum(2) > keys.long())
            if lost is not None and bool((lost.squeeze(-1) & at_end[:, :, -1]).any()):
                return None
        if doubt is not None:
            alive = (q > 0).any(-1) & at_end.any(-1, keepdim=True)
            chunks = (doubt.squeeze(-1) & alive).any(3).any(1).nonzero(as_tuple=True)
            starts, lost = leaving(Sums.split(before, beta), shift, rate.unsqueeze(1))
            if lost is not None and bool((lost.squeeze(-1) & at_start).transpose(1, 2)[chunks].any()):
                return None
            if len(chunks[0]):
                start = Terms(*(part.transpose(1, 2)[chunks] for part in starts))
                q, k, g, v, f = (None if part is None else part[chunks] for part in tokens)
                exact, _ = self.exact(start, LinearInputs(q, k, g, None, v, f, beta))
                read = [part.index_put(chunks, y) for part, y in zip(read, exact)]
                again = exact.free_energy.numel()
        return Terms(*(part.flatten(1, 2)[:, :time] for part in read)), after, again


LINEAR_SCAN = _LinearScan()
