"""Next-token cross-entropy whose logits never exist all at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
    are computed right away, so that no logit is kept or computed twice. Sums run in float32 at least.
    """
    targets = targets.flatten()
    total = _SummedCrossEntropy.apply(hidden.flatten(0, 1), weight, targets, torch.is_grad_enabled())
    return total / ((targets != IGNORED).sum() if num_items is None else num_items)


def cross_entropy_of_logits(
    logits: Float[Tensor, "b t v"], targets: Int[Tensor, "b t"], num_items: Tensor | int | None = None
) -> Float[Tensor, ""]:
    """`cross_entropy` of logits that a head with more than a weight has made, all at once."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORED, reduction="sum")
    return total / ((targets != IGNORED).sum() if num_items is None else num_items)


def is_one_weight(head: nn.Module) -> bool:
    """Whether head(h) is W h: no adapter, bias, parametrisation or hook, which may bring weights from elsewhere."""
    hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    return type(head) is nn.Linear and head.bias is None and not hooks and "forward" not in vars(head)


class _SummedCrossEntropy(torch.autograd.Function):
    """sum_n -log softmax(W h_n)[y_n], with dL/dlogits = softmax(W h_n) - onehot(y_n) used up chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, with_gradient):
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_hidden = torch.zeros_like(hidden) if with_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=total.dtype) if with_gradient else None
        rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start : start + rows], targets[start : start + rows]
            logits = F.linear(h, weight)
            log_p = F.log_softmax(logits, -1, dtype=total.dtype)
            total += F.nll_loss(log_p, y, ignore_index=IGNORED, reduction="sum")
            if with_gradient:
                counted = (y != IGNORED)[:, None]
                grad = log_p.exp_().scatter_add_(1, y.clamp_min(0)[:, None], -counted.to(log_p.dtype)).mul_(counted)
                grad = grad.to(logits.dtype)
                grad_hidden[start : start + rows] = grad @ weight
                grad_weight += grad.T @ h
        if with_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None, None
