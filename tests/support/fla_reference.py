"""The kernels of others that the library calls, in torch operations, with their signatures' meaning."""

import torch


def gla(q, k, items, g, state, opens, last=True):
    """S_t = e^{g_t} S_{t-1} + k_t^T items_t, out_t = q_t S_t, rounded to the items' dtype, and the last S; documents
    apart."""
    assert (q.dtype, k.dtype, items.shape[-1] % 16) == (items.dtype, items.dtype, 0)
    rows, dtype = [], items.dtype
    q, k, items = (x.float() for x in (q, k, items))
    state = k.new_zeros(*k[:, 0].shape, items.shape[-1]) if state is None else state
    for t in range(q.shape[1]):
        state = state if g is None else state * (g[:, t] if g.ndim == 4 else g[:, t, :, None]).exp().unsqueeze(-1)
        state = state if opens is None else torch.where(opens[:, t, None, None, None], 0, state)
        state = state + k[:, t].unsqueeze(-1) * items[:, t].unsqueeze(-2)
        rows.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(rows, 1).to(dtype), state


def hgrn(log_decay, u, h):
    rows = []
    for t in range(u.shape[1]):
        h = log_decay[:, t].exp() * h + u[:, t]
        rows.append(h)
    return torch.stack(rows, 1)
