"""The kernels of others that the library calls, in torch operations, with their signatures' meaning."""

import torch


def gla(q, k, items, g, borders):
    """sum_{i <= t} (q_t . e^{sum_{i<r<=t} g_r} k_i) items_i, documents apart."""
    dtype = items.dtype
    q, k, items = q.float(), k.float(), items.float()
    time = q.shape[1]
    number = torch.zeros(time, dtype=torch.long)
    if borders is not None:
        number[borders[:-1]] = 1
        number = number.cumsum(0)
    seen = (number[:, None] == number) & (torch.arange(time)[:, None] >= torch.arange(time))
    decay = torch.zeros(1, time, 1, 1) if g is None else g if g.ndim == 4 else g.unsqueeze(-1)
    since = decay.double().cumsum(1)
    left = (since[:, :, None] - since[:, None]).masked_fill(~seen[None, :, :, None, None], -torch.inf).exp().float()
    scores = (q[:, :, None] * k[:, None] * left).sum(-1)
    return torch.einsum("btsh,bshd->bthd", scores, items).to(dtype)


def hgrn(u, log_decay):
    rows, h = [], torch.zeros_like(u[:, 0])
    for t in range(u.shape[1]):
        h = log_decay[:, t].exp() * h + u[:, t]
        rows.append(h)
    return torch.stack(rows, 1)


def selective_scan(u, delta, a, b, c, skip):
    rows, h = [], torch.zeros(*u.shape[:2], a.shape[1])
    for t in range(u.shape[2]):
        h = (delta[:, :, t, None] * a).exp() * h + (delta[:, :, t] * u[:, :, t])[..., None] * b[:, None, :, t]
        rows.append((h * c[:, None, :, t]).sum(-1) + skip * u[:, :, t])
    return torch.stack(rows, 2)
