"""p @ values under a softmax prior, for values of any width, and its gradients.

By torch's flash attention on a CPU, unless a window or documents bound the keys, or a bias has a gradient or differs
between heads. It takes one width, so that keys padded to wider values would up to double its work. Elsewhere some heads
at a time by blocks of queries against the keys that any of them sees, whose scores stay in the cache: those of all
pairs are never held.

Private parts of PyTorch: `aten::_scaled_dot_product_flash_attention_for_cpu` and its backward, of 2.11 to 2.15. They
may go when a public attention of PyTorch on a CPU returns its log sum of exponentials and takes a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem.ops.softmax.support import Support, bounds

ROWS, SCORES = 64, 1 << 17  # queries of a block on a CPU, and its scores at most, for each thread
_WIDE_ROWS, _MORE_SCORES = 1024, 1 << 26  # elsewhere, where a launch costs more than a score

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    q: Float[Tensor, "b tq h d"],
    k: Float[Tensor, "b t hkv d"],
    values: Float[Tensor, "b t hkv w"],
    support: Support,
    by_flash: bool,
) -> tuple[Float[Tensor, "b tq h w"], Float[Tensor, "b tq h"]]:
    """p @ values, and lse_t = log sum_i exp(s_ti): -inf in a row without keys, which reads 0.

    by_flash: whether torch's flash attention may be taken; it is no wider than q then.
    """
    k, values = (_per_query_head(x, q.shape[2]) for x in (k, values))
    if not _fits_flash(q, values, support, by_flash):
        return _forward_by_blocks(q, k, values, support)
    parts = (x.transpose(1, 2) for x in (q, k, values))
    out, lse = flash(*parts, support.causal, _added(support, q.dtype), support.scale)
    if support.restricted and bool((lse == 0.0).any()):  # as flash says of a row that sees no key
        lse.masked_fill_(~support.sees(q.shape[1], k.shape[1], q.device), -torch.inf)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    grad: Float[Tensor, "b tq h w"], q, k, values, out, lse, support: Support, by_flash: bool, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, values and, with_bias, of the bias; `attend` returned out and lse."""
    shared = k.shape[2], q.shape[2] // k.shape[2]
    k, values = (_per_query_head(x, q.shape[2]) for x in (k, values))
    lse = lse.masked_fill(lse.isneginf(), 0.0)
    if _fits_flash(q, values, support, by_flash) and not with_bias:
        grad, *parts = (_in_rows(x.transpose(1, 2)) for x in (grad, q, k, values, out))
        how = {"attn_mask": _added(support, q.dtype), "scale": support.scale}
        gradients = _flash_gradients(grad, *parts, lse.transpose(1, 2), 0.0, support.causal, **how)
        dq, dk, dvalues, dbias = *(x.transpose(1, 2) for x in gradients), None
    else:
        parts = grad, q, k, values, out, lse, support
        dq, dk, dvalues, dbias = _backward_by_blocks(*parts, exact=with_bias or not by_flash, with_bias=with_bias)
    if shared[1] > 1:
        dk, dvalues = (x.unflatten(2, shared).sum(3) for x in (dk, dvalues))
    return dq, dk, dvalues, dbias


def flash(
    q: Float[Tensor, "b h tq d"], k: Float[Tensor, "b h t d"], values: Float[Tensor, "b h t d"], causal, mask, scale
) -> tuple[Float[Tensor, "b h tq d"], Float[Tensor, "b h tq"]]:
    """torch's flash attention on a CPU, which takes causality and what is added to the scores together, and its lse."""
    q, k, values = map(_in_rows, (q, k, values))
    return _flash_forward(q, k, values, 0.0, causal, attn_mask=mask, scale=scale)


def _fits_flash(q: Tensor, values: Tensor, support: Support, by_flash: bool) -> bool:
    one_table = support.bias is None or support.bias.shape[1] == 1  # one for each head takes longer than blocks
    return by_flash and support.first is None and one_table and values.shape[-1] == q.shape[-1]


def _added(support: Support, dtype: torch.dtype) -> Float[Tensor, "#b #h #tq #t"] | None:
    """What flash adds to the scores beside causality."""
    keep, bias = support.keep, support.bias
    if bias is not None:
        return bias.to(dtype) if keep is None else bias.to(dtype).masked_fill(~keep[:, None, None], -torch.inf)
    return None if keep is None else torch.where(keep, 0.0, -torch.inf)[:, None, None].to(dtype)


def _in_rows(x: Tensor) -> Tensor:
    """x with its rows (.., T, d) apart from each other and d in one piece, as flash reads them."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _per_query_head(x: Float[Tensor, "b t hkv d"], heads: int) -> Float[Tensor, "b t h d"]:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


# --- by blocks -------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Some queries, the keys that any of them sees, and what is added to the scores of keys that not all see."""

    rows: slice
    keys: slice
    edges: list[tuple[slice, Float[Tensor, "r n"]]]


class _Heads(NamedTuple):
    """Some heads of some rows of the batch, and the blocks of their queries."""

    batch: slice
    heads: slice
    blocks: list[_Block]

    def take(self, x: Float[Tensor, "b t h w"]) -> Float[Tensor, "n t w"]:
        return x[self.batch, :, self.heads].transpose(1, 2).flatten(0, 1)

    def put(self, out: Float[Tensor, "b t h w"], x: Float[Tensor, "n t w"]) -> None:
        target = out[self.batch, :, self.heads]
        target.copy_(x.unflatten(0, (-1, target.shape[2])).transpose(1, 2))

    def restrict(self, s: Float[Tensor, "n r keys"], block: _Block, support: Support) -> Float[Tensor, "n r keys"]:
        """Scores with the bias, and -inf where a key is not seen; in place."""
        by_head = s.unflatten(0, (-1, self.heads.stop - self.heads.start))
        if support.bias is not None:
            by_head.add_(self.bias(support.bias, block))
        if support.keep is not None:
            by_head.masked_fill_(~support.keep[self.batch, None, None, block.keys], -torch.inf)
        for keys, hidden in block.edges:
            s[..., keys].add_(hidden)
        return s

    def bias(self, bias: Float[Tensor, "#b #h #tq #t"], block: _Block) -> Float[Tensor, "#n #m #r #keys"]:
        """The part of a bias, or of something of its shape, that belongs to a block."""
        bias = Support.bias_at(bias, block.rows, block.keys)
        return bias[self.batch if bias.shape[0] > 1 else slice(None), self.heads if bias.shape[1] > 1 else slice(None)]


def _parts(q: Tensor, k: Tensor, support: Support) -> Iterator[_Heads]:
    """The heads, as many at a time as `SCORES` leaves room for."""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    rows, scores = (ROWS, SCORES * torch.get_num_threads()) if q.is_cpu else (_WIDE_ROWS, _MORE_SCORES)
    ends = zip(*bounds(support, queries, keys, q.device))
    blocks = [list(_blocks(first, end, keys, rows, q.dtype)) for first, end in ends]
    widest = max(block.keys.stop - block.keys.start for row in blocks for block in row)
    room = max(1, scores // (rows * widest))
    together = max(1, room // heads) if len(blocks) == 1 else 1
    for b in range(0, batch, together):
        for h in range(0, heads, room):
            yield _Heads(slice(b, b + together), slice(h, min(h + room, heads)), blocks[b if len(blocks) > 1 else 0])


def _blocks(first: Int[Tensor, " tq"], end: Int[Tensor, " tq"], keys: int, rows: int, dtype) -> Iterator[_Block]:
    """Queries block by block, each with the keys that any of them sees."""
    lows, highs = first.tolist(), end.tolist()
    index = torch.arange(keys, device=first.device)
    for start in range(0, len(lows), rows):
        block = slice(start, min(start + rows, len(lows)))
        low = min(lows[start], keys - 1)  # queries that see no key, and begin behind the last, get one that is hidden
        high = max(highs[block.stop - 1], low + 1)
        edges = []
        for begin, stop in ((low, min(lows[block.stop - 1], high)), (max(highs[start], low), high)):
            if begin < stop:
                seen = (first[block, None] <= index[begin:stop]) & (index[begin:stop] < end[block, None])
                edges.append((slice(begin - low, stop - low), torch.where(seen, 0.0, -torch.inf).to(dtype)))
        yield _Block(block, slice(low, high), edges)


def _forward_by_blocks(q, k, values, support: Support) -> tuple[Tensor, Tensor]:
    """p @ values and lse: a block of queries at a time, whose scores become p in place."""
    out, lse = q.new_empty(*q.shape[:3], values.shape[3]), q.new_empty(*q.shape[:3], 1)
    for part in _parts(q, k, support):
        q_here, k_here, values_here = part.take(q).mul(support.scale), part.take(k), part.take(values)
        for block in part.blocks:
            rows, keys, _ = block
            s = part.restrict(q_here[:, rows] @ k_here[:, keys].mT, block, support)
            top = s.amax(-1, keepdim=True)
            total = s.sub_(top.masked_fill(top.isneginf(), 0.0)).exp_().sum(-1, keepdim=True)
            part.put(out[:, rows], (s @ values_here[:, keys]).div_(total.masked_fill(total == 0, 1.0)))
            part.put(lse[:, rows], top.add_(total.log_()))
    return out, lse[..., 0]


def _backward_by_blocks(
    grad, q, k, values, out, lse, support: Support, *, exact: bool, with_bias: bool
) -> tuple[Tensor | None, ...]:
    """ds = p (dp - sum_i p_i dp_i), dp = dout values^T, where the sum is dout out.

    exact: dp is taken from that of the likeliest key, so that ds keeps its digits in a row where one key has all the
    weight, at the price of a pass over the scores.
    """
    dq, dk, dvalues = (torch.empty_like(x) for x in (q, k, values))
    dbias = torch.zeros_like(support.bias) if with_bias else None
    for part in _parts(q, k, support):
        q_here, k_here, values_here = part.take(q).mul(support.scale), part.take(k), part.take(values)
        grad_here, lse_here = part.take(grad), part.take(lse[..., None])
        through = (grad_here * part.take(out)).sum(-1, keepdim=True)
        dk_here, dvalues_here = torch.zeros_like(k_here), torch.zeros_like(values_here)
        for block in part.blocks:
            rows, keys, _ = block
            s = torch.baddbmm(lse_here[:, rows], q_here[:, rows], k_here[:, keys].mT, beta=-1)
            p = part.restrict(s, block, support).exp_()
            if exact:
                dp = grad_here[:, rows] @ values_here[:, keys].mT
                dp -= dp.gather(-1, p.argmax(-1, keepdim=True))
                ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p)
            else:
                ds = torch.baddbmm(through[:, rows], grad_here[:, rows], values_here[:, keys].mT, beta=-1).mul_(p)
            part.put(dq[:, rows], (ds @ k_here[:, keys]).mul_(support.scale))
            dk_here[:, keys].baddbmm_(ds.mT, q_here[:, rows])
            dvalues_here[:, keys].baddbmm_(p.mT, grad_here[:, rows])
            if with_bias:
                here = part.bias(dbias, block)
                here += ds.unflatten(0, (-1, part.heads.stop - part.heads.start)).sum_to_size(here.shape)
        part.put(dk, dk_here)
        part.put(dvalues, dvalues_here)
    return dq, dk, dvalues, dbias
