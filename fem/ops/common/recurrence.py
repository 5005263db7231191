"""First-order recurrences along time, in work linear in T.

Time is cut into blocks that advance in lockstep: one pass finds what each block adds and its whole decay, the same
scan over the blocks finds the state that enters each, and a second pass runs the recurrence from there. Nothing is ever
divided by a decay, so a decay of any size is exact; the decay of a block is a sum of logarithms, so the rounding of
factors near 1 does not pile up. Tensors are (..., T, C); the decays may lack leading dimensions.
`recurrence` has a gradient, and runs by a kernel of flash-linear-attention where one is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
WIDE, MOST_BLOCKS = 2**11, 16  # so many columns fill a loop over few tokens as they are


def recurrence(log_decay: Tensor | None, u: Tensor, state: Tensor, kernels: bool) -> Tensor:
    """h_t = exp(log_decay_t) h_{t-1} + u_t of streams u (S, B, T, C) from `state` (S, B, C), differentiable once."""
    if not kernels:
        return _Recurrence.apply(log_decay, u, state)
    if log_decay is None:
        return u.cumsum(-2) + state.unsqueeze(-2)
    u, state = u.movedim(0, -2), state.movedim(0, -2)
    streams = u.shape[-2:]
    h = by_hgrn(log_decay.repeat(1, 1, streams[0]), u.flatten(-2), state.flatten(-2))
    return h.unflatten(-1, streams).movedim(-2, 0)


def by_hgrn(log_decay: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """The same of (B, T, C) from (B, C), by flash-linear-attention."""
    from fla.ops.hgrn import fused_recurrent_hgrn

    log_decay, u, state = (x.float().contiguous() for x in (log_decay, u, state))
    return fused_recurrent_hgrn(u, log_decay, state)[0]


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_decay, u, state):
        h = running_sums(log_decay, u, state)
        ctx.save_for_backward(log_decay, state, h)
        return h

    @staticmethod
    def backward(ctx, grad):
        log_decay, state, h = ctx.saved_tensors
        reach = adjoint_sums(log_decay, grad)
        if log_decay is None:
            return None, reach, reach[..., 0, :]
        keep, d_decay = log_decay.exp(), None
        if ctx.needs_input_grad[0]:
            before = torch.cat([state.unsqueeze(-2), h[..., :-1, :]], -2)
            d_decay = before.mul_(reach).sum_to_size(keep.shape).mul_(keep)
        return d_decay, reach, keep[..., 0, :] * reach[..., 0, :]


def running_sums(log_decay: Tensor, u: Tensor, state: Tensor, backwards: bool = False) -> Tensor:
    """h_t = exp(log_decay_t) h_{t-1} + u_t from `state`; backwards: h_t = exp(log_decay_t) h_{t+1} + u_t."""
    return _scan(_SUM, log_decay, u, _new(u), state, backwards)


def adjoint_sums(log_decay: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the u of `running_sums`, given that of its h: r_t = grad_t + exp(log_decay_{t+1}) r_{t+1}."""
    reach = _new(grad)
    last = reach[..., -1, :].copy_(grad[..., -1, :])
    later = None if log_decay is None else log_decay[..., 1:, :]
    _scan(_SUM, later, grad[..., :-1, :], reach[..., :-1, :], last, backwards=True)
    return reach


def running_peaks(log_decay: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """m_t = max(m_{t-1} + log_decay_t, x_t) from `state`."""
    return _scan(_MAX, log_decay, x, _new(x), state, backwards=False)


# The factor of a decay, and a step: h = e^{log_decay} h + u, and h = max(log_decay + h, u).
_SUM = (torch.exp, lambda factor, h, u, out: _add(factor, h, u, out))
_MAX = (lambda decay: decay, lambda decay, h, u, out: torch.maximum(torch.add(decay, h, out=out), u, out=out))


def _add(factor: Tensor | None, h: Tensor, u: Tensor, out: Tensor) -> Tensor:
    return torch.add(u, h, out=out) if factor is None else torch.addcmul(u, factor, h, out=out)


def _scan(ring, log_decay: Tensor | None, u: Tensor, out: Tensor, state: Tensor, backwards: bool) -> Tensor:
    factor_of, step = ring
    factor = None if log_decay is None else factor_of(log_decay)
    blocks, rest = divmod(u.shape[-2], BLOCK)
    if blocks < 2 or (blocks <= MOST_BLOCKS and state.numel() >= WIDE):
        return _run(step, factor, u, out, state, backwards)
    edge = rest if backwards else blocks * BLOCK  # the rest that fills no block comes last in the scan's order
    body, beyond = (slice(edge, None), slice(edge)) if backwards else (slice(edge), slice(edge, None))
    blocked = lambda tensor: None if tensor is None else tensor[..., body, :].unflatten(-2, (blocks, BLOCK))  # noqa: E731
    inside = [blocked(tensor) for tensor in (factor, u, out)]
    added = _fold(step, *inside[:2], backwards)
    ends = _scan(ring, None if log_decay is None else blocked(log_decay).sum(-2), added, _new(added), state, backwards)
    state = state.unsqueeze(-2)
    entering = (ends[..., 1:, :], state) if backwards else (state, ends[..., :-1, :])
    _run(step, *inside, torch.cat(entering, -2), backwards)
    last = ends[..., 0 if backwards else -1, :]
    _run(step, *(x if x is None else x[..., beyond, :] for x in (factor, u, out)), last, backwards)
    return out


def _run(step, factor: Tensor | None, u: Tensor, out: Tensor, state: Tensor, backwards: bool) -> Tensor:
    for factor_t, u_t, out_t in _in_order(backwards, factor, u, out):
        step(factor_t, state, u_t, out_t)
        state = out_t
    return out


def _fold(step, factor: Tensor | None, u: Tensor, backwards: bool) -> Tensor:
    """What each block adds to what enters it."""
    steps = _in_order(backwards, factor, u)
    added = next(steps)[1].clone()
    for factor_t, u_t in steps:
        step(factor_t, added, u_t, added)
    return added


def _in_order(backwards: bool, factor: Tensor | None, *tensors: Tensor):
    of_time = [tensor.unbind(-2) for tensor in tensors]
    steps = list(zip([None] * len(of_time[0]) if factor is None else factor.unbind(-2), *of_time))
    return iter(steps[::-1] if backwards else steps)


def _new(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)
