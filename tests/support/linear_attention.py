"""Inputs for linear attention."""

import torch


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


def draw_memory(tensors):
    batch, _, heads, dk = tensors["q"].shape
    shape = (batch, heads, dk, tensors["v"].shape[-1])
    memory = {"log_weight": torch.randn(shape[:3]), "mean": torch.randn(shape)}
    return memory if tensors["beta"] is None else memory | {"free_energy": torch.randn(shape)}
