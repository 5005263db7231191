"""First-order recurrences along time, in work linear in T, from a state.

    h_t = exp(log_decay_t) h_{t-1} + u_t

Tensors are (B, T, ...); log_decay broadcasts to u, None is no decay. Long sequences are cut into blocks that advance in
lockstep: one pass finds what each block adds and its whole decay, the same scan over the blocks finds the state that
enters each, and a second pass runs the recurrence from there. Nothing is ever divided by a decay, so a decay of any
size is exact; the decay of a block is a sum of logarithms, so the rounding of factors near 1 does not pile up.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 16
WIDE, MOST_BLOCKS = 2**11, 16  # so many columns fill a loop over few tokens as they are


def recurrence(log_decay: Tensor | None, u: Tensor, state: Tensor) -> Tensor:
    """h of u (B, T, S, ..) from `state` (B, S, ..), differentiable once."""
    return _Recurrence.apply(log_decay, u, state)


class _Recurrence(torch.autograd.Function):
    """h, whose gradient is the same recurrence from the last token to the first."""

    @staticmethod
    def forward(ctx, log_decay, u, state):
        h = running_sums(log_decay, u, state)
        ctx.save_for_backward(log_decay, state, h)
        return h

    @staticmethod
    def backward(ctx, grad):
        """r_t = grad_t + exp(log_decay_{t+1}) r_{t+1} is the gradient of u."""
        log_decay, state, h = ctx.saved_tensors
        later = None if log_decay is None else decay_after(log_decay)
        reach = running_sums(later, grad, torch.zeros_like(state), backwards=True)
        if log_decay is None:
            return None, reach, reach[:, 0]
        keep, d_decay = log_decay.exp(), None
        if ctx.needs_input_grad[0]:
            d_decay = sums_before(h, state).mul_(reach).sum_to_size(keep.shape).mul_(keep)
        return d_decay, reach, keep[:, 0] * reach[:, 0]


def decay_after(log_decay: Tensor, backwards: bool = False) -> Tensor:
    """The decay out of each token into the next, by which gradients are summed the other way; 0 out of the last."""
    none = torch.zeros_like(log_decay[:, :1])
    return torch.cat([none, log_decay[:, :-1]] if backwards else [log_decay[:, 1:], none], 1)


def sums_before(h: Tensor, state: Tensor, backwards: bool = False) -> Tensor:
    """The sum that each token finds, of which a decay's gradient is made: the state, and then h."""
    first = state.unsqueeze(1)
    return torch.cat([h[:, 1:], first] if backwards else [first, h[:, :-1]], 1)


def running_sums(log_decay: Tensor | None, u: Tensor, state: Tensor, backwards: bool = False) -> Tensor:
    """h; backwards: h_t = exp(log_decay_t) h_{t+1} + u_t. No autograd here."""
    return _scan(log_decay, u, _new(u), state, backwards)


def _scan(log_decay: Tensor | None, u: Tensor, out: Tensor, state: Tensor, backwards: bool) -> Tensor:
    """h into `out`: short sequences in one loop, long ones block by block, which advance together."""
    factor = None if log_decay is None else log_decay.exp()
    blocks, rest = divmod(u.shape[1], BLOCK_TOKENS)
    if blocks < 2 or (blocks <= MOST_BLOCKS and state.numel() >= WIDE):
        return _run(factor, u, out, state, backwards)
    edge = rest if backwards else blocks * BLOCK_TOKENS  # the rest that fills no block comes last in the scan's order
    body, beyond = (slice(edge, None), slice(edge)) if backwards else (slice(edge), slice(edge, None))
    blocked = lambda x: None if x is None else x[:, body].unflatten(1, (blocks, BLOCK_TOKENS)).movedim(2, 1)  # noqa: E731
    inside = [blocked(x) for x in (factor, u, out)]
    added = _fold(*inside[:2], backwards)
    through = None if log_decay is None else blocked(log_decay).sum(1)
    ends, state = _scan(through, added, _new(added), state, backwards), state.unsqueeze(1)
    entering = (ends[:, 1:], state) if backwards else (state, ends[:, :-1])
    _run(*inside, torch.cat(entering, 1), backwards)
    last = ends[:, 0 if backwards else -1]
    _run(*(None if x is None else x[:, beyond] for x in (factor, u, out)), last, backwards)
    return out


def _run(factor: Tensor | None, u: Tensor, out: Tensor, state: Tensor, backwards: bool) -> Tensor:
    for factor_t, u_t, out_t in _in_order(backwards, factor, u, out):
        _step(factor_t, state, u_t, out_t)
        state = out_t
    return out


def _fold(factor: Tensor | None, u: Tensor, backwards: bool) -> Tensor:
    """What each block adds to what enters it."""
    steps = _in_order(backwards, factor, u)
    added = next(steps)[1].clone()
    for factor_t, u_t in steps:
        _step(factor_t, added, u_t, added)
    return added


def _step(factor: Tensor | None, h: Tensor, u: Tensor, out: Tensor) -> None:
    torch.add(u, h, out=out) if factor is None else torch.addcmul(u, factor, h, out=out)


def _in_order(backwards: bool, factor: Tensor | None, *tensors: Tensor):
    by_time = [x.unbind(1) for x in tensors]
    steps = list(zip([None] * len(by_time[0]) if factor is None else factor.unbind(1), *by_time))
    return iter(steps[::-1] if backwards else steps)


def _new(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)
