"""A whole call of linear attention by a kernel of flash-linear-attention, between Triton kernels of our own.

    e = exp(beta (f - c))        sums = kernel(q, k, [v | e | 1])        mean = sums_v / sums_1
    F = c + log(sums_e / sums_1) / beta

Beside that kernel there are five launches forward, one of them for the memory after the last token, and three backward,
one of them for the sums of beta's gradient; a state in and out has two more. With gradients, and in float32, the host
waits once, forward, to see whether anything is in doubt. Else that is read on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.torch_version import TorchVersion

from fem.ops.common.backend import MOST_PROGRAMS, differentiated, on
from fem.ops.common.launch import cdiv
from fem.ops.common.operator import again_differentiable, recorded
from fem.ops.common.read import Terms
from fem.ops.common.shared import shared
from fem.ops.linear_attention import scan_kernels as K
from fem.ops.linear_attention.doubtful_tokens import Scan, read_doubtful
from fem.ops.linear_attention.linear_form import ScanSizes, width_of
from fem.ops.linear_attention.linear_log_space import LinearInputs

PART = 256  # tokens whose extremes one program finds
SETTLED = torch.bfloat16  # values that are read without waiting: in float32 more is in doubt than digits of sums
NOTHING = (None,) * 3  # a memory that holds nothing
CELLS = 8  # key channels of a memory that are read together
MISCOMPILES = "3.4.0" <= TorchVersion(triton.__version__) < "3.7.1"


def fla_read(
    again: Callable[..., list[Tensor]], stated: bool, memory: Terms, x: LinearInputs
) -> tuple[Terms, Terms] | None:
    """The read of every token in v's dtype, and the memory after the last in float32; None where either is in doubt.

    q, k and what the sums are of are rounded to bfloat16 where v is bfloat16, unless that is `miscompiled`.
    stated: whether the memory holds anything. again: the same results of (*inputs, *memory), differentiable any number
    of times. As many rows are read at once as fla's kernels, of a program for each head of a row, can be launched for.
    """
    rows = max(1, MOST_PROGRAMS // x.q.shape[2])
    if len(x.q) > rows:
        found = [fla_read(again, stated, *part) for part in _by_rows(memory, x, rows)]
        return None if None in found else tuple(Terms(*map(torch.cat, zip(*terms))) for terms in zip(*found))
    beta, *memory = (part.contiguous() for part in (x.beta, *memory))
    f = None if x.f is x.v else x.f
    tensors = (x.q, x.k, x.g, x.opens, x.v, f, beta, *memory)
    if x.v.dtype == SETTLED and not differentiated(*tensors):
        return _settled(stated, *tensors)
    *found, raised = _FlaRead.apply(again, stated, differentiated(*tensors), *tensors)
    return None if raised.cpu().any() else (Terms(*found[:3]), Terms(*found[3:]))


def _settled(stated: bool, q, k, g, opens, v, f, beta, *memory: Tensor) -> tuple[Terms, Terms]:
    """The same without gradients, where what is in doubt is read from the definition on the card."""
    v, f = (x if x.stride(3) == 1 else x.contiguous() for x in (v, v if f is None else f))
    sizes = ScanSizes.of(v.shape[3], f.shape[3], q.shape[3])
    with on(v.device):
        inputs, scheme, heaviest, raised = packed(sizes, stated, q, k, g, v, f, beta, memory)
        sums, last = with_graph(inputs, opens, False)
        scan = Scan(*inputs[:2], inputs[3], opens, v, f, scheme, beta, raised, None)
        old = memory if stated else NOTHING
        read, _ = settled(sizes, scan, sums, inputs[0], v.dtype, old)
        after, _ = settled(sizes, scan, last, heaviest, last.dtype, old, cells=True)
    return read, after


def settled(
    sizes: ScanSizes, scan: Scan, sums: Tensor, weigh: Tensor, dtype: torch.dtype, old=NOTHING, cells=False
) -> tuple[Terms, Bool[Tensor, "b h _"]]:
    """`unpacked`, and what the sums do not prove from the definition, behind the `old` memory; and which that is."""
    rows = sums.shape[2 if cells else 1]
    doubtful = torch.empty(*scan.raised.shape, rows, dtype=torch.bool, device=sums.device)
    read = unpacked(sizes, sums, weigh, scan.scheme, scan.beta, scan.raised, dtype, doubtful, cells)
    read_doubtful(sizes, scan._replace(doubtful=doubtful), read, old, cells)
    return read, doubtful


def _by_rows(memory: Terms, x: LinearInputs, rows: int) -> Iterator[tuple[Terms, LinearInputs]]:
    """So many rows of a call after the other."""
    for start in range(0, len(x.q), rows):
        part = slice(start, start + rows)
        along = {name: y if y is None else y[part] for name, y in x._asdict().items() if name != "beta"}
        along["f"] = along["v"] if x.f is x.v else along["f"]
        yield Terms(*(y[part] for y in memory)), x._replace(**along)


class _FlaRead(torch.autograd.Function):
    """The read, the memory after it and each head's flag of doubt."""

    @staticmethod
    def forward(ctx, again, stated, learnt, q, k, g, opens, v, f, beta, *memory):
        sizes = ScanSizes.of(v.shape[3], beta.shape[1], q.shape[3])
        with on(v.device):
            inputs, scheme, heaviest, raised = packed(sizes, stated, q, k, g, v, v if f is None else f, beta, memory)
            sums, last = with_graph(inputs, opens, learnt)
            read = unpacked(sizes, sums, inputs[0], scheme, beta, raised, v.dtype)
            after = unpacked(sizes, last, heaviest, scheme, beta, raised, last.dtype, cells=True)
        ctx.again, ctx.sizes, ctx.stated = again, sizes, stated
        ctx.save_for_backward(q, k, g, opens, v, f, beta, *memory, scheme, heaviest, *inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(raised)
        return *read, *after, raised

    @staticmethod
    def backward(ctx, *grads):
        if all(grad is None for grad in grads[:6]):  # as of a function whose backward returns None
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        (q, k, g, opens, v, f, beta, *memory), (scheme, heaviest, *inputs) = saved[:10], saved[10:]
        if torch.is_grad_enabled():
            both = (q, k, g, opens, v, v if f is None else f, beta, *memory)
            *found, d_v, d_f, d_beta, d_weight, d_mean, d_free = again_differentiable(ctx.again, both, grads[:6])
            if f is None and d_f is not None:
                d_v, d_f = d_f if d_v is None else d_v + d_f, None
            return None, None, None, *found, d_v, d_f, d_beta, d_weight, d_mean, d_free

        sizes, batch, heads = ctx.sizes, v.shape[0], v.shape[2]
        d_read, d_after = (ds if any(d is not None for d in ds) else None for ds in (grads[:3], grads[3:6]))
        counts = [
            batch * sizes.tiles(v.shape[1]),
            batch * sizes.tiles(v.shape[1]) * (d_read is not None),
            batch * sizes.tiles(sizes.key) * (d_after is not None),
            batch * ctx.stated,
        ]
        tilts = beta.new_empty(sum(counts), heads, sizes.free)  # what tiles give beta's gradient
        of_items, of_read, of_after, of_memory = tilts.split(counts)
        pairs = []
        with on(v.device):
            inputs, (sums, last) = graph_of(inputs, opens)
            if d_read is not None:
                pairs.append((sums, through_unpack(sizes, sums, inputs[0], scheme, beta, d_read, of_read, False)))
            if d_after is not None:
                pairs.append((last, through_unpack(sizes, last, heaviest, scheme, beta, d_after, of_after, True)))
            outputs, cotangents = zip(*pairs)
            leaves = [x for x in inputs if x is not None]
            found = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, materialize_grads=True)
            found = iter(found)
            d_q, d_k, d_items, d_decay, d_state = (None if x is None else next(found) for x in inputs)
            d_g, d_v, d_f = _through_pack(sizes, d_items, d_decay, g, v, f, beta, scheme, of_items)
            d_memory = [None] * 3
            if ctx.stated:
                d_memory = _through_entry(sizes, d_state, scheme, beta, memory, of_memory)
        return None, None, None, d_q.to(q.dtype), d_k.to(k.dtype), d_g, None, d_v, d_f, tilts.sum(0), *d_memory


def packed(
    sizes: ScanSizes, stated: bool, q, k, g, v, f, beta, memory, theta: Tensor | None = None,
    start: float | None = None, opens: Bool[Tensor, "b t"] | None = None,
) -> tuple[list[Tensor | None], Tensor, Tensor, Tensor]:  # fmt: skip
    """What the kernel of linear attention gets: q, k, items, g and the state; the scheme; the most that each key
    channel weighs, 0 where it holds nothing; and the flags of doubt (B, H).

    start: None, or beta is written, softplus(theta + start), and g is what the decay is the logsigmoid of, 16 times.
    opens: where a document begins, at which the decays forget what was before.
    """
    (batch, time, heads), given = v.shape[:3], 0 if g is None else g.shape[2:].numel() // v.shape[2]
    decays = taken(max(given, opens is not None), sizes.key, v.device)
    dtype = multiplied(v, decays)
    q, k = q.contiguous(), k.contiguous()
    v, f = (x if x.stride(3) == 1 else x.contiguous() for x in (v, f))
    made = lambda *shape: torch.empty(shape, dtype=torch.float32, device=v.device)  # noqa: E731
    parts = cdiv(time, PART)
    extremes = made(batch, heads, parts, 2 * sizes.free + sizes.key)
    raised = torch.empty(batch, heads, dtype=torch.int32, device=v.device)
    sizes.launch(
        K.scan_extremes_kernel, (heads, parts, batch), f, k, theta, None if start is None else beta, extremes,
        raised, time, PART, start, *f.stride()[:3],
    )  # fmt: skip
    scheme, heaviest = made(batch, heads, 3 * sizes.free + 1), made(batch, heads, sizes.key)
    state = made(batch, heads, sizes.key, sizes.width) if stated else None
    sizes.launch(
        K.scan_scheme_kernel, (heads, batch, 1), extremes, beta, *memory, scheme, heaviest, state, raised, parts,
        STATED=stated, PRECISE=start is None and dtype == torch.float32, CELLS=CELLS,
    )  # fmt: skip
    items = torch.empty(batch, time, heads, sizes.width, dtype=dtype, device=v.device)
    q_out, k_out = (x if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k))
    logits = start is not None and g is not None
    g = g if logits else _decay(g)
    written = decays if logits or decays > given or opens is not None else 0
    g_out = made(batch, time, heads, *[decays] * (decays > 1)) if written else g
    sizes.launch(
        K.scan_pack_kernel, (heads * sizes.tiles(time), batch, 1), q, k, g, opens, v, f, beta, scheme, q_out, k_out,
        g_out, items, time, heads, heads if g is None else g.stride(1), *v.stride()[:3], *f.stride()[:3],
        CAST_Q=q_out is not q, CAST_K=k_out is not k, GIVEN=given, DECAYS=written, LOGITS=logits,
    )  # fmt: skip
    return [q_out, k_out, items, g_out, state], scheme, heaviest, raised


def multiplied(v: Tensor, decays: int) -> torch.dtype:
    """The dtype of what fla's kernel multiplies, which takes so many decays of a head."""
    sound = decays > 0 or not miscompiled(v.device)
    return torch.bfloat16 if v.dtype == torch.bfloat16 and sound else torch.float32


def _decay(g: Tensor | None) -> Tensor | None:
    """The decay (B, T, H) or (B, T, H, d_k) in float32."""
    return None if g is None else (g.squeeze(3) if g.shape[3] == 1 else g).float().contiguous()


def taken(given: int, key: int, device: torch.device) -> int:
    """How many decays of a head fla's kernel takes, where so many are given: none, one, or one for each key channel."""
    return key if given > 1 or (given == 1 and miscompiled(device)) else given


def unpacked(
    sizes: ScanSizes, sums: Tensor, weigh: Tensor, scheme, beta, raised, dtype: torch.dtype, doubtful=None, cells=False
) -> Terms:
    """The read (B, T, H, ..) for which rows of sums stand, or the memory (B, H, d_k, ..) for which its cells do; marks
    in `doubtful` (B, H, T) what they do not prove."""
    batch, heads, rows = scheme.shape[0], scheme.shape[1], sums.shape[2 if cells else 1]
    made = lambda width, dtype: torch.empty(*sums.shape[:3], width, dtype=dtype, device=sums.device)  # noqa: E731
    terms = Terms(made(1, torch.float32), made(sizes.mean, dtype), made(sizes.free, dtype))
    sizes.launch(
        K.scan_unpack_kernel, (heads * sizes.tiles(rows), batch, 1), sums.contiguous(), weigh, scheme, beta, *terms,
        raised, doubtful, rows, heads, CELLS=cells,
    )  # fmt: skip
    return terms


def through_unpack(
    sizes: ScanSizes, sums, weigh, scheme, beta, grads, tilt: Tensor, cells: bool, slope: bool = False
) -> Tensor:
    """The gradient of the sums; writes to `tilt` what tiles give beta's, where `slope` theta's."""
    batch, heads, rows = scheme.shape[0], scheme.shape[1], sums.shape[2 if cells else 1]
    given = sum(2**n for n, grad in enumerate(grads) if grad is not None)
    grads = [sums if grad is None else grad.contiguous() for grad in grads]
    d_sums = torch.empty(sums.shape, dtype=sums.dtype, device=sums.device)
    sizes.launch(
        K.scan_unpack_backward_kernel, (heads * sizes.tiles(rows), batch, 1), sums.detach().contiguous(), weigh, scheme,
        beta, *grads, d_sums, tilt, rows, heads, GRADS=given, CELLS=cells, SLOPE=slope,
    )  # fmt: skip
    return d_sums


def _through_pack(sizes: ScanSizes, d_items, d_decay, g, v, f, beta, scheme, tilt) -> tuple[Tensor | None, ...]:
    """Gradients of g, v and f; writes to `tilt` what tiles give beta's."""
    source = v if f is None else f
    source = source if source.stride(3) == 1 else source.contiguous()
    fresh = lambda x: None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)  # noqa: E731
    given, d_v, d_f = 0 if g is None else g.shape[3], fresh(v), fresh(f)
    d_g = fresh(g) if taken(given, sizes.key, v.device) > given else None
    launch_pack_backward(sizes, d_items, d_decay, g, source, beta, scheme, d_g, d_v, d_f, tilt)
    if given and d_g is None:
        d_g = d_decay.view(g.shape).to(g.dtype)
    return d_g, d_v, d_f


def launch_pack_backward(
    sizes: ScanSizes, d_items, d_decay, g, f, beta, scheme, d_g, d_v, d_f, tilt, logits=False, slope=False
):
    """Write d_v and d_f, or where that is None d_v for both; `tilt`; and d_g, None where it is d_decay itself."""
    batch, time, heads = f.shape[:3]
    given, decays = (0, 0) if d_g is None else (d_g.shape[2:].numel() // heads, width_of(d_decay))
    row = lambda x: 0 if x is None else x.stride(1)  # noqa: E731
    sizes.launch(
        K.scan_pack_backward_kernel, (heads * sizes.tiles(time), batch, 1), d_items.contiguous(), d_decay, g, f, beta,
        scheme, d_g, d_v, d_f, tilt, time, heads, row(g), row(d_g), *f.stride()[:3], row(d_v), d_v.stride(2), row(d_f),
        0 if d_f is None else d_f.stride(2), SHARED=d_f is None, GIVEN=given, DECAYS=decays, LOGITS=logits, SLOPE=slope,
    )  # fmt: skip


def _through_entry(sizes: ScanSizes, d_state, scheme, beta, memory, tilt) -> list[Tensor]:
    """Gradients of the memory; writes to `tilt` what heads give beta's."""
    batch, heads = scheme.shape[:2]
    grads = [torch.empty_like(x) for x in memory]
    sizes.launch(
        K.scan_enter_backward_kernel, (heads, batch, 1), d_state.contiguous(), scheme, beta, *memory, *grads, tilt,
        CELLS=CELLS,
    )  # fmt: skip
    return grads


# --- the kernels of flash-linear-attention ----------------------------------------------------------------------------


def with_graph(
    inputs: Sequence[Tensor | None], opens: Bool[Tensor, "b t"] | None, differentiated: bool, last: bool = True
) -> Sequence[Tensor | None]:
    """What `by_fla` returns of the inputs; where differentiated, the items have its graph, which lives as long."""
    leaves = [x if x is None else x.detach().requires_grad_(differentiated) for x in inputs]
    with recorded():
        outputs = by_fla(*leaves, opens, last=last)
    if differentiated:
        inputs[2].graph = leaves, outputs
    return [x if x is None else x.detach() for x in outputs]


def graph_of(
    inputs: Sequence[Tensor | None], opens: Bool[Tensor, "b t"] | None, last: bool = True
) -> tuple[Sequence[Tensor | None], tuple[Tensor, Tensor | None]]:
    """The leaves and results of the saved inputs' graph. Hooks, such as those that offload, give copies of what was
    saved, which have none: they get a new one."""
    if not hasattr(inputs[2], "graph"):
        with_graph(inputs, opens, True, last)
    return inputs[2].graph


def by_fla(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    items: Float[Tensor, "b t h d"],
    g: Tensor | None,
    state: Float[Tensor, "b h dk d"] | None,
    opens: Bool[Tensor, "b t"] | None,
    last: bool = True,
) -> tuple[Float[Tensor, "b t h d"], Float[Tensor, "b h dk d"] | None]:
    """The rows, and where `last` the state after the last token; d is a multiple of 16, q, k and items have one dtype.

    g (B, T, H) or (B, T, H, d_k) and the state are float32; opens: where a document begins."""
    inputs, borders = [q, k, items, g], None
    if opens is not None:  # rows one after another, each document a sequence; the first of a row continues its state
        (rows, time), (starts, borders) = opens.shape, document_borders(opens)
        inputs = [None if x is None else x.flatten(0, 1).unsqueeze(0) for x in inputs]
        if state is not None:
            state = torch.where(opens.flatten()[starts, None, None, None], 0, state[starts // time])
    run = fla_kernel(g, inputs[0].shape[1])
    out, after = run(*inputs, scale=1.0, initial_state=state, output_final_state=last, cu_seqlens=borders)
    if opens is None:
        return out, after
    if last:
        finals = torch.searchsorted(starts, time * torch.arange(1, rows + 1, device=starts.device)) - 1
        after = after.index_select(0, finals)
    return out.view(rows, time, *out.shape[2:]), after


@shared
def document_borders(opens: Bool[Tensor, "b t"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " more"]]:
    """Where sequences begin in rows one after another, and that with the end. Waits for the device."""
    first = torch.zeros_like(opens)
    first[:, 0] = True
    starts = (opens | first).flatten().nonzero().squeeze(1)
    return starts, F.pad(starts, (0, 1), value=opens.numel())


@torch.compiler.assume_constant_result
def miscompiled(device: torch.device) -> bool:
    """Whether Triton makes wrong code of fla's `chunk_simple_gla`: its versions 3.4.0 to 3.7.0 do on an H100 or H200.

    fla refuses the gradient of one decay per head there. A decay per key channel has other kernels, which read the same
    with that of the head in every channel. Without a decay products of bfloat16 gave wrong gradients on an H100 and
    read out of bounds on an H200; those of float32 were right on both.
    """
    return MISCOMPILES and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fla_kernel(g: Tensor | None, time: int):
    """fla's kernel for such a decay (B, T, H), (B, T, H, d_k) or None, of a single token or of many."""
    if g is not None and g.ndim == 4:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla

        return fused_recurrent_gla if time == 1 else chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    return fused_recurrent_simple_gla if time == 1 else chunk_simple_gla
