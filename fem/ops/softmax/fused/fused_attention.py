"""torch's fused attention and its gradient, called apart: the backward here adds to theirs before it goes on.

Private parts of PyTorch: `aten::_scaled_dot_product_{cudnn,flash}_attention` and their backward, of 2.11 to 2.15. They
may go when a public attention of PyTorch returns its log sum of exponentials and takes a gradient of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.attention
from jaxtyping import Float
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

aten = torch.ops.aten
CUDNN_WIDEST = 128  # columns: cuDNN's backward may refuse more


def wishes() -> tuple:
    """What a user has switched that decides between the kernels."""
    activated = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    switches = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    return *switches, torch.are_deterministic_algorithms_enabled(), activated


@functools.cache
def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    key_width: int,
    width: int,
    causal: bool,
    wished: tuple,
) -> str | None:
    """Which of torch's kernels reads such a call of two tokens and more with gradients: "cudnn", "flash" or None.

    cuDNN where it may, as it is faster and takes values wider than keys; flash attention where a user has activated
    another version of it (`torch.nn.attention.activate_flash_attention_impl`). Widths are multiples of 8. wished:
    `wishes()`, on which the answer depends.
    """
    if key_width % 8 or width % 8:
        return None
    sizes = ((heads, key_width), (kv_heads, key_width), (kv_heads, width))
    with torch.inference_mode(False), torch.enable_grad():  # the first call may be one without gradients
        q, k, values = (torch.empty(1, h, 128, d, device=device, dtype=dtype, requires_grad=True) for h, d in sizes)
        call = SDPAParams(q, k, values, None, 0.0, causal, heads != kv_heads)
        flash = key_width == width and can_use_flash_attention(call)
        if flash and wished[-1] is not None:
            return "flash"
        if max(key_width, width) <= CUDNN_WIDEST and can_use_cudnn_attention(call):
            return "cudnn"
        return "flash" if flash else None


def together(pieces: Sequence[Float[Tensor, "b t h _"]]) -> Float[Tensor, "b t h w"]:
    """Columns that several calls of attention have read, side by side."""
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(list(pieces), -1)


def kernel_attention(
    q: Tensor, k: Tensor, values: Tensor, scale: float, causal: bool, flash: bool
) -> tuple[Float[Tensor, "b t h w"], Float[Tensor, "b h t"]]:
    """p @ values and log sum_i e^{s_i} in float32, of (B, T, H, .) queries over (B, T, H_kv, .) keys and values;
    by flash attention or cuDNN's."""
    q, k, values = (x.transpose(1, 2) for x in (q, k, values))
    if flash:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, values, 0.0, causal, False, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, values, None, True, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2).contiguous(), lse.reshape(out.shape[:3]).contiguous()


def kernel_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    flash: bool,
) -> list[Tensor]:
    """Gradients of q, k and the values, (B, T, H, .). The states of the random numbers are read by dropout alone."""
    time = q.shape[1]
    grad, q, k, values, out = (x.transpose(1, 2) for x in (grad, q, k, values, out))
    if flash:
        state, unused = (lse.new_empty(n, dtype=torch.uint64) for n in (2, 0))
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, values, out, lse, None, None, time, time, 0.0, causal, state, unused, scale=scale
        )
    else:
        seed, offset = (lse.new_empty(1, dtype=torch.long) for _ in "so")
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, values, out, lse.unsqueeze(-1), seed, offset, None, None, None, time, time, 0.0, causal,
            scale=scale,
        )  # fmt: skip
    return [x.transpose(1, 2).contiguous() for x in grads]
