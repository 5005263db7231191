"""The scan of a selective state space model by torch, one token after another, its gradient by hand.

    h_tn = e^{delta_t a_n} h_{t-1,n} + b_tn u_t        y_t = sum_n c_tn h_tn

The items u have several streams of W columns. What a token does to the states stays in a core's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor


def state_scan(delta, a, b, c, u, opens, first) -> tuple[Tensor, Tensor]:
    """y and the states after the last token, in the dtype of its inputs."""
    return _StateScan.apply(delta, a, b, c, u, opens, first)


class _StateScan(torch.autograd.Function):
    """The loop over tokens, forward and backward, which writes to buffers that were made before it."""

    @staticmethod
    def forward(ctx, delta, a, b, c, u, opens, first):
        """y and the last states; the states after every token are kept for the gradient."""
        (states, width), (batch, time, columns) = a.shape, u.shape
        keep = (delta.unsqueeze(-2) * a).exp_()
        if opens is not None:
            keep.masked_fill_(opens[..., None, None], 0)
        h, y = u.new_empty(time, batch, states, columns // width, width), u.new_empty(time, batch, 1, columns)
        before, left = first.view(h.shape[1:]), torch.empty_like(h[0])
        tokens = keep.unsqueeze(-2), b[..., None, None], u.unflatten(-1, (1, -1, width)), c.unsqueeze(-2)
        for (keep_t, b_t, u_t, c_t), h_t, y_t in zip(_by_token(*tokens), h, y):
            torch.mul(keep_t, before, out=left)
            torch.addcmul(left, b_t, u_t, out=h_t)
            torch.bmm(c_t, h_t.view(batch, states, columns), out=y_t)
            before = h_t
        ctx.save_for_backward(delta, a, b, c, u, first, keep, h)
        return y.squeeze(2).transpose(0, 1), before.reshape(first.shape)

    @staticmethod
    def backward(ctx, d_y, d_last):
        """With r the gradient of h_t."""
        delta, a, b, c, u, first, keep, h = ctx.saved_tensors
        shape, whole = h.shape[1:], first.shape
        d_a, d_delta, d_u = torch.zeros_like(a), torch.empty_like(delta), torch.empty_like(u)
        d_b, d_c = torch.empty_like(b), torch.empty_like(c)
        r, product, after = torch.empty_like(h[0]), torch.empty_like(h[0]), d_last.reshape(shape).clone()
        outputs = d_delta, d_u.unsqueeze(-2), d_b.unsqueeze(-1), d_c.unsqueeze(-1)
        streams = lambda x: x.unflatten(-1, (1, *shape[-2:]))  # noqa: E731
        inputs = keep, b.unsqueeze(-2), c[..., None, None], streams(d_y), delta.unsqueeze(-2), u, d_y, *outputs
        earlier = [first.view(shape), *h.unbind(0)]
        for t, token in reversed(list(enumerate(_by_token(*inputs)))):
            keep_t, b_t, c_t, pull_t, delta_t, u_t, dy_t, d_delta_t, d_u_t, d_b_t, d_c_t = token
            torch.addcmul(after, c_t, pull_t, out=r)
            d_b_t.copy_(r.view(whole) @ u_t.unsqueeze(-1))
            d_u_t.copy_(b_t @ r.view(whole))
            d_c_t.copy_(earlier[t + 1].view(whole) @ dy_t.unsqueeze(-1))
            torch.mul(r, keep_t.unsqueeze(-2), out=after)
            d_decay = torch.mul(after, earlier[t], out=product).sum(-2)
            torch.sum(d_decay * a, 1, out=d_delta_t)
            d_a += (d_decay * delta_t).sum(0)
        return d_delta, d_a, d_b, d_c, d_u, None, after.view(whole)


def _by_token(*tensors: Tensor):
    return zip(*(x.unbind(1) for x in tensors))
