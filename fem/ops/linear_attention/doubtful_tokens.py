"""Tokens of linear attention that its sums do not prove: the launches of their kernels, on the current device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from fem.ops.common.read import Terms
from fem.ops.linear_attention import doubtful_kernels as K
from fem.ops.linear_attention.linear_form import ScanSizes, width_of

KEYS = 16  # that a token is read over at a time
PROGRAMS = 64  # of a head that share its tokens
SPAN = 128  # tokens that are passed over together where none is marked, fewer where channels have decays of their own
REGISTERS = 255  # of a thread, all that there are: ptxas would rather spill than hold more than 128
BLOCK = 256  # numbers of decays whose gradients are summed at a time


class Scan(NamedTuple):
    """What was read, and what of it is in doubt."""

    q: Float[Tensor, "b t h dk"]
    k: Float[Tensor, "b t h dk"]
    g: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None
    opens: Bool[Tensor, "b t"] | None
    v: Float[Tensor, "b t h dv"]
    f: Float[Tensor, "b t h df"]
    scheme: Float[Tensor, "b h _"]
    beta: Float[Tensor, "h df"]
    raised: Int[Tensor, "b h"]
    doubtful: Bool[Tensor, "b h t"] | Bool[Tensor, "b h dk"] | None  # None: not known yet

    @property
    def numbers(self) -> list[int]:
        """Tokens, heads and strides, as kernels take them."""
        return [*self.q.shape[1:3], *self.v.stride()[:3], *self.f.stride()[:3]]

    @property
    def decays(self) -> int:
        """Of a head; 1 without any."""
        return 1 if self.g is None else width_of(self.g)

    def grid(self, sizes: ScanSizes) -> tuple[int, int, int]:
        """Of programs that share the tokens of a head, no more than it has tiles."""
        batch, time, heads = self.q.shape[:3]
        return heads, min(PROGRAMS, sizes.tiles(time)), batch


def read_doubtful(sizes: ScanSizes, scan: Scan, read: Terms, old: Sequence[Tensor | None], cells: bool) -> None:
    """Write the read of the tokens in doubt, (B, T, H, _).

    old: the memory before the first token. cells: of key channels in doubt instead, as they are after the last token,
    (B, H, d_k, _).
    """
    sizes.launch(
        K.doubtful_kernel, scan.grid(sizes), *scan, *read, *old, *scan.numbers, CELLS=cells, KEYS=KEYS,
        DECAYS=scan.decays,
    )  # fmt: skip


def through_doubtful(
    sizes: ScanSizes, scan: Scan, grads, d_q, d_k, d_v, d_f: Tensor | None, tilt: Float[Tensor, "n h df"]
) -> Float[Tensor, "b h t _"]:
    """Write dq of the tokens in doubt, and add what goes through them to the other gradients, to `tilt` what they give
    theta; d_f: None where d_v gets both. Returns what decays get, each from its token on."""
    grads = [scan.v if grad is None else grad for grad in grads]  # which no kernel reads
    exact = tilt.new_empty(*scan.q.shape[:3], sizes.free + 2)
    rises = tilt.new_empty(*scan.doubtful.shape, scan.decays)
    sizes.launch(
        K.doubtful_tokens_backward_kernel, scan.grid(sizes), *scan, *grads, exact, d_q, rises, tilt,
        sizes.tiles(scan.q.shape[1]), *scan.numbers, KEYS=KEYS, DECAYS=scan.decays,
    )  # fmt: skip
    rest = scan[:6] + scan[7:]
    apart = (0, 0) if d_f is None else d_f.stride()[1:3]
    sizes.launch(
        K.doubtful_items_backward_kernel, scan.grid(sizes), *rest, *grads, exact, d_k, d_v, d_f, rises, *scan.numbers,
        *d_v.stride()[1:3], *apart, SHARED=d_f is None, KEYS=KEYS, SPAN=SPAN if scan.decays == 1 else SPAN // 4,
        DECAYS=scan.decays, maxnreg=REGISTERS,
    )  # fmt: skip
    return rises


def through_doubtful_decays(sizes: ScanSizes, scan: Scan, rises: Float[Tensor, "b h t _"], logits, d_logits) -> None:
    """Add the gradient of the decays' logits, columns (B, T, _), of what `through_doubtful` returns."""
    batch, heads, time, decays = rises.shape
    sizes.launch(
        K.doubtful_decays_backward_kernel, (heads, batch, 1), rises, scan.raised, logits, d_logits, time, heads,
        logits.stride(1), d_logits.stride(1), GIVEN=logits.shape[2] // heads, DECAYS=decays,
        BLOCK=BLOCK if decays == 1 else max(1, BLOCK // sizes.constants["WIDE"]),
    )  # fmt: skip
