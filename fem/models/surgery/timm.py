"""The attention of timm's ViT block, recognised by its parts: timm itself is not imported."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from fem.models.surgery.head import FreeEnergyHead
from fem.models.surgery.site import Refused, Site

PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop")


def find(module: nn.Module, name: str, parent: nn.Module | None) -> Site | None:
    """The site that the attention `module` is; None if it is not timm's. Raises Refused."""
    if not type(module).__module__.startswith("timm."):
        return None
    parts = [name for name, _ in module.named_children()]
    if type(module).__name__ != "Attention" or sorted(parts) != sorted(PARTS):
        raise Refused(f"its parts ({', '.join(parts)}) are not those of timm's plain ViT attention")
    widths = dict.fromkeys(("fem_dim", "qk_dim"), module.proj.in_features)
    fields = {"n_embd": module.qkv.in_features, "n_head": module.num_heads} | widths
    return Site(module, module.qkv.weight, fields, graft=lambda head: BlockAttention(module, head))


class BlockAttention(nn.Module):
    """timm's attention whose heads read a free energy (Eq. 11), with the original's parts under the original's names.

    attn_mask broadcasts to (B, H, T, T): True = attend, or added to the scores. Dropout falls on the mixed output.
    """

    def __init__(self, attention: nn.Module, head: FreeEnergyHead):
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, attention.scale
        for name in PARTS:
            setattr(self, name, getattr(attention, name))
        self.free_energy = head

    def forward(
        self, x: Float[Tensor, "b t d"], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b t d"]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
        o = self.free_energy(x, self.q_norm(q), self.k_norm(k), v, None, is_causal, self.scale, mask)
        return self.proj_drop(self.proj(self.norm(self.attn_drop(o.flatten(-2)))))
