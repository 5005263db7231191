"""Next-token cross-entropy whose logits never exist all at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.loss.loss_utils import fixed_cross_entropy

from fem.ops.common.backend import transformed
from fem.ops.common.operator import again_differentiable

IGNORED = -100
LOGITS_AT_ONCE = 2**24


def next_tokens(labels: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """The label that each token is to predict: the one after it."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def cross_entropy(
    hidden: Float[Tensor, "b t d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "b t"],
    num_items: Tensor | int | None = None,
) -> Float[Tensor, ""]:
    """-(1 / N) sum_t log softmax(W h_t)[target_t], in nats; a target of -100 is none.

    N: the number of targets, or `num_items` (transformers' num_items_in_batch). Equal to transformers'
    ForCausalLMLoss of labels that `next_tokens` has shifted; at most 2^24 logits exist at a time, and their gradients
    are computed right away, so that no logit is kept or computed twice; second derivatives and transforms of
    `torch.func` make all logits. Sums run in float32 at least.
    """
    if transformed(hidden, weight):
        return cross_entropy_of_logits(F.linear(hidden, weight), targets, num_items)
    targets = targets.flatten()
    total = _SummedCrossEntropy.apply(hidden.flatten(0, 1), weight, targets, torch.is_grad_enabled())
    count = (targets != IGNORED).sum() if num_items is None else num_items
    return total / (count.to(targets.device) if isinstance(count, Tensor) else count)


def cross_entropy_of_logits(
    logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"], num_items: Tensor | int | None = None
) -> Float[Tensor, ""]:
    """`cross_entropy` of logits that a head with more than a weight has made, all at once."""
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return fixed_cross_entropy(wide, targets.flatten().to(logits.device), num_items)


def is_one_weight(head: nn.Module) -> bool:
    """Whether head(h) is W h: no adapter, bias, parametrisation or hook, which may bring weights from elsewhere."""
    hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    return type(head) is nn.Linear and head.bias is None and not hooks and "forward" not in vars(head)


class _SummedCrossEntropy(torch.autograd.Function):
    """sum_n -log softmax(W h_n)[y_n], with dL/dlogits = softmax(W h_n) - onehot(y_n) used up chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, with_gradient):
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        wants_hidden, wants_weight = (with_gradient and asked for asked in ctx.needs_input_grad[:2])
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if wants_weight else None
        rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
        for piece in range(-(-hidden.shape[0] // rows)):  # a range to the length would compile for each length
            part = slice(piece * rows, (piece + 1) * rows)
            h, y = hidden[part], targets[part]
            logits = F.linear(h, weight)
            log_p = F.log_softmax(logits, -1, dtype=total.dtype)
            # not in place: under torch.compile PyTorch 2.11 gives no gradient to an output that was written to
            total = total + F.nll_loss(log_p, y, ignore_index=IGNORED, reduction="sum")
            if wants_hidden or wants_weight:
                counted = (y != IGNORED)[:, None]
                grad = log_p.exp_().scatter_add_(1, y.clamp_min(0)[:, None], -counted.to(log_p.dtype)).mul_(counted)
                grad = grad.to(logits.dtype)
                if wants_hidden:
                    grad_hidden[part] = grad @ weight
                if wants_weight:
                    grad_weight += grad.T @ h
        if wants_hidden or wants_weight:
            gradients = grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None
            ctx.save_for_backward(*gradients, hidden, weight, targets)
        return total

    @staticmethod
    def backward(ctx, grad):
        *gradients, hidden, weight, targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            plain = lambda h, w: [cross_entropy_of_logits(F.linear(h, w)[None], targets[None], 1)]  # noqa: E731
            return *again_differentiable(plain, (hidden, weight), [grad]), None, None
        return *(None if x is None else x * grad.to(x.dtype) for x in gradients), None, None
