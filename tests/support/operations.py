"""What torch's FlopCounterMode counts."""

from torch.utils.flop_counter import FlopCounterMode


def counted(function, *inputs):
    """Floating-point operations of function(*inputs), which returns tensors or None, and of its backward."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counter:
        results = function(*inputs)
        forward = counter.get_total_flops()
        sum(x.sum() for x in results if x is not None).backward()
    return forward, counter.get_total_flops() - forward
