"""A layer by few launches on a GPU: its maps as one product, its read and gates by kernels between their columns.

A softmax layer is read by `fem.ops.softmax.fused`, linear attention and GLA by `fem.ops.linear_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fem.call import Call
from fem.gates import SlimProjection, TwoLevelGate, first_map
from fem.ops.common.backend import (
    MOST_PROGRAMS,
    exporting,
    found,
    multiplies_bfloat16,
    plain_map,
    plain_tensors,
    transformed,
    watched,
)
from fem.ops.common.kept_first import Order, kept_first
from fem.ops.common.precision import product_dtype
from fem.ops.common.tokens import Tokens
from fem.ops.softmax.card_attention import WIDEST
from fem.ops.softmax.support import seen_keys
from fem.priors import GatedLinearPrior, LinearPrior, Prior, SoftmaxPrior
from fem.priors.kv_cache import append, within_window

_MOST_TOKENS = 2**18  # a program along an axis of a grid has at least 4
Kernel = tuple[bool, bool]  # of attention: whether it is flash attention, and whether it reads v and e apart
Widths = tuple[int, int, bool]  # channels of a head that read the mean and F, and whether these are the same ones
DTYPE = torch.bfloat16  # e would leave float16's range, and fused attention has no float32


def fits(layer, call: Call) -> bool:
    """True if the fused kernels read this call: a whole sequence in bfloat16 on a card that multiplies it, by maps that
    no adapter, hook or sharding has taken over, of a layer and under marks that its prior's kernels know.
    """
    config, x = layer.config, call.x
    reads = _READS.get(type(layer.prior))
    if reads is None or config.value_logexp_cap is not None or not takes(x, layer.gate):
        return False
    if exporting() or transformed(x) or not reads(layer, call):
        return False
    slim = [gate for gate in layer.gate.maps() if isinstance(gate, SlimProjection)]
    scale = [] if layer.value_scale is None else [layer.value_scale]
    beta = [] if layer.beta is None else [layer.beta]
    parts = [layer.prior, layer.gate, *beta]
    return plain_tensors(*(b.theta for b in beta)) and untouched([*_first_maps(layer), *scale], slim, parts)


def takes(x: Tensor, gate: TwoLevelGate) -> bool:
    """Whether kernels take the sizes, dtype and device of x, (B, T, ..), behind a gate that is more than a number."""
    if not available(x) or gate.per_head or not multiplies_bfloat16(x.device) or product_dtype(x) != DTYPE:
        return False
    return 0 < x.shape[0] <= MOST_PROGRAMS and 2 <= x.shape[1] <= _MOST_TOKENS


def untouched(maps: Sequence[nn.Module], slim: Sequence[SlimProjection], parts: Sequence[nn.Module]) -> bool:
    """Whether maps and slim gates, whose first maps are among them, are as the library built them, and nobody watches
    them or the parts around them."""
    plain = all(map(plain_map, [*maps, *(gate.up for gate in slim)])) and all(gate.down.bias is None for gate in slim)
    return plain and not any(map(watched, [*parts, *slim]))


def _softmax_reads(layer, call: Call) -> bool:
    """No state before the call; one is returned where no gradient is wanted."""
    if layer.config.backend not in ("auto", "sdpa") or _kernel_of(layer, call) is None:
        return False
    return call.memory is None or not (call.memory or torch.is_grad_enabled())


def _linear_reads(layer, call: Call) -> bool:
    """A normalised causal prior, no state before the call; one is returned in eager calls without gradients, also of
    padded rows."""
    config, first = layer.config, call.memory is not None and not call.memory
    if call.memory or (first and (torch.is_grad_enabled() or torch.compiler.is_compiling())):
        return False
    if call.tokens.keep is not None and not first:
        return False
    if config.backend not in ("auto", "triton") or not (config.causal and config.normalize):
        return False
    if call.x.shape[0] * config.n_head > MOST_PROGRAMS:  # of fla
        return False
    return config.key_width % 2 == 0 and found("fla")


_READS = {SoftmaxPrior: _softmax_reads, LinearPrior: _linear_reads, GatedLinearPrior: _linear_reads}


def mixed(
    layer, call: Call, features: Float[Tensor, "b t f"]
) -> tuple[Float[Tensor, "b t h dv"], dict[str, Tensor] | None] | None:
    """o = g ((1 - lambda) mean + lambda F), as `TwoLevelGate` of the prior's read, and the prior's memory after
    it, None where the call returns no state. Nothing where another form has to read the call.       (Eq. 4, 10, 11)
    """
    if not fits(layer, call):
        return None
    read = _softmax_mixed if type(layer.prior) is SoftmaxPrior else _linear_mixed
    return read(layer, call, features)


def _softmax_mixed(layer, call: Call, features: Tensor) -> tuple[Tensor, dict[str, Tensor] | None]:
    from fem.ops.softmax.fused.mixed_read import mixed_read, prefill  # by Triton, which the library does not require

    options, bounded, given = _softmax_options(layer, call), is_bounded(layer, call), call.tokens
    call, features, order = in_kept_order(call, features)
    tensors, tokens, memory = _tensors(layer, call, features), call.tokens, None
    seen = seen_by_tokens(layer, call, order) if bounded else ()
    if call.memory is None:
        o = mixed_read(options, *tensors, seen)
    else:
        o, k, v = prefill(options, *tensors, seen=seen)
        if order is not None and layer.config.window is not None:
            k, v, tokens = order.as_before(k), order.as_before(v), given
        elif order is not None:  # in a cache, too, masked tokens may stand behind the kept ones
            tokens = replace(tokens, keep=order.kept)
        memory = within_window(appended(layer, {}, k, v, tokens), layer.config.window)
    return o if order is None else order.as_before(o), memory


def in_kept_order(call: Call, features: Tensor) -> tuple[Call, Tensor, Order | None]:
    """The call, but for its x, and the features with kept tokens first, and their order; None: no mask is given."""
    if call.tokens.keep is None:
        return call, features, None
    tokens, order = kept_first(call.tokens.keep, call.tokens.document)
    return call._replace(tokens=tokens), order.kept_first(features), order


def appended(layer, memory: dict[str, Tensor], k: Tensor, v: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    """The memory with turned keys, and values, behind it."""
    beta = layer.temperature(v)
    v, free_values = layer.pair(v, beta)
    return append(memory, k, v, beta, tokens, layer.config.window is not None, free_values)


def _linear_mixed(layer, call: Call, features: Tensor) -> tuple[Tensor, dict[str, Tensor] | None]:
    from fem.ops.linear_attention.linear_mixed_read import linear_mixed_read, linear_prefill  # by Triton, too

    config, (weights, biases, *inputs) = layer.config, _tensors(layer, call, features)
    if config.decay == "scalar":
        weights[-1], biases[-1] = (
            x if x is None else x.expand(config.n_head, *x.shape[1:]) for x in (weights[-1], biases[-1])
        )
    inputs = _linear_options(layer), weights, biases, *inputs, call.tokens.start
    if call.memory is None:
        return linear_mixed_read(*inputs), None
    o, memory = linear_prefill(*inputs, call.tokens.keep)
    memory = memory._replace(log_weight=memory.log_weight.squeeze(-1))._asdict()
    return o, {name: x for name, x in memory.items() if config.use_lse or name != "free_energy"}


def seen_by_tokens(layer, call: Call, order: Order | None) -> list[Tensor]:
    """Which keys each token sees, in documents and under a window; none that an order has put behind the kept ones."""
    from fem.ops.softmax.fused.bounded_attention import with_lists

    (time, device), config = (call.x.shape[1], call.x.device), layer.config
    return with_lists(*seen_keys(time, time, device, config.causal, config.window, call.tokens.document, order), time)


def is_bounded(layer, call: Call) -> bool:
    """Whether anything but causality, and padding under it, tells which keys a token sees."""
    padded = call.tokens.keep is not None and not layer.config.causal
    return padded or layer.config.window is not None or call.tokens.document is not None


def _kernel_of(layer, call: Call) -> Kernel | None:
    config, (mean, free, _) = layer.config, widths_of(layer.config)
    sizes = config.n_head, config.kv_heads, config.key_width, mean, free, config.causal
    return attention_kernel(call.x.device.index or 0, *sizes, is_bounded(layer, call))


def _softmax_options(layer, call: Call):
    """How `mixed_read` is called."""
    from fem.ops.softmax.fused.layer_form import Form, Options

    config, gate, widths = layer.config, layer.gate, widths_of(layer.config)
    sizes = (config.n_head, config.kv_heads, config.key_width, *widths, config.causal, config.use_rope)
    form = Form(*sizes, gate.outer is not None, config.gate_rank or 0, config.context_width, *_kernel_of(layer, call))
    return Options(form, config.key_width**-0.5, config.eps, config.beta_max_init)


def _linear_options(layer):
    """How `linear_mixed_read` is called."""
    from fem.ops.linear_attention.linear_form import LinearForm, LinearOptions

    config, gate, widths = layer.config, layer.gate, widths_of(layer.config)
    sizes = (config.n_head, config.key_width, *widths, gate.outer is not None, config.gate_rank or 0)
    decays = 0 if config.prior_type == "linear" else config.key_width if config.decay == "channel" else 1
    return LinearOptions(LinearForm(*sizes, decays, config.context_width), config.eps, config.beta_max_init)


def widths_of(config) -> Widths:
    """Channels of a head that read the mean and the free energy, and whether these are the same ones."""
    free = config.free_width if config.use_lse else 0
    return config.read_width - free, free, config.read_width > config.value_width


def _tensors(layer, call: Call, features: Tensor) -> tuple:
    """What `mixed_read` and `linear_mixed_read` take behind their options: weights and biases of the first maps; the
    features, W_v of the values' modulation, and U and b of lambda and of g where their gates are slim; theta; cos and
    sin."""
    maps, dtype = _first_maps(layer), product_dtype(call.x)
    biases = [projection.bias for projection in maps]
    others = [None if layer.value_scale is None else layer.value_scale.weight]
    for gate in (layer.gate.inner, layer.gate.outer):
        others += [gate.up.weight, gate.up.bias] if isinstance(gate, SlimProjection) else [None, None]
    theta = layer.beta.theta if layer.config.use_lse and layer.beta is not None else None
    inputs = features.to(dtype).contiguous(), *others, theta, *_tables(layer.prior, call)
    return [projection.weight for projection in maps], biases, *inputs


def available(x: Tensor) -> bool:
    return x.is_cuda and found("triton") and torch.version.hip is None


def _first_maps(layer) -> list[nn.Module]:
    """The maps that read the layer's features, in the order of the product's columns."""
    query, key, *decay = layer.prior.maps()
    return [query, key, layer.value, *map(first_map, layer.gate.maps()), *decay]


@torch.compiler.assume_constant_result
def attention_kernel(
    device: int, heads: int, kv_heads: int, key_width: int, mean: int, free: int, causal: bool, bounded: bool
) -> Kernel | None:
    """The attention of a call: FlexAttention where anything but causality bounds the keys, else flash attention or
    cuDNN's. None: no kernel of torch takes these widths."""
    from fem.ops.softmax.fused.fused_attention import kernel_for, wishes

    if bounded:
        twice = min(mean, free) > 0 and mean + free > WIDEST
        return None if key_width % 2 or max(key_width, mean, free) > WIDEST else (False, twice)
    fit = lambda width: kernel_for(  # noqa: E731
        torch.device("cuda", device), torch.bfloat16, heads, kv_heads, key_width, width, causal, wishes()
    )
    whole = fit(mean + free)
    if whole is not None or not min(mean, free):
        return None if whole is None else (whole == "flash", False)
    apart = {fit(mean), fit(free)}
    return None if len(apart) > 1 or None in apart else ("flash" in apart, True)


def _tables(prior: Prior, call: Call) -> Sequence[Float[Tensor, "#b t p"] | Float[Tensor, "t p"] | None]:
    """cos and sin of the angles of the tokens' positions, in float32. Layers of equal frequencies share them, but for
    documents and masked tokens, in whose rows a position stands anywhere."""
    if not prior.config.use_rope:
        return None, None
    tables, anywhere = _shared_tables(prior, call.x), call.tokens.start is not None or call.tokens.keep is not None
    return [table[call.tokens.position] for table in tables] if anywhere else tables


def _shared_tables(prior: Prior, x: Tensor) -> tuple[Float[Tensor, "t p"], Float[Tensor, "t p"]]:
    """Those of positions 0 to T - 1, or of more. They are kept for good: captured graphs read them where they lie."""
    config, time, frequency = prior.config, x.shape[1], prior._frequency(prior.config.key_width, x.device)
    if torch.compiler.is_compiling():
        return _turns(time, frequency, config.rope_factor)
    rows = 1 << (time - 1).bit_length()
    key = (config.key_width, config.rope_theta, config.rope_frequencies, config.rope_factor, x.device, rows)
    known = _TABLES.get(key)
    if known is None:
        with torch.inference_mode(False), torch.no_grad():
            known = _turns(rows, frequency, config.rope_factor)
        if not torch.cuda.is_current_stream_capturing():  # what a graph makes is there once it is replayed
            _TABLES[key] = known
    return known


_TABLES: dict[tuple, tuple[Tensor, Tensor]] = {}


def _turns(time: int, frequency: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """factor cos(t w) and factor sin(t w), parts of one tensor: of two, inductor would make two kernels."""
    angle = torch.arange(time, device=frequency.device, dtype=torch.float64)[:, None] * frequency
    return (factor * torch.stack([angle.cos(), angle.sin()])).float().unbind()
