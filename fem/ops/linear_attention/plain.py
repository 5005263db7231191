"""Linear attention as one differentiable operator.

Time is cut into slabs, and slabs into chunks. In a slab it is computed what each chunk adds to the state
(`chunk.remember`), then the state at every chunk's start (`state_passing`), then what each chunk reads (`chunk.read`).
For the backward pass only the states at the slabs' boundaries are kept; it computes the rest again.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fem.ops.common import flops
from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.precision import double, needs_float64, products_overflow
from fem.ops.common.read import Terms
from fem.ops.common.transforms import again_differentiable
from fem.ops.linear_attention.chunk import (
    Chunk,
    State,
    adds,
    read,
    read_backward,
    read_exactly,
    remember,
    remember_backward,
    remember_exactly,
    sees,
)
from fem.ops.linear_attention.decode import by_steps
from fem.ops.linear_attention.fallback import Way, compute, differentiate
from fem.ops.linear_attention.state_passing import pass_states, pass_states_backward

CHUNK = 64
CHUNK_OF_CHANNEL_DECAY = 16  # smaller, as its pairs are scored one by one, not by a matrix product
TOKENS_AT_A_TIME = 2**12  # of a slab, over rows and heads: intermediate results fit the CPU's cache

REMEMBER = Way(remember, remember_backward, remember_exactly, adds)


def read_way(present: bool) -> Way:
    return Way(
        lambda *records: read(*records, present),
        lambda *records: read_backward(*records, present),
        lambda *records: read_exactly(*records, present),
        lambda *records: sees(*records, present),
    )


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

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None) -> Chunk:
        """beta is (B H, 1, d_v)."""
        beta = None if beta is None else beta.repeat_interleave(self.chunks, 0)
        return Chunk(self.split(q), self.split(k), self.split(g), self.split(v, fill=torch.clone), beta)

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


@torch.library.custom_op(
    "fem::linear_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor log_weight, Tensor mean, "
    "Tensor? free_energy, bool present) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def scan(q, k, v, beta, g, log_weight, mean, free_energy, present):
    """Reads (3), the final state (3); for the backward pass the states where slabs begin (3) and the fallbacks (2)."""
    start = State(log_weight, mean, free_energy if beta is not None else None)
    in_float64 = needs_float64(v, beta) or products_overflow(q, k)
    with torch.autocast(q.device.type, enabled=False):
        if not in_float64:
            return _scan(q, k, v, beta, g, start, present)
        results = _scan(*double(q, k, v, beta, g), State(*double(*start)), present)
        return tuple(x.to(q.dtype) if x.is_floating_point() else x for x in results)


def _scan(q, k, v, beta, g, start: State, present: bool) -> tuple[Tensor, ...]:
    reads = Terms(*_empty_reads(q, v, beta))
    rows = rows_of(beta, len(q))
    state = _flat(start)
    entering, fallbacks_added, fallbacks_read = [], [], []
    for slab in _slabs(q, g):
        entering.append(state)
        chunk = slab.inputs(q, k, v, rows, g)
        added, fallback_added = compute(REMEMBER, chunk)
        along = pass_states(state, slab.per_row(added), slab.through(chunk), rows)
        before = _flat(_each(along, lambda x: x[:, :-1]))
        state = _each(along, lambda x: x[:, -1])
        terms, fallback_read = compute(read_way(present), chunk, before)
        for out, x in zip(reads, terms):
            if x is not None:
                slab.write(out, x)
        fallbacks_added.append(fallback_added)
        fallbacks_read.append(fallback_read)
    fallback_read = torch.cat(fallbacks_read)
    again = int(fallback_read.count_nonzero()) / max(1, len(fallback_read))
    fallbacks.count(reads.mean.numel(), round(again * reads.mean.numel()))
    last = _each(state, lambda x: x.unflatten(0, start.log_weight.shape[:2]).contiguous())
    entering.append(state)  # so that there are at least two: torch.compile specialises a graph to a size of one
    entering = (None if parts[0] is None else torch.stack(parts) for parts in zip(*entering))
    results = (q.new_empty(0) if x is None else x for x in (*last, *entering))
    return *reads, *results, torch.cat(fallbacks_added), fallback_read


def _empty_reads(q: Tensor, v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], 1)), v.new_empty(v.shape), v.new_empty(0 if beta is None else v.shape)


@scan.register_fake
def _(q, k, v, beta, g, log_weight, mean, free_energy, present):
    chunk, step = _sizes(q, g)
    time, rows, free = q.shape[1], q.shape[0] * q.shape[2], beta is not None
    last = [q.new_empty(shape) for shape in (log_weight.shape, mean.shape, mean.shape if free else 0)]
    slabs = (time + step - 1) // step + 1
    shapes = [(slabs, rows, *shape[2:]) for shape in (log_weight.shape, mean.shape)]
    entering = [q.new_empty(shape) for shape in (*shapes, shapes[1] if free else 0)]
    fallbacks = [q.new_empty(rows * ((time + chunk - 1) // chunk), dtype=torch.uint8) for _ in range(2)]
    return *_empty_reads(q, v, beta), *last, *entering, *fallbacks


@torch.library.custom_op(
    "fem::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor[] saved, bool present) "
    "-> Tensor[]",
)
def scan_backward(grads, q, k, v, beta, g, saved, present):
    """Gradients of q, k, v, the initial state (2 or 3), beta and g, as far as there are any."""
    in_float64 = needs_float64(v, beta) or products_overflow(q, k)
    with torch.autocast(q.device.type, enabled=False):
        if not in_float64:
            return _scan_backward(grads, q, k, v, beta, g, saved, present)
        *entering, fallback_added, fallback_read = saved
        saved = [*double(*entering), fallback_added, fallback_read]
        results = _scan_backward(double(*grads), *double(q, k, v, beta, g), saved, present)
        return [x.to(q.dtype) for x in results]


def _scan_backward(grads, q, k, v, beta, g, saved, present: bool) -> list[Tensor]:
    free = beta is not None
    rows = rows_of(beta, len(q))
    slabs = _slabs(q, g)
    *entering, fallbacks_added, fallbacks_read = saved
    counts = [slab.batch * slab.heads * slab.chunks for slab in slabs]
    fallbacks = list(zip(fallbacks_added.split(counts), fallbacks_read.split(counts)))
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_g = None if g is None else torch.empty_like(g, memory_format=torch.contiguous_format)
    d_rows = None if beta is None else torch.zeros_like(rows)
    d_state = _flat(State(grads[3], grads[4], grads[5] if free else None))
    for n in reversed(range(len(slabs))):
        slab, (fallback_added, fallback_read) = slabs[n], fallbacks[n]
        chunk = slab.inputs(q, k, v, rows, g)
        start = State(entering[0][n], entering[1][n], entering[2][n] if free else None)
        added, through = slab.per_row(compute(REMEMBER, chunk)[0]), slab.through(chunk)
        along = pass_states(start, added, through, rows)
        before = _flat(_each(along, lambda x: x[:, :-1]))

        d_log_weight, *d_reads = (slab.split(x) for x in grads[: 3 if free else 2])
        d_terms = Terms(d_log_weight.squeeze(-1), *d_reads)
        d_chunk, d_before = differentiate(read_way(present), fallback_read, d_terms, chunk, before)
        d_state, d_added, d_through, d_beta = pass_states_backward(
            slab.per_row(d_before), d_state, along, added, through, rows
        )
        (d_more,) = differentiate(REMEMBER, fallback_added, _flat(d_added), chunk)

        slab.write(d_q, d_chunk.q)
        slab.write(d_k, d_chunk.k + d_more.k)
        slab.write(d_v, d_chunk.v + d_more.v)
        if free:
            d_rows += d_beta + (d_chunk.beta + d_more.beta).unflatten(0, (-1, slab.chunks)).sum(1)
        if g is not None:
            d_through = d_through if d_through.shape[-1] == g.shape[-1] else d_through.sum(-1, keepdim=True)
            slab.write(d_g, d_chunk.g + d_more.g + d_through.flatten(0, 1).unsqueeze(1))
    d_start = [x.unflatten(0, (len(q), -1)).contiguous() for x in d_state if x is not None]
    d_beta = None if beta is None else d_rows.unflatten(0, (len(q), -1)).sum((0, 2))
    return [x for x in (d_q, d_k, d_v, *d_start, d_beta, d_g) if x is not None]


@scan_backward.register_fake
def _(grads, q, k, v, beta, g, saved, present):
    states = grads[3:6] if beta is not None else grads[3:5]
    inputs = (x for x in (q, k, v, *states, beta, g) if x is not None)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _save(ctx, inputs, output):
    q, k, v, beta, g, *start, ctx.present = inputs
    ctx.continued = any(ctx.needs_input_grad[5:8])  # else the start is the first of the states at slabs' boundaries
    ctx.save_for_backward(q, k, v, beta, g, *output[6:], *(start if ctx.continued else ()))
    ctx.shapes = [x.shape for x in output[:6]]
    ctx.set_materialize_grads(False)


def _by_steps(present, *tensors):
    """The outputs of `scan` in steps that PyTorch can differentiate any number of times, in float64."""
    q, k, v, beta, g, *start = double(*tensors)
    terms, last = by_steps(q, k, v, beta, g, State(*start), present)
    return [v.new_zeros(0) if x is None else x.to(tensors[2].dtype) for x in (*terms, *last)]


def _differentiate(ctx, *grads):
    tensors = ctx.saved_tensors  # read once: checkpointing hands it out but once
    q, k, v, beta, g = tensors[:5]
    saved, start = tensors[5:10], tensors[10:]
    if torch.is_grad_enabled():
        if not ctx.continued:
            start = [x[0].unflatten(0, (len(q), -1)) if x.numel() else None for x in saved[:3]]
        found = again_differentiable(partial(_by_steps, ctx.present), (q, k, v, beta, g, *start), grads[:6])
        return *found, None
    grads = [q.new_zeros(shape) if x is None else x for x, shape in zip(grads, ctx.shapes)]
    return by_input(scan_backward(grads, q, k, v, beta, g, saved, ctx.present), beta, g)


def by_input(gradients: list[Tensor], beta: Tensor | None, g: Tensor | None) -> tuple[Tensor | None, ...]:
    """What `scan_backward` returns, in the order of the inputs of `scan`, with None for those that are not given."""
    found = iter(gradients)
    d_q, d_k, d_v, d_weight, d_mean = (next(found) for _ in range(5))
    d_free_energy, d_beta = (None, None) if beta is None else (next(found), next(found))
    return d_q, d_k, d_v, d_beta, None if g is None else next(found), d_weight, d_mean, d_free_energy, None


scan.register_autograd(_differentiate, setup_context=_save)
register_flop_formula(torch.ops.fem.linear_attention)(flops.linear_attention)
register_flop_formula(torch.ops.fem.linear_attention_backward)(flops.linear_attention_backward)
