"""torch.nn.MultiheadAttention as self-attention, by itself or in a TransformerEncoderLayer or -DecoderLayer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.models.surgery.head import FreeEnergyHead
from fem.models.surgery.site import CrossAttention, Refused, Site
from fem.ops.softmax.support import as_bias
from fem.projection import check_tokens


def find(module: nn.Module, name: str, parent: nn.Module | None) -> Site | None:
    """The site that `module` is; None if it is no MultiheadAttention. Raises Refused."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if isinstance(parent, nn.TransformerDecoderLayer) and module is parent.multihead_attn:
        raise CrossAttention("it is the cross-attention of a decoder layer")
    if type(parent).__name__.endswith("PoolingHead"):  # SigLIP's
        raise CrossAttention("a learnt query reads the tokens")
    if type(module) is not nn.MultiheadAttention:
        raise Refused("it changes nn.MultiheadAttention in ways unknown here; put a plain one in its place first")
    if not module._qkv_same_embed_dim:
        raise CrossAttention("its keys or values have another width (kdim, vdim) than its queries")
    if module.bias_k is not None or module.add_zero_attn:
        raise Refused("it adds keys of its own (add_bias_kv, add_zero_attn); build it without them")
    fields = {"n_head": module.num_heads} | dict.fromkeys(("n_embd", "fem_dim", "qk_dim"), module.embed_dim)
    return Site(module, module.in_proj_weight, fields, graft=lambda head: _graft(module, head))


def _graft(attention: nn.MultiheadAttention, head: FreeEnergyHead) -> nn.Module:
    replaced = FreeEnergyMultiheadAttention.__new__(FreeEnergyMultiheadAttention)
    replaced.__setstate__({**vars(attention), "_modules": {**attention._modules}})
    replaced._qkv_same_embed_dim = False  # TransformerEncoderLayer then calls forward instead of its fused kernel
    replaced.free_energy = head
    return replaced


class FreeEnergyMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention whose heads read a free energy (Eq. 11), as `replace_attention` leaves it.

    Called as its base class, with one tensor as query, key and value. The weights it returns are the prior p, of shape
    (B, T, T), or (B, H, T, T) where average_attn_weights=False. Dropout falls on the mixed output instead of p.
    """

    def forward(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "..."], Tensor | None]:
        same = lambda x: x.is_set_to(query) and x.requires_grad == query.requires_grad  # noqa: E731
        if not all(x is query or same(x) for x in (key, value)):  # a reentrant checkpoint detaches each of them
            raise ValueError(
                "query, key and value must be one tensor, as the gates belong to the tokens that are read; "
                "keep cross-attention as it was, with layers=[...] of replace_attention."
            )
        batched = query.dim() == 3
        x = query if batched else query[None]
        check_tokens("query", x, f"(.., embed_dim = {self.embed_dim})", self.embed_dim, self.out_proj)
        x = x.transpose(0, 1) if batched and not self.batch_first else x
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        q, k, v = (
            projected.unflatten(-1, (self.num_heads, -1))
            for projected in F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        bias = self._bias(x, key_padding_mask, None if is_causal else attn_mask)
        o = self.free_energy(x, q, k, v, None, is_causal, None, bias)
        y = self.out_proj(F.dropout(o.flatten(-2), self.dropout, self.training))
        weights = _prior(q, k, bias, is_causal) if need_weights else None
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y if self.batch_first else y.transpose(0, 1), weights

    def _bias(self, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
        """Both masks of torch (bool: True is forbidden; float: added) as one bias."""
        masks, (batch, time) = [], x.shape[:2]
        pairs = [(time, time), (batch * self.num_heads, time, time)]
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            shapes = pairs if mask is attn_mask else [(batch, time)]
            if mask is not None and tuple(mask.shape) not in shapes:
                raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.")
        if key_padding_mask is not None:
            masks.append(key_padding_mask[:, None, None])
        if attn_mask is not None:
            masks.append(
                attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
            )
        biases = [as_bias(~mask if mask.dtype == torch.bool else mask, x.dtype) for mask in masks]
        return sum(biases) if biases else None


def _prior(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Float[Tensor, "b h t t"]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return (scores if bias is None else scores + bias).softmax(-1)
