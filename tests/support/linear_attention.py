"""Inputs for linear attention, and the state that belongs to them by the definition."""

import torch

from fem.ops.linear_attention.naive_linear_attention import naive_linear_attention_read


def draw(decay, time=67, batch=2, heads=2, dk=3, dv=4, span=2.0, rate=0.1, spike=None, beta=True):
    q, k = torch.rand(2, batch, time, heads, dk) + 0.1
    v = torch.randn(batch, time, heads, dv)
    if spike is not None:
        v[:, time // 3] = spike
    beta = (torch.rand(heads, dv) + 0.5) * span / 2 if beta else None
    shape = (batch, time, heads) if decay == "head" else (batch, time, heads, dk)
    g = None if decay is None else -rate * torch.rand(shape)
    if rate == 1000.0 and g is not None:
        g = torch.full(shape, -rate)
    return {"q": q, "k": k, "v": v, "beta": beta, "log_decay": g}


def definition(key_mask=None, segment_ids=None, **call):
    """The read by the definition, and the state: what further tokens would read that look at one key channel each."""
    batch, time, heads, dk = call["q"].shape
    keep = torch.ones(batch, time, dtype=torch.bool) if key_mask is None else key_mask
    ids = torch.zeros(batch, time, dtype=torch.long) if segment_ids is None else segment_ids
    last = [ids[b, keep[b]][-1].expand(dk) for b in range(batch)]
    probes = {
        name: torch.zeros(batch, dk, *call[name].shape[2:])
        for name in ("k", "v", "log_decay")
        if call[name] is not None
    }
    probes["q"] = torch.eye(dk)[None, :, None].expand(batch, -1, heads, -1)
    longer = call | {name: torch.cat([call[name], probe], 1) for name, probe in probes.items()}
    supports = {"key_mask": torch.cat([keep, torch.ones(batch, dk, dtype=torch.bool)], 1)}
    supports["segment_ids"] = torch.cat([ids, torch.stack(last)], 1)
    state = naive_linear_attention_read(**longer | {"normalize": True}, **supports)
    ones = longer | {"v": torch.ones_like(longer["v"]), "beta": None, "normalize": False}
    weight = naive_linear_attention_read(**ones, **supports).mean[..., 0]
    state = {"log_weight": weight.log(), "mean": state.mean, "free_energy": state.free_energy}
    state = {name: x[:, time:].transpose(1, 2) for name, x in state.items() if x is not None}
    return naive_linear_attention_read(**call, key_mask=key_mask, segment_ids=segment_ids), state
