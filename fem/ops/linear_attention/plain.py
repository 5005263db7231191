"""Linear attention as one differentiable operator.

Time is cut into slabs, and slabs into chunks. A slab computes what each chunk adds to the state
(`chunk.contribution`), the state at every chunk's start (`state_passing`), and what each chunk reads (`chunk.read`).
For the backward pass only the states at the slabs' boundaries are kept; it computes the rest again.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.operator import operator
from fem.ops.common.precision import double, needs_float64, products_overflow, without_autocast
from fem.ops.common.read import Terms
from fem.ops.common.transforms import again_differentiable
from fem.ops.linear_attention.chunk import (
    Chunk,
    State,
    adds,
    contribution,
    contribution_backward,
    contribution_exactly,
    read,
    read_backward,
    read_exactly,
    sees,
)
from fem.ops.linear_attention.decode import by_steps
from fem.ops.linear_attention.fallback import Way, compute, differentiate
from fem.ops.linear_attention.state_passing import pass_states, pass_states_backward

CHUNK = 64
CHUNK_OF_CHANNEL_DECAY = 16  # smaller, as its pairs are scored one by one, not by a matrix product
TOKENS_AT_A_TIME = 2**12  # of a slab, over rows and heads: intermediate results fit the CPU's cache

CONTRIBUTION = Way(contribution, contribution_backward, contribution_exactly, adds)


def read_way(present: bool) -> Way:
    return Way(*(partial(compute, present=present) for compute in (read, read_backward, read_exactly, sees)))


class Slab:
    """Tokens [start, stop) of (B, T, H, d), as chunks (B H N, C, d). States are (B H, ...) or (B H, N, ...)."""

    def __init__(self, batch: int, heads: int, start: int, stop: int, chunk: int):
        self.batch, self.heads, self.start, self.stop, self.chunk = batch, heads, start, stop, chunk
        self.chunks = -(-(stop - start) // chunk)

    def split(self, x: Tensor | None, fill=torch.zeros_like) -> Tensor | None:
        """x as chunks. fill: makes of the last token those that fill up the last chunk."""
        if x is None:
            return None
        x = x[:, self.start : self.stop]
        if padding := self.chunks * self.chunk - x.shape[1]:
            x = torch.cat([x, fill(x[:, -1:]).expand(-1, padding, -1, -1)], 1)
        return x.unflatten(1, (self.chunks, self.chunk)).permute(0, 3, 1, 2, 4).flatten(0, 2).contiguous()

    def write(self, out: Tensor, x: Tensor) -> None:
        x = x.view(self.batch, self.heads, self.chunks, self.chunk, out.shape[-1]).permute(0, 2, 3, 1, 4)
        out[:, self.start : self.stop] = x.flatten(1, 2)[:, : self.stop - self.start]

    def inputs(self, q, k, v, free, beta, g) -> Chunk:
        """beta is (B H, 1, d_f)."""
        beta = None if beta is None else beta.repeat_interleave(self.chunks, 0)
        values = (self.split(x, fill=torch.clone) for x in (v, free))
        return Chunk(self.split(q), self.split(k), self.split(g), *values, beta)

    def through(self, chunk: Chunk) -> Tensor | None:
        return None if chunk.g is None else chunk.g.sum(1).unflatten(0, (-1, self.chunks))

    def per_row(self, state: State) -> State:
        return _each(state, lambda x: x.unflatten(0, (-1, self.chunks)))


def _sizes(q: Tensor, g: Tensor | None) -> tuple[int, int]:
    """Tokens per chunk and per slab, in a long sequence; under a compiler the sizes may be symbolic."""
    chunk = CHUNK if g is None or g.shape[-1] == 1 else CHUNK_OF_CHANNEL_DECAY
    rows = torch.sym_max(1, q.shape[0] * q.shape[2])
    return chunk, chunk * torch.sym_max(1, TOKENS_AT_A_TIME // (rows * chunk))


def _slabs(q: Tensor, g: Tensor | None) -> list[Slab]:
    batch, time, heads, _ = q.shape
    chunk, step = _sizes(q, g)
    return [Slab(batch, heads, start, min(start + step, time), min(chunk, time)) for start in range(0, time, step)]


def _each(state: State, change) -> State:
    return State(*(None if x is None else change(x) for x in state))


def _flat(state: State) -> State:
    return _each(state, lambda x: x.flatten(0, 1))


def rows_of(beta: Tensor | None, batch: int) -> Tensor | None:
    return None if beta is None else beta.unsqueeze(1).repeat(batch, 1, 1)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? free, Tensor? beta, Tensor? g"


@operator(f"linear_attention({_INPUTS}, Tensor[] start, bool present) -> Tensor[]")
def scan(q, k, v, free, beta, g, start, present):
    """The terms of the reads, the final state, and for the backward pass the states where slabs begin and the two
    fallbacks; terms and states are 3 each, without a beta 2."""
    start = State(*start)
    in_float64 = needs_float64(v if free is None else free, beta) or products_overflow(q, k)
    with without_autocast(q.device):
        if not in_float64:
            return _scan(q, k, v, free, beta, g, start, present)
        results = _scan(*double(q, k, v, free, beta, g), State(*double(*start)), present)
        return [x.to(q.dtype) if x.is_floating_point() else x for x in results]


def _scan(q, k, v, free, beta, g, start: State, present: bool) -> list[Tensor]:
    reads = _empty_reads(q, v, free, beta)
    rows = rows_of(beta, len(q))
    state = _flat(start)
    entering, fallbacks_added, fallbacks_read = [], [], []
    for slab in _slabs(q, g):
        entering.append(state)
        chunk = slab.inputs(q, k, v, free, rows, g)
        added, fallback_added = compute(CONTRIBUTION, chunk)
        along = pass_states(state, slab.per_row(added), slab.through(chunk), rows)
        before = _flat(_each(along, lambda x: x[:, :-1]))
        state = _each(along, lambda x: x[:, -1])
        terms, fallback_read = compute(read_way(present), chunk, before)
        for out, x in zip(reads, terms):
            slab.write(out, x)
        fallbacks_added.append(fallback_added)
        fallbacks_read.append(fallback_read)
    fallback_read = torch.cat(fallbacks_read)
    again = int(fallback_read.count_nonzero()) / max(1, len(fallback_read))
    entries = 0 if beta is None else reads[2].numel()
    fallbacks.count(entries, round(again * entries))
    last = [x.unflatten(0, start.log_weight.shape[:2]).contiguous() for x in state if x is not None]
    entering.append(state)  # so that there are at least two: torch.compile specialises a graph to a size of one
    entering = [torch.stack(parts) for parts in zip(*entering) if parts[0] is not None]
    return [*reads, *last, *entering, torch.cat(fallbacks_added), fallback_read]


def _empty_reads(q: Tensor, v: Tensor, free: Tensor | None, beta: Tensor | None) -> list[Tensor]:
    energies = [] if beta is None else [v if free is None else free]
    return [q.new_empty((*q.shape[:3], 1)), *(x.new_empty(x.shape) for x in (v, *energies))]


@scan.register_fake
def _(q, k, v, free, beta, g, start, present):
    chunk, step = _sizes(q, g)
    time, rows = q.shape[1], q.shape[0] * q.shape[2]
    slabs = (time + step - 1) // step + 1
    last = [x.new_empty(x.shape) for x in start]
    entering = [x.new_empty(slabs, rows, *x.shape[2:]) for x in start]
    fallbacks = [q.new_empty(rows * ((time + chunk - 1) // chunk), dtype=torch.uint8) for _ in range(2)]
    return [*_empty_reads(q, v, free, beta), *last, *entering, *fallbacks]


@operator(f"linear_attention_backward(Tensor[] grads, {_INPUTS}, Tensor[] saved, bool present) -> Tensor[]")
def scan_backward(grads, q, k, v, free, beta, g, saved, present):
    """Gradients of q, k, v, the initial state, free, beta and g, as far as there are any."""
    in_float64 = needs_float64(v if free is None else free, beta) or products_overflow(q, k)
    with without_autocast(q.device):
        if not in_float64:
            return _scan_backward(grads, q, k, v, free, beta, g, saved, present)
        *entering, fallback_added, fallback_read = saved
        saved = [*double(*entering), fallback_added, fallback_read]
        results = _scan_backward(double(*grads), *double(q, k, v, free, beta, g), saved, present)
        return [x.to(q.dtype) for x in results]


def _scan_backward(grads, q, k, v, free, beta, g, saved, present: bool) -> list[Tensor]:
    reads = len(grads) // 2
    rows = rows_of(beta, len(q))
    slabs = _slabs(q, g)
    *entering, fallbacks_added, fallbacks_read = saved
    counts = [slab.batch * slab.heads * slab.chunks for slab in slabs]
    fallbacks = list(zip(fallbacks_added.split(counts), fallbacks_read.split(counts)))
    d_q, d_k, d_v, d_free, d_g = (
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, free, g)
    )
    d_rows = None if beta is None else torch.zeros_like(rows)
    d_state = _flat(State(*grads[reads:]))
    for n in reversed(range(len(slabs))):
        slab, (fallback_added, fallback_read) = slabs[n], fallbacks[n]
        chunk = slab.inputs(q, k, v, free, rows, g)
        start = State(*(x[n] for x in entering))
        added, through = slab.per_row(compute(CONTRIBUTION, chunk)[0]), slab.through(chunk)
        along = pass_states(start, added, through, rows)
        before = _flat(_each(along, lambda x: x[:, :-1]))

        d_log_weight, *d_reads = (slab.split(x) for x in grads[:reads])
        d_terms = Terms(d_log_weight.squeeze(-1), *d_reads)
        d_chunk, d_before = differentiate(read_way(present), fallback_read, d_terms, chunk, before)
        d_state, d_added, d_through, d_beta = pass_states_backward(
            slab.per_row(d_before), d_state, along, added, through, rows
        )
        (d_more,) = differentiate(CONTRIBUTION, fallback_added, _flat(d_added), chunk)

        slab.write(d_q, d_chunk.q)
        slab.write(d_k, d_chunk.k + d_more.k)
        slab.write(d_v, d_chunk.v + d_more.v)
        if free is not None:
            slab.write(d_free, d_chunk.free + d_more.free)
        if beta is not None:
            d_rows += d_beta + (d_chunk.beta + d_more.beta).unflatten(0, (-1, slab.chunks)).sum(1)
        if g is not None:
            d_through = d_through if d_through.shape[-1] == g.shape[-1] else d_through.sum(-1, keepdim=True)
            slab.write(d_g, d_chunk.g + d_more.g + d_through.flatten(0, 1).unsqueeze(1))
    d_start = [x.unflatten(0, (len(q), -1)).contiguous() for x in d_state if x is not None]
    d_beta = None if beta is None else d_rows.unflatten(0, (len(q), -1)).sum((0, 2))
    return [x for x in (d_q, d_k, d_v, *d_start, d_free, d_beta, d_g) if x is not None]


@scan_backward.register_fake
def _(grads, q, k, v, free, beta, g, saved, present):
    inputs = (x for x in (q, k, v, *grads[len(grads) // 2 :], free, beta, g) if x is not None)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _save(ctx, inputs, output):
    *tensors, start, ctx.present = inputs
    ctx.reads = len(start)
    ctx.continued = any(x.requires_grad for x in start)  # else it is the first of the states at slabs' boundaries
    ctx.save_for_backward(*tensors, *output[2 * ctx.reads :], *(start if ctx.continued else ()))
    ctx.shapes = [x.shape for x in output[: 2 * ctx.reads]]
    ctx.set_materialize_grads(False)


def _by_steps(present, *tensors):
    """The outputs of `scan` in steps that PyTorch can differentiate any number of times, in float64."""
    q, k, v, free, beta, g, *start = double(*tensors)
    terms, last = by_steps(q, k, v, free, beta, g, State(*start), present)
    return [x.to(tensors[2].dtype) for x in (*terms, *last) if x is not None]


def _differentiate(ctx, grads):
    tensors, reads = ctx.saved_tensors, ctx.reads  # read once: checkpointing hands it out but once
    inputs, saved, start = tensors[:6], tensors[6 : 8 + reads], tensors[8 + reads :]
    q, (free, beta, g) = inputs[0], inputs[3:]
    if torch.is_grad_enabled():
        if not ctx.continued:
            start = [x[0].unflatten(0, (len(q), -1)) for x in saved[:reads]]
        gradients = again_differentiable(partial(_by_steps, ctx.present), (*inputs, *start), grads[: 2 * reads])
        return *gradients[:6], gradients[6:], None
    grads = [q.new_zeros(shape) if x is None else x for x, shape in zip(grads, ctx.shapes)]
    gradients = iter(scan_backward(grads, *inputs, saved, ctx.present))
    d_q, d_k, d_v, *d_start = (next(gradients) for _ in range(3 + reads))
    d_free, d_beta, d_g = (None if x is None else next(gradients) for x in (free, beta, g))
    return d_q, d_k, d_v, d_free, d_beta, d_g, d_start, None


scan.register_autograd(_differentiate, setup_context=_save)
