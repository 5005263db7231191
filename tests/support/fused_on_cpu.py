"""Fused layers on a CPU: Triton's interpreter runs their kernels, formulas stand in for torch's attention and fla's."""

import math

import fla_reference
import interpreted  # noqa: F401  (before any kernel)
import torch

from fem import fused_layer
from fem.ops.linear_attention import fla_read
from fem.ops.softmax.fused import bounded_attention
from fem.ops.softmax.fused import fused_attention as attention
from fem.priors import kv_cache


def scores(q, k, scale, causal):
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = scale * torch.einsum("bthd,bihd->bhti", q.float(), k.float())
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if causal else s


def attend_bounded(q, k, values, support, lists):
    seen = support.visible(q.shape[1], k.shape[1], q.device)
    s = scores(q, k, support.scale, False).masked_fill(~seen, -math.inf)
    wide = values.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bhti,bihd->bthd", s.softmax(-1), wide.float()).to(q.dtype), s.logsumexp(-1)


def attend(q, k, values, scale, causal, flash):
    s, wide = scores(q, k, scale, causal), values.repeat_interleave(q.shape[2] // k.shape[2], 2)
    out = torch.einsum("bhti,bihd->bthd", s.softmax(-1).to(q.dtype).float(), wide.float())
    return out.to(q.dtype).contiguous(), s.logsumexp(-1).contiguous()


def attend_backward(grad, q, k, values, out, lse, scale, causal, flash):
    group, heads = q.shape[2] // k.shape[2], k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(group, 2).float() for x in (k, values))
    p, grad = (scores(q, k, scale, causal) - lse[..., None]).exp(), grad.float()
    d_s = p * (torch.einsum("bthd,bihd->bhti", grad, wide_v) - (grad * out.float()).sum(-1).transpose(1, 2)[..., None])
    d_q = scale * torch.einsum("bhti,bihd->bthd", d_s, wide_k)
    of_groups = lambda x: x.unflatten(2, (heads, group)).sum(3)  # noqa: E731
    d_k = of_groups(scale * torch.einsum("bhti,bthd->bihd", d_s, q.float()))
    d_v = of_groups(torch.einsum("bhti,bthd->bihd", p, grad))
    return [x.to(q.dtype).contiguous() for x in (d_q, d_k, d_v)]


def install(monkeypatch, dtype=torch.float32):
    """Take the fused form for layers of this dtype on a CPU."""
    monkeypatch.setattr(attention, "kernel_attention", attend)
    monkeypatch.setattr(attention, "kernel_attention_backward", attend_backward)
    monkeypatch.setattr(bounded_attention, "attend_on_card", attend_bounded)
    monkeypatch.setattr(fla_read, "by_fla", fla_reference.gla)
    monkeypatch.setattr(kv_cache, "pack_exactly", lambda *_: None)  # values are cached as they come
    monkeypatch.setattr(fused_layer, "found", lambda module: True)
    monkeypatch.setattr(fused_layer, "available", lambda x: True)
    monkeypatch.setattr(fused_layer, "DTYPE", dtype)
    monkeypatch.setattr(fused_layer, "attention_kernel", lambda *sizes: (False, False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
