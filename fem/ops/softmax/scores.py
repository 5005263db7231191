"""The scores of a softmax prior, and attention over them with its backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.softmax.wide import WideAttention

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def flash(
    q: Tensor, k: Tensor, values: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's flash attention on a CPU over (B, H, T, d), and its lse."""
    q, k, values = map(_in_rows, (q, k, values))
    return _flash_forward(q, k, values, 0.0, causal, attn_mask=mask, scale=scale)


def _in_rows(x: Tensor) -> Tensor:
    """x with its rows (.., T, d) apart from each other and d in one piece, as flash reads them."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


@dataclass(frozen=True)
class Scores:
    """s_ti = scale q_t . k_i + mask_ti, -inf for i > t if causal;  p_ti = softmax_i(s_ti), 0 in a row without keys.

    flash: attend by torch's flash attention, values wider than the keys by blocks of queries, instead of materialised
    scores.
    """

    q: Float[Tensor, "b tq h d"]
    k: Float[Tensor, "b t h d"]
    mask: Float[Tensor, "#b #h #tq t"] | None
    causal: bool
    scale: float
    flash: bool

    def attend(self, values: Float[Tensor, "b t h w"]) -> tuple[Float[Tensor, "b tq h w"], Float[Tensor, "b tq h"]]:
        """p @ values, and lse_t = log sum_i exp(s_ti), 0 in a row without keys."""
        if self.flash:
            if wide := self._wide(values):
                return wide.forward()
            parts = (x.transpose(1, 2) for x in (self.q, self.k, values))
            out, lse = flash(*parts, self.causal, self.mask, self.scale)
            return out.transpose(1, 2), lse.transpose(1, 2)
        out = self._prior() @ values.transpose(1, 2)
        return out.transpose(1, 2).contiguous(), out.new_zeros(*self.q.shape[:3])

    def attend_backward(self, grad, values, out, lse, with_scores: bool) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, values and, if wanted, of every score (B, H, T_q, T); `attend` returned out and lse."""
        if self.flash and not with_scores:
            if wide := self._wide(values):
                return *wide.backward(grad, out, lse), None
            grad, q, k, values, out = (_in_rows(x.transpose(1, 2)) for x in (grad, self.q, self.k, values, out))
            parts = grad, q, k, values, out, lse.transpose(1, 2)
            grads = _flash_gradients(*parts, 0.0, self.causal, attn_mask=self.mask, scale=self.scale)
            return *(x.transpose(1, 2) for x in grads), None
        p = self._prior()
        dp = grad.transpose(1, 2) @ values.permute(0, 2, 3, 1)
        dp.sub_(dp.gather(-1, p.argmax(-1, keepdim=True)))  # ds is then exact in rows where one key has all the weight
        ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p)
        dq = (ds @ self.k.transpose(1, 2)).mul_(self.scale)
        dk = (ds.transpose(-1, -2) @ self.q.transpose(1, 2)).mul_(self.scale)
        dvalues = p.transpose(-1, -2) @ grad.transpose(1, 2)
        return dq.transpose(1, 2), dk.transpose(1, 2), dvalues.transpose(1, 2), ds if with_scores else None

    def hidden_keys(self) -> Bool[Tensor, "#b t #h 1"] | None:
        """Keys that the mask hides from every row; None: none."""
        return None if self.mask is None else torch.isneginf(self.mask).all(2).transpose(1, 2)[..., None]

    def empty_rows(self) -> Bool[Tensor, "#b #tq #h 1"] | None:
        """Rows that see no key; None: none."""
        if self.mask is None:
            return None
        seen = ~torch.isneginf(self.mask)
        if not self.causal:
            seen = seen.any(-1)
        elif seen.shape[2] == 1:
            seen = seen[:, :, 0].cumsum(-1) > 0
        else:
            seen = seen.tril().any(-1)
        return ~seen.transpose(1, 2)[..., None]

    def _prior(self) -> Float[Tensor, "b h tq t"]:
        s = (self.q.transpose(1, 2) @ self.k.permute(0, 2, 3, 1)).mul_(self.scale)
        if self.mask is not None:
            s += self.mask
        if self.causal:
            s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -torch.inf)
        p, empty = torch.softmax(s, -1), self.empty_rows()
        return p if empty is None else p.masked_fill_(empty.transpose(1, 2), 0.0)

    def _wide(self, values: Tensor) -> WideAttention | None:
        """What reads values that are wider than the keys; None: torch's flash attention can."""
        return WideAttention(self, values) if values.shape[-1] > self.q.shape[-1] else None
