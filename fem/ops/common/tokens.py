"""Which tokens exist, where documents begin, and at which position each token stands.

A masked token counts as deleted: it takes no position and opens no document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from fem.ops.common.backend import may_look, portable
from fem.ops.common.shared import shared
from fem.state import CachePosition

_NO_IDS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)  # nor floating-point ones


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call. `None` stands for the plain case, which costs nothing.

    keep: which tokens exist; None: all.
    start: kept tokens that open a new document, at which a memory forgets; None: none does.
    document: number of each token's document within its row; None: all of the row's one document.
    position: place among the kept tokens of its own document, shared by the rows or per row; None: not needed.
    """

    keep: Bool[Tensor, "b t"] | None
    start: Bool[Tensor, "b t"] | None
    document: Int[Tensor, "b t"] | None
    position: Int[Tensor, " t"] | Int[Tensor, "b t"] | None

    def zero_masked(self, x: Tensor) -> Tensor:
        """x (B, T, d) with 0 for masked tokens: what stood there, NaN too, reaches neither an output nor a gradient."""
        return x if self.keep is None else torch.where(self.keep[..., None], x, 0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tokens:
        """The same on another device, as accelerate asks of what layers are given."""
        marks = self.keep, self.start, self.document, self.position
        return Tokens(*(None if x is None else x.to(device, non_blocking=non_blocking) for x in marks))

    def reversed(self) -> Tokens:
        """The same tokens read backwards; documents open at what was their last kept token."""
        flip = lambda tensor: None if tensor is None else tensor.flip(-1)  # noqa: E731
        start = None
        if self.document is not None:
            start = _first_of_each_document(flip(self.keep), flip(self.document))
        return Tokens(flip(self.keep), start, flip(self.document), flip(self.position))


PLAIN = Tokens(None, None, None, None)  # tokens of one document, to parts that ask for no position


def read_tokens(
    shape: tuple[int, int],
    device: torch.device,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cache_position: CachePosition | None = None,
    mask_name: str = "attention_mask",
) -> tuple[Tokens, CachePosition]:
    """Tokens of a (batch, time) call that follows `cache_position`, and the position after it.

    mask (B, T) is bool or 0/1 integers, True/1 = keep. segment_ids (B, T) are integers; any change of id between
    kept tokens is a boundary. Without segment_ids the tokens continue the row's document.
    Raises ValueError on another shape or device, TypeError on a float mask, float ids and what is no tensor.
    """
    batch, time = shape
    before = cache_position or CachePosition.zero(batch, device)
    for name, marks in ((mask_name, mask), ("segment_ids", segment_ids)):
        _check_marks(name, marks, shape, device)
    keep = None if mask is None else as_bool(mask, mask_name)
    if segment_ids is not None and (segment_ids.is_floating_point() or segment_ids.dtype in _NO_IDS):
        raise TypeError(f"segment_ids must be integers, one id per document, got dtype {segment_ids.dtype}.")
    if keep is None and segment_ids is None:
        return _all_of_one_document(time, before, cache_position is not None)
    ones = torch.ones(batch, time, dtype=torch.bool, device=device) if keep is None else keep
    count = ones.long().cumsum(1)
    total = ones.sum(1)

    if segment_ids is None:
        document = None if cache_position is None else before.document[:, None].expand(batch, time)
        position = (before.position[:, None] + count - 1).clamp_min(0)
        after = CachePosition(before.position + total, before.document, before.segment)
        return Tokens(keep, None, document, position), after

    last = last_kept_before(ones)
    ids = segment_ids.long()
    previous = ids.gather(1, last[:, :-1].clamp_min(0))
    known = (last[:, :-1] >= 0) | (before.position > 0)[:, None]
    previous = torch.where(last[:, :-1] >= 0, previous, before.segment[:, None])
    start = ones & known & (ids != previous)
    document = before.document[:, None] + start.long().cumsum(1)
    base = _running_maximum(torch.where(start, count - 1, -before.position[:, None]))
    position = (count - 1 - base).clamp_min(0)
    end = last[:, -1]
    seen = end >= 0
    at_end = lambda x: F.pad(x, (0, 1)).gather(1, end.clamp_min(0)[:, None])[:, 0]  # noqa: E731  (padded for T = 0)
    after = CachePosition(
        position=torch.where(seen, at_end(position) + 1, before.position),
        document=torch.where(seen, at_end(document), before.document),
        segment=torch.where(seen, at_end(ids), before.segment),
    )
    return Tokens(keep, start, document, position), after


@shared
def whole_rows(
    shape: tuple[int, int], device: torch.device, mask: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tokens:
    """`read_tokens` of a call that neither follows another nor is followed by one."""
    if mask is None and segment_ids is None:
        return Tokens(None, None, None, torch.arange(shape[1], device=device))
    return read_tokens(shape, device, mask, segment_ids)[0]


def _all_of_one_document(time: int, before: CachePosition, continues: bool) -> tuple[Tokens, CachePosition]:
    """`read_tokens` without mask and ids, in few operations: generation calls it for every token."""
    after = CachePosition(before.position + time, before.document, before.segment)
    if not continues:
        return Tokens(None, None, None, torch.arange(time, device=before.position.device)), after
    document, position = before.document[:, None], before.position[:, None]
    if time != 1:
        document = document.expand(-1, time)
        position = position + torch.arange(time, device=position.device)
    return Tokens(None, None, document, position), after


def _check_marks(name: str, marks: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """Raise unless a mask or ids are a dense tensor of that shape and device."""
    if marks is None:
        return
    if not isinstance(marks, Tensor):
        raise TypeError(f"{name} must be a tensor of shape (batch, time), got a {type(marks).__name__}.")
    if marks.is_nested or marks.layout is not torch.strided:
        got = "a nested tensor" if marks.is_nested else f"layout {marks.layout}"
        raise TypeError(f"{name} must be a dense tensor of shape (batch, time), got {got}.")
    if marks.device != device:
        raise ValueError(f"{name} must be on the device of the tokens, {device}, got {marks.device}; move it there.")
    if tuple(marks.shape) != shape:
        raise ValueError(f"{name} must have shape (batch, time) = {shape}, got {tuple(marks.shape)}.")


@shared
def as_bool(mask: Tensor, name: str) -> Tensor:
    """A mask of 0 and 1 as booleans. Raises on floats and, where it may look, on other numbers."""
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name} must be bool or integers 0/1 with 1 = keep, got dtype {mask.dtype}; a bias that is added to the "
            "scores is an argument of softmax_read."
        )
    if mask.dtype == torch.bool:
        return mask
    if may_look(mask) and bool((wrong := (mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{name} must hold 0 and 1 only, got {int(mask[wrong][0])}; for documents use segment_ids.")
    return mask.bool()


def _running_maximum(x: Tensor) -> Tensor:
    """max_{i <= t} x_ti along the last axis. A `portable` graph compares all pairs, as ONNX has no such operator."""
    if not portable():
        return x.cummax(-1).values
    time = torch.arange(x.shape[-1], device=x.device)
    return torch.where(time[:, None] >= time, x[..., None, :], torch.iinfo(x.dtype).min).amax(-1)


def last_kept_before(keep: Tensor) -> Tensor:
    """(B, T + 1): the column of the last kept token before t, -1 for none."""
    column = torch.arange(keep.shape[1], device=keep.device)
    seen = torch.where(keep, column, -1)
    return torch.cat([seen.new_full((keep.shape[0], 1), -1), _running_maximum(seen)], 1)


def _first_of_each_document(keep: Tensor | None, document: Tensor) -> Tensor:
    ones = torch.ones_like(document, dtype=torch.bool) if keep is None else keep
    last = last_kept_before(ones)[:, :-1]
    previous = document.gather(1, last.clamp_min(0))
    return ones & (last >= 0) & (document != previous)


def filled(v: Tensor, keep: Tensor) -> Tensor:
    """Values in which masked tokens have the least of the others, so that no shift rises with them."""
    if not v.shape[1]:
        return v
    lowest = torch.where(keep, v.detach(), torch.inf).amin(1, keepdim=True)
    return torch.where(keep, v, torch.where(lowest < torch.inf, lowest, 0))
