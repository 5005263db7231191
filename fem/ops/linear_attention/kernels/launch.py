"""Linear attention by our kernels: their launches and gradients, and the chunks that they cannot prove exact.

Five steps, as in `fem.ops.linear_attention.plain`: scores inside the chunks, what chunks add to the state, the state
from chunk to chunk, and what the chunks read. Chunks in doubt are computed again by the plain form
(`fem.ops.linear_attention.fallback`). For the backward pass the inputs and the reads are kept; scores and states are
computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fem.ops.common import flops
from fem.ops.common.backend import next_width, triton_interprets
from fem.ops.common.fallback_count import fallbacks
from fem.ops.common.kernels.launch import on_amd, on_its_device
from fem.ops.common.read import Terms
from fem.ops.linear_attention.chunk import Chunk, State
from fem.ops.linear_attention.fallback import correct, recompute
from fem.ops.linear_attention.kernels.blocks import (
    PASSING_KEYS,
    PASSING_WARPS,
    WIDEST_KEY,
    Blocks,
    blocks_for,
    widest_value,
)
from fem.ops.linear_attention.kernels.channel_scores import channel_scores, channel_scores_gradients
from fem.ops.linear_attention.kernels.output import read, state_gradients, token_gradients
from fem.ops.linear_attention.kernels.scores import scores, scores_gradients
from fem.ops.linear_attention.kernels.state import remember, remember_gradients
from fem.ops.linear_attention.kernels.state_passing import pass_states, pass_states_gradients
from fem.ops.linear_attention.plain import REMEMBER, Slab, by_input, read_way, rows_of


def product_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """The dtype of the kernels' matrix products: bfloat16 for bfloat16 values, else float32; sums are float32.

    Raises ValueError on float64 and on keys wider than the kernels read.
    """
    if v.dtype == torch.float64:
        raise ValueError("backend='triton' computes in float32, got float64 inputs; use backend='auto'.")
    if q.shape[-1] > WIDEST_KEY:
        raise ValueError(
            f"backend='triton' reads key widths up to {WIDEST_KEY}, got {q.shape[-1]}; use backend='auto'."
        )
    return torch.bfloat16 if v.dtype == torch.bfloat16 and not triton_interprets() else torch.float32


def scan(q, k, v, beta, g, log_weight, mean, free_energy, present: bool):
    """Reads (3) and the final state (3), as `fem.ops.linear_attention.plain.scan` returns them.

    Values wider than the kernels hold become several heads of the same prior.
    """
    heads, width = v.shape[2:]
    parts = triton.cdiv(width, widest_value(q.dtype == torch.bfloat16))
    size = triton.cdiv(width, parts)

    def cut(x, filling, heads_at):
        """(.., heads, .., width) as (.., heads * parts, .., size)."""
        if x is None or parts == 1:
            return x
        x = F.pad(x, (0, parts * size - width), value=filling).unflatten(-1, (parts, size))
        return x.movedim(-2, heads_at + 1).flatten(heads_at, heads_at + 1)

    def joined(x, heads_at):
        if parts == 1 or x.ndim == 1:  # or there is none
            return x
        return x.unflatten(heads_at, (heads, parts)).movedim(heads_at + 1, -2).flatten(-2)[..., :width]

    q, k, g = (x if x is None or parts == 1 else x.repeat_interleave(parts, 2) for x in (q, k, g))
    log_weight = log_weight if parts == 1 else log_weight.repeat_interleave(parts, 1)
    exact = (cut(beta, 1, 0), g, log_weight, cut(mean, 0, 1), cut(free_energy, 0, 1))
    exact = (None if x is None else x.float().contiguous() for x in exact)
    found = _forward(q.contiguous(), k.contiguous(), cut(v, 0, 2).contiguous(), *exact, present)
    log_z, mean, free_energy, last_weight, last_mean, last_free_energy = found[:6]
    reads = log_z[:, :, ::parts], joined(mean, 2), joined(free_energy, 2)
    return *reads, last_weight[:, ::parts], joined(last_mean, 1), joined(last_free_energy, 1)


class Shape:
    """The sizes of a scan, and the launches and allocations that follow from them."""

    def __init__(self, q: Tensor, v: Tensor, g: Tensor | None):
        (self.batch, self.time, self.heads, self.dk), self.dv = q.shape, v.shape[-1]
        self.keys, self.values = next_width(self.dk), next_width(self.dv)
        self.half_precision, self.shared = q.dtype == torch.bfloat16, g is None or g.shape[-1] == 1
        self.chunk = self.blocks("").chunk
        self.chunks = triton.cdiv(self.time, self.chunk)
        self.slab = Slab(self.batch, self.heads, 0, self.time, self.chunk)

    def blocks(self, kernel: str, warp: int = 32) -> Blocks:
        return blocks_for(kernel, self.keys, self.values, self.half_precision, warp)

    def launch(self, kernel, *arguments, **constants) -> None:
        """One program per chunk, head and row; constants: those that not all kernels have, by name."""
        blocks = self.blocks(kernel.__name__, 64 if on_amd() else 32)
        known = {"DK": self.dk, "DV": self.dv, "KEYS": self.keys, "VALUES": self.values} | blocks.launch()
        known |= {"SIZES": self.chunk.bit_length() - 1} | constants
        taken = {name: x for name, x in known.items() if name in kernel.arg_names or not name.isupper()}
        kernel[(self.chunks, self.heads, self.batch)](*arguments, self.time, **taken)

    def along_chunks(self, kernel, *arguments) -> None:
        """One program per block of key channels, head and row."""
        kernel[(self.blocks_of_keys, self.heads, self.batch)](
            *arguments, self.chunks, DK=self.dk, DV=self.dv, VALUES=self.values, BLOCK=PASSING_KEYS,
            SHARED=self.shared, num_warps=PASSING_WARPS, enable_fp_fusion=True,
        )  # fmt: skip

    @property
    def blocks_of_keys(self) -> int:
        return triton.cdiv(self.dk, PASSING_KEYS)

    def of_chunks(self, like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return like.new_empty(self.batch, self.heads, self.chunks, *shape, dtype=dtype)

    def state(self, like: Tensor, chunks: int, free: bool) -> State:
        empty = lambda *shape: like.new_empty(self.batch, self.heads, chunks, *shape, dtype=torch.float32)  # noqa: E731
        matrix = (self.dk, self.dv)
        return State(empty(self.dk), empty(*matrix), empty(*matrix) if free else None)

    def records(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None) -> Chunk:
        """The chunks as the plain form takes them."""
        return self.slab.inputs(q.float(), k.float(), v.float(), rows_of(beta, self.batch), g)

    def plus(self, out: Tensor, more: Tensor) -> Tensor:
        """out plus the plain form's results for the same tokens."""
        whole = torch.zeros_like(out, dtype=torch.float32)
        self.slab.write(whole, more)
        return (out + whole).to(out.dtype)


class Work(NamedTuple):
    """What the forward computes on the way to the reads; the backward computes it again."""

    left: Tensor
    kept: Tensor
    through: Tensor | None
    pairs: Tensor
    added: State
    total: Tensor | None
    peaks: Tensor
    along: State  # at all chunk boundaries
    fallback: Tensor

    def before(self) -> State:
        """The state that each chunk reads, one row per chunk."""
        return State(*(None if x is None else x[:, :, :-1].flatten(0, 2) for x in self.along))


def _work(shape: Shape, q, k, v, beta, g, start: State, present: bool, differentiable: bool) -> Work:
    pairs = shape.of_chunks(q, shape.chunk, shape.chunk, dtype=q.dtype)
    left, kept, through = q, k, None
    if g is not None:
        left, kept = torch.empty_like(q), torch.empty_like(k)
        through = shape.of_chunks(q, g.shape[-1])
    kernel = scores if shape.shared else channel_scores
    shape.launch(kernel, q, k, g, left, kept, through, pairs, PRESENT=present)

    free = beta is not None
    added, along = shape.state(q, shape.chunks, free), shape.state(q, shape.chunks + 1, free)
    total = torch.empty_like(added.mean) if free and differentiable else None
    peaks = shape.of_chunks(q, shape.dv)
    doubt = shape.of_chunks(q, shape.dk, dtype=torch.int8)
    shape.launch(remember, k, kept, v, beta, *added, total, peaks, doubt)
    fallback = shape.of_chunks(q, dtype=torch.uint8).zero_()
    if doubt.any():
        flat = State(*(None if x is None else x.flatten(0, 2) for x in added))
        fallback.view(-1).copy_(recompute(REMEMBER, flat, doubt.flatten(0, 2).bool(), shape.records(q, k, v, beta, g)))
    shape.along_chunks(pass_states, *start, *added, through, beta, *along)
    return Work(left, kept, through, pairs, added, total, peaks, along, fallback)


@torch.library.custom_op(
    "fem::linear_attention_triton",
    mutates_args=(),
    tags=[torch.Tag.cudagraph_unsafe],  # it asks the device whether a chunk is in doubt
    schema="(Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor log_weight, Tensor mean, "
    "Tensor? free_energy, bool present) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
)
@on_its_device
def _forward(q, k, v, beta, g, log_weight, mean, free_energy, present):
    """Reads (3) and the final state (3); for the backward pass Z, R, the shifts and the fallbacks."""
    shape = Shape(q, v, g)
    work = _work(shape, q, k, v, beta, g, State(log_weight, mean, free_energy), present, False)
    *reads, weight, total, shifts, fallback = _reads(q, v, beta)
    again = 0.0
    doubt = shape.of_chunks(q, shape.chunk, dtype=torch.int8)
    state = (*work.along, work.peaks)
    shape.launch(read, work.left, work.pairs, v, beta, *state, *reads, weight, total, shifts, doubt)
    if doubt.any():
        log_z, *others = (shape.slab.split(x) for x in reads[: 2 if beta is None else 3])
        terms = Terms(log_z.squeeze(-1), *others)
        chunk = shape.records(q, k, v, beta, g)
        fallback.copy_(recompute(read_way(present), terms, doubt.flatten(0, 2).bool(), chunk, work.before()))
        for out, x in zip(reads, (log_z, *others)):
            shape.slab.write(out, x)
        again = int(fallback.count_nonzero()) / max(1, len(fallback))
    fallbacks.count(reads[1].numel(), round(again * reads[1].numel()))
    last = (None if x is None else x[:, :, -1].clone(memory_format=torch.contiguous_format) for x in work.along)
    return (
        *reads,
        *(q.new_empty(0, dtype=torch.float32) if x is None else x for x in last),
        weight,
        total,
        shifts,
        fallback,
    )


def _reads(q: Tensor, v: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    """Empty: log Z, mean, F, Z, R, the shifts and the fallbacks."""
    full = lambda *shape: q.new_empty(shape, dtype=torch.float32)  # noqa: E731
    free = (0,) if beta is None else v.shape
    shape = Shape(q, v, None)
    rows = q.new_zeros(shape.batch * shape.heads * shape.chunks, dtype=torch.uint8)
    reads = full(*q.shape[:3], 1), full(*v.shape), full(*free)
    return *reads, full(*q.shape[:3]), full(*free), shape.of_chunks(q, shape.dv), rows


@_forward.register_fake
def _(q, k, v, beta, g, log_weight, mean, free_energy, present):
    *reads, weight, total, shifts, fallback = _reads(q, v, beta)
    last = (torch.empty_like(log_weight), torch.empty_like(mean))
    last += (torch.empty_like(mean) if beta is not None else mean.new_empty(0),)
    return *reads, *last, weight, total, shifts, fallback


@torch.library.custom_op(
    "fem::linear_attention_triton_backward",
    mutates_args=(),
    tags=[torch.Tag.cudagraph_unsafe],  # it asks the device whether a chunk is in doubt
    schema="(Tensor[] grads, Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, Tensor log_weight, Tensor mean, "
    "Tensor? free_energy, Tensor read_mean, Tensor weight, Tensor total, Tensor shifts, Tensor fallback, bool present) "
    "-> Tensor[]",
)
@on_its_device
def _backward(
    grads, q, k, v, beta, g, log_weight, mean, free_energy, read_mean, weight, total, shifts, fallback, present
):
    """Gradients of q, k, v, the initial state (2 or 3), beta and g, as far as there are any."""
    shape, free = Shape(q, v, g), beta is not None
    start = State(log_weight, mean, free_energy if free else None)
    work = _work(shape, q, k, v, beta, g, start, present, True)
    grads = [x.contiguous() for x in grads]
    full = lambda like: torch.empty_like(like, dtype=torch.float32)  # noqa: E731

    d_left, d_kept, d_v_read, d_pairs = full(q), full(k), full(v), full(work.pairs)
    d_state = shape.state(q, shape.chunks, free)
    of_beta = [shape.of_chunks(q, shape.dv) for _ in range(3)]
    slopes = torch.empty_like(weight)
    shape.launch(
        state_gradients, work.left, v, beta, *work.along, shifts, fallback, read_mean, weight, total,
        *grads[:3], slopes, d_left, *d_state, of_beta[0],
    )  # fmt: skip
    shape.launch(
        token_gradients, work.pairs, v, beta, work.along.log_weight, shifts, fallback, weight, total,
        slopes, *grads[1:3], d_pairs, d_v_read, of_beta[1], VALUES=shape.blocks("token_gradients").values,
    )  # fmt: skip
    doubted = []
    if fallback.any():
        chunk = shape.records(q, k, v, beta, g)
        d_log_weight, *d_reads = (shape.slab.split(x) for x in grads[: 3 if free else 2])
        d_terms = Terms(d_log_weight.squeeze(-1), *d_reads)
        d_chunk, d_before = _zeros(chunk), _zeros(work.before())
        correct(read_way(present), (d_chunk, d_before), fallback, d_terms, chunk, work.before())
        for out, more in zip(d_state, d_before):
            if out is not None:
                out += more.view_as(out)
        doubted.append(d_chunk)

    d_start = State(*(None if x is None else torch.empty_like(x) for x in start))
    d_through = shape.of_chunks(q, shape.dk)
    of_beta.append(q.new_empty(shape.batch, shape.heads, shape.blocks_of_keys, shape.dv, dtype=torch.float32))
    last = State(grads[3], grads[4], grads[5] if free else None)
    shape.along_chunks(
        pass_states_gradients, *last, *d_state, *work.along, *work.added, work.through, beta, *d_start,
        d_through, of_beta[3],
    )  # fmt: skip

    d_v = torch.empty_like(v)
    shape.launch(
        remember_gradients, work.kept, v, beta, work.added.mean, work.total, work.peaks, work.fallback,
        *d_state, d_v_read, d_kept, d_v, of_beta[2], VALUES=shape.blocks("remember_gradients").values,
    )  # fmt: skip
    if work.fallback.any():
        chunk = shape.records(q, k, v, beta, g)
        d_added = State(*(None if x is None else x.flatten(0, 2) for x in d_state))
        doubted.append(_zeros(chunk))
        correct(REMEMBER, (doubted[-1],), work.fallback.view(-1), d_added, chunk)

    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    d_g = None if g is None else torch.empty_like(g)
    of_scores = d_left, d_kept, d_pairs, d_through, d_q, d_k, d_g
    if shape.shared:
        shape.launch(scores_gradients, q, k, g, work.pairs, *of_scores, PRESENT=present)
    else:
        shape.launch(channel_scores_gradients, q, k, g, *of_scores, PRESENT=present)
    d_beta = sum(x.sum((0, 2)) for x in of_beta) if free else None
    for more in doubted:
        d_q, d_k, d_v = (shape.plus(*pair) for pair in ((d_q, more.q), (d_k, more.k), (d_v, more.v)))
        d_g = None if g is None else shape.plus(d_g, more.g)
        d_beta = d_beta + more.beta.view(shape.batch, shape.heads, -1, shape.dv).sum((0, 2)) if free else None
    return [x for x in (d_q, d_k, d_v, *d_start, d_beta, d_g) if x is not None]


@_backward.register_fake
def _(grads, q, k, v, beta, g, log_weight, mean, free_energy, read_mean, weight, total, shifts, fallback, present):
    start = (log_weight, mean, free_energy) if beta is not None else (log_weight, mean)
    return [torch.empty_like(x) for x in (q, k, v, *start, beta, g) if x is not None]


def _save(ctx, inputs, output):
    *tensors, ctx.present = inputs
    ctx.save_for_backward(*tensors, output[1], *output[6:])
    ctx.shapes = [x.shape for x in output[:6]]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, *grads):
    saved = ctx.saved_tensors
    q, beta, g = saved[0], saved[3], saved[4]
    grads = [q.new_zeros(shape, dtype=torch.float32) if x is None else x for x, shape in zip(grads, ctx.shapes)]
    return by_input(_backward(grads, *saved, ctx.present), beta, g)


_forward.register_autograd(_differentiate, setup_context=_save)
register_flop_formula(torch.ops.fem.linear_attention_triton)(flops.linear_attention)
register_flop_formula(torch.ops.fem.linear_attention_triton_backward)(flops.linear_attention_backward)


def _zeros(record):
    return type(record)(*(None if x is None else torch.zeros_like(x) for x in record))
