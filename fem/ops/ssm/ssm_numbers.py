"""The numbers of a selective state space model from their logits, with the logarithms that its scan reads."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from fem.ops.common.backend import by_kernels
from fem.ops.ssm.ssm_log_space import plain_numbers


def ssm_numbers(
    delta: Float[Tensor, "b t h d"],
    a: Float[Tensor, "h d n"],
    b: Float[Tensor, "b t n"],
    c: Float[Tensor, "b t n"],
    d: Float[Tensor, "h d"],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    """Delta, A, B, C and D, where A = -softplus(a) and the others are softplus(.), in float32 at least; and the
    logarithms of Delta, B and C.

    Logits far out make a softplus underflow to 0 in float32, while its logarithm is still exact.
    """
    if by_kernels(delta, a, b, c, d, differentiable=True):
        from fem.ops.ssm.ssm_numbers_kernels import numbers_by_kernels  # by Triton, which the library does not require

        return numbers_by_kernels(delta, a, b, c, d)
    return plain_numbers(delta, a, b, c, d)
