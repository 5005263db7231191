"""A softmax layer by few launches on a GPU: its maps as one product, its read and gates by `fem.ops.softmax.fused`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.call import Call
from fem.gates import SlimProjection
from fem.ops.common.backend import exporting, found, plain_map, plain_tensors, transformed, watched
from fem.ops.common.precision import product_dtype
from fem.priors import SoftmaxPrior
from fem.priors.kv_cache import append

_MOST_ROWS, _MOST_TOKENS = 65535, 2**18  # the axes of a CUDA grid hold 65,535 programs, of at least 4 tokens each
DTYPE = torch.bfloat16  # e would leave float16's range, and fused attention has no float32


def fits(layer, call: Call) -> bool:
    """True if the fused kernels read this call: a whole sequence in bfloat16 on CUDA without documents, windows or a
    state before it, by maps that no adapter, hook or sharding has taken over. Padded rows where the layer is causal and
    returns no state; a state is returned where no gradient is wanted.
    """
    config, x, tokens = layer.config, call.x, call.tokens
    if not (available(x) and type(layer.prior) is SoftmaxPrior) or call.memory:
        return False
    if call.memory is not None and (torch.is_grad_enabled() or tokens.keep is not None):
        return False
    if config.backend not in ("auto", "sdpa") or config.window is not None or config.value_logexp_cap is not None:
        return False
    if tokens.document is not None or not (0 < x.shape[0] <= _MOST_ROWS and 2 <= x.shape[1] <= _MOST_TOKENS):
        return False
    if tokens.keep is not None and not config.causal:  # a key behind all kept ones is hidden by causality alone
        return False
    if layer.gate.per_head or product_dtype(x) != DTYPE or exporting() or transformed(x):
        return False
    slim = [gate for gate in (layer.gate.inner, layer.gate.outer) if isinstance(gate, SlimProjection)]
    scale = [] if layer.value_scale is None else [layer.value_scale]
    if not all(map(plain_map, [*_first_maps(layer), *scale, *(gate.up for gate in slim)])):
        return False
    beta = [] if layer.beta is None else [layer.beta]
    if any(map(watched, [layer.prior, layer.gate, *slim, *beta])) or not plain_tensors(*(b.theta for b in beta)):
        return False
    sizes = (config.n_head, config.kv_heads, config.key_width, config.read_width, config.causal)
    return _kernel(x.device.index or 0, *sizes) is not None


def mixed(
    layer, call: Call, features: Float[Tensor, "b t f"]
) -> tuple[Float[Tensor, "b t h dv"], dict[str, Tensor] | None]:
    """o = g ((1 - lambda) mean + lambda F), as `TwoLevelGate.mixed` of the prior's read, and the prior's memory after
    it, None where the call returns no state.                                                         (Eq. 4, 10, 11)

    Of padded rows the kept tokens are read first, as a row that ends there: no kept token sees one behind it.
    """
    from fem.ops.softmax.fused.mixed_read import mixed_read, prefill  # by Triton, which the library does not require

    keep = call.tokens.keep
    if call.memory is not None:
        o, k, v = prefill(*_arguments(layer, call.x, features))
        beta = layer.temperature(call.x)
        v, free_values = layer.pair(v, beta)
        return o, append({}, k, v, beta, call.tokens, False, free_values)
    if keep is None:
        return mixed_read(*_arguments(layer, call.x, features)), None
    order = keep.long().argsort(dim=1, descending=True, stable=True)
    back = order.argsort(1)
    features = _Reordered.apply(features, order, back)
    return _Reordered.apply(mixed_read(*_arguments(layer, call.x, features)), back, order), None


class _Reordered(torch.autograd.Function):
    """The tokens of each row in another order, y_t = x_{order_t}; its gradient is the way back, without a sum."""

    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(back, order)
        return x.take_along_dim(order.view(*order.shape, *[1] * (x.ndim - 2)), 1)

    @staticmethod
    def backward(ctx, grad):
        return _Reordered.apply(grad, *ctx.saved_tensors), None, None


def _arguments(layer, x: Tensor, features: Tensor) -> tuple:
    """What `mixed_read` is called with. x says dtype, device and length alone."""
    from fem.ops.softmax.fused.layer_form import Form, Options

    config, gate, dtype = layer.config, layer.gate, product_dtype(x)
    maps = _first_maps(layer)
    second = [None if layer.value_scale is None else layer.value_scale.weight]
    for projection in (gate.inner, gate.outer):
        slim = isinstance(projection, SlimProjection)
        second += [projection.up.weight, projection.up.bias] if slim else [None, None]

    free = config.free_width if config.use_lse else 0
    shared = bool(free) and config.free_share is None and not config.free_alone
    mean = 0 if config.free_alone else config.value_width if shared else config.value_width - free
    sizes = (config.n_head, config.kv_heads, config.key_width, mean, free, shared, config.causal, config.use_rope)
    flash = _kernel(x.device.index or 0, *sizes[:3], config.read_width, config.causal) == "flash"
    form = Form(*sizes, gate.outer is not None, config.gate_rank or 0, config.context_width, flash)
    options = Options(form, config.key_width**-0.5, config.eps, config.beta_max_init)
    turns = _tables(layer.prior, x) if config.use_rope else (None, None)
    theta = layer.beta.theta if free and layer.beta is not None else None
    tensors = [None if y is None else y.to(dtype).contiguous() for y in (features, *second)]
    biases = [projection.bias for projection in maps]
    biases = None if all(bias is None for bias in biases) else biases
    return options, [projection.weight for projection in maps], biases, *tensors, theta, *turns


def available(x: Tensor) -> bool:
    return x.is_cuda and found("triton") and torch.version.hip is None


def _first_maps(layer) -> list[nn.Module]:
    """The maps that read the layer's features, in the order of the product's columns."""
    gates = [projection for projection in (layer.gate.inner, layer.gate.outer) if projection is not None]
    gates = [gate.down if isinstance(gate, SlimProjection) else gate for gate in gates]
    return [layer.prior.query, layer.prior.key, layer.value, *gates]


@torch.compiler.assume_constant_result
def _kernel(device: int, heads: int, kv_heads: int, key_width: int, width: int, causal: bool) -> str | None:
    from fem.ops.softmax.fused.fused_attention import kernel_for, wishes

    sizes = (heads, kv_heads, key_width, width, causal)
    return kernel_for(torch.device("cuda", device), torch.bfloat16, *sizes, wishes())


def _tables(prior: SoftmaxPrior, x: Tensor) -> tuple[Float[Tensor, "t p"], Float[Tensor, "t p"]]:
    """cos and sin of the angles of a sequence's positions, in float32; layers of equal frequencies share them."""
    time, frequency = x.shape[1], prior._frequency(prior.config.key_width, x.device)
    if torch.compiler.is_compiling():
        return _turns(time, frequency, prior.config.rope_factor)
    config = prior.config
    key = (config.key_width, config.rope_theta, config.rope_frequencies, config.rope_factor, x.device)
    known = _TABLES.get(key)
    if known is None or known[0].shape[0] < time:
        with torch.inference_mode(False), torch.no_grad():
            known = _TABLES[key] = _turns(time, frequency, config.rope_factor)
    return known


_TABLES: dict[tuple, tuple[Tensor, Tensor]] = {}


def _turns(time: int, frequency: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    angle = torch.arange(time, device=frequency.device, dtype=torch.float64)[:, None] * frequency
    return (factor * angle.cos()).float(), (factor * angle.sin()).float()
