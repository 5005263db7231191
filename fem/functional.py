"""The reads, for users: one public door to `fem.ops`. Arguments are checked here, results are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fem.arguments import (
    BIAS,
    DECAY,
    FEATURE,
    FINITE_DECAY,
    LOG_WEIGHT,
    WEIGHT,
    check_flags,
    check_floating,
    check_values,
)
from fem.checks import SMALLEST, finite_number, positive_int
from fem.ops.channel_scan import channel_scan_read as channel_scan
from fem.ops.common.backend import may_look
from fem.ops.common.precision import compute_dtype, upcast
from fem.ops.common.read import LOG_ZERO, Read
from fem.ops.common.scan import ScanCall
from fem.ops.common.tokens import PLAIN, read_tokens
from fem.ops.decay_scan import decaying_sum as decay
from fem.ops.linear_attention import linear_attention_read as linear_attention
from fem.ops.softmax import softmax_read as softmax
from fem.ops.ssm import ssm_read as ssm
from fem.state import CachePosition

__all__ = ["Read", "ScanState", "channel_scan_read", "decay_scan", "keyed_scan_read", "softmax_read", "ssm_read"]


def softmax_read(
    q: Float[Tensor, "b tq h dk"],
    k: Float[Tensor, "b t hkv dk"],
    v: Float[Tensor, "b t hkv dv"],
    beta: Float[Tensor, "hkv df"] | None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    bias: Float[Tensor, "..."] | None = None,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    backend: str = "auto",
    free_values: Float[Tensor, "b t hkv df"] | None = None,
) -> Read:
    """The mean of values v and the free energy of values f under a softmax prior.

        p_ti = softmax_i(scale q_t . k_i + bias_ti)        mean_tj = sum_i p_ti v_ij
        F_tj = (1 / beta_j) log sum_i p_ti exp(beta_j f_ij)                        (Eq. 4, Appendix H.1)

    Time comes before heads, unlike in torch's scaled_dot_product_attention: q (B, T_q, H, d_k), k (B, T, H_kv, d_k),
    v (B, T, H_kv, d_v), H a multiple of H_kv: query head h reads key head h // (H / H_kv).
    f = free_values (B, T, H_kv, d_f), or v itself where it is None; either width may be 0. beta (H_kv, d_f) > 0, in
    nats per unit of f; None gives the mean only. The mean is (B, T_q, H, d_v) and the free energy (B, T_q, H, d_f), in
    the dtype of q, k, v together; sums run in float32 at least.
    causal: the T_q queries are the last T_q tokens, and see no later one. scale: positive, 1/sqrt(d_k) by default.
    window: a query sees t - window < i <= t, or |t - i| < window without causal; masked tokens count.
    bias: float, broadcastable to (B, H, T_q, T), differentiable; -inf forbids the pair.
    key_mask (B, T): bool or 0/1 integers, 1 = keep; a masked token counts as deleted. segment_ids (B, T): integers,
    any change between kept tokens starts a document that sees only itself.
    A query that sees no key reads 0, without gradient. Exact where float32 holds scores and sums: entries
    that one attention call cannot prove are computed again. A graph of `torch.export` clips beta (f - max f) at
    -58 nats instead. Raises ValueError on shapes and values, TypeError on dtypes.
    """
    check_flags(causal=causal)
    _check_projections(q, k, v, free_values)
    batch, queries, heads, _ = q.shape
    time = k.shape[1]
    _check_free_energy(v, beta, free_values)
    if scale is not None:
        scale = finite_number("scale", scale, SMALLEST, math.inf)
    window = positive_int("window", window, (None,))
    if (causal or window is not None or segment_ids is not None) and queries > time:
        raise ValueError(
            f"q has {queries} queries and k only {time} keys, but the queries are the last of the keys with causal, "
            "window or segment_ids; pass causal=False without them for cross-attention."
        )
    if bias is not None:
        _check_bias(bias, q, (batch, heads, queries, time))
    tokens = None
    if key_mask is not None or segment_ids is not None:
        tokens, _ = read_tokens((batch, time), k.device, key_mask, segment_ids, mask_name="key_mask")
    return softmax.softmax_read(
        q, k, v, beta, free_values, causal=causal, scale=scale, window=window, bias=bias, tokens=tokens, backend=backend
    )


@dataclass(frozen=True)
class ScanState:
    """The state of a scan between two calls: its sums, and each row's position and document. Opaque."""

    memory: dict[str, Tensor]
    cache_position: CachePosition


def channel_scan_read(
    log_weight: Float[Tensor, "b t h d"] | None,
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h d"] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: ScanState | None = None,
    return_state: bool = False,
    normalize: bool = True,
    backend: str = "auto",
    free_values: Float[Tensor, "b t h df"] | None = None,
) -> Read | tuple[Read, ScanState]:
    """The mean of values v and the free energy of values f under a weight per value channel that may decay.

        s_tj(i) = exp(log_weight_ij + sum_{i<r<=t} log_decay_rj)        p_tj(i) = s_tj(i) / sum_r s_tj(r)
        mean_tj = sum_i p_tj(i) v_ij        F_tj = (1 / beta_j) log sum_i p_tj(i) exp(beta_j f_ij)   (Eq. 4, 30, 31)

    v (B, T, H, d_v); f = free_values (B, T, H, d_f), or v itself where it is None; either width may be 0.
    beta (H, d_f) > 0 in nats per unit of f, None for the mean only. Mean (B, T, H, d_v), free energy (B, T, H, d_f).
    log_weight (None: 0; -inf: no weight) and log_decay <= 0 (None: 0; the decay into step t), in nats, have one entry a
    channel: (B, T, H, d_v), and with free_values (B, T, H, d_v + d_f), the channels of v first.
    causal=False adds the scores of the same scan of the reversed sequence, the present token once.
    key_mask (B, T): bool or 0/1 integers; a masked token counts as deleted. segment_ids (B, T): integers, a change
    forgets. normalize=False: mean = sum s v, F = (1 / beta) log sum s e^{beta f}.
    With return_state the state comes back too; passed as initial_state, it continues the sequence.
    A row of no weight reads 0. Exact for any finite input. Raises ValueError on shapes and values, TypeError on dtypes.
    """
    per_channel = {"log_weight": log_weight, "log_decay": log_decay}
    _check_scan(v, beta, causal, initial_state, return_state, normalize, per_channel, free_values)
    dtype = compute_dtype(log_weight, v, log_decay)
    _check_state(initial_state, v, _cells((v.shape[0],), v, free_values, beta), dtype)
    check_values("log_decay", log_decay, DECAY, key_mask)
    check_values("log_weight", log_weight, LOG_WEIGHT, key_mask)
    op = partial(channel_scan.channel_scan_read, log_weight, v, beta, log_decay, free_values)
    found = _scan(op, v, causal, key_mask, segment_ids, initial_state, return_state, normalize, backend)
    if not return_state:
        return found
    read, state = found  # a channel remembers what it has read, and a caller may change that
    return read, ScanState({name: x.clone() for name, x in state.memory.items()}, state.cache_position)


def keyed_scan_read(
    q: Float[Tensor, "b t h dk"],
    k: Float[Tensor, "b t h dk"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    log_decay: Float[Tensor, "b t h"] | Float[Tensor, "b t h dk"] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: ScanState | None = None,
    return_state: bool = False,
    normalize: bool = True,
    backend: str = "auto",
    free_values: Float[Tensor, "b t h df"] | None = None,
) -> Read | tuple[Read, ScanState]:
    """The mean of values v and the free energy of values f under linear attention, gated by a decay where there is one.

        s_t(i) = sum_c q_tc exp(sum_{i<r<=t} log_decay_rc) k_ic        p_t(i) = s_t(i) / sum_r s_t(r)
        mean_tj = sum_i p_t(i) v_ij        F_tj = (1 / beta_j) log sum_i p_t(i) exp(beta_j f_ij)         (Eq. 4, App. H)

    q, k (B, T, H, d_k) >= 0 are features already. v (B, T, H, d_v), f = free_values (B, T, H, d_f), beta (H, d_f) are
    those of `channel_scan_read`.
    log_decay <= 0 in nats, the decay into step t: (B, T, H), or (B, T, H, d_k) for one per key channel.
    Masks, documents, causal=False, states and normalize=False are those of `channel_scan_read`.
    Exact for any finite input, in time O(T d_k d_v) and memory O(T (d_k + d_v)). A row of no weight reads 0.
    Raises ValueError on shapes and values, TypeError on dtypes.
    """
    _check_scan(v, beta, causal, initial_state, return_state, normalize, {}, free_values)
    _check_projections(q, k, v, free_values)
    if q.shape != k.shape:
        raise ValueError(f"q and k must have one shape, got {tuple(q.shape)} and {tuple(k.shape)}.")
    if log_decay is not None:
        check_floating("v", v, log_decay=log_decay)
        if log_decay.shape not in (q.shape[:3], q.shape):
            raise ValueError(
                f"log_decay must have shape (batch, time, heads) = {tuple(q.shape[:3])} or that of q, "
                f"{tuple(q.shape)}, got {tuple(log_decay.shape)}."
            )
    kept = (q.shape[0], *q.shape[2:])
    memory = {"log_weight": kept, "mean": (*kept, v.shape[3])}
    memory |= {} if beta is None else {"free_energy": (*kept, beta.shape[1])}
    _check_state(initial_state, v, memory, compute_dtype(q, k, v, log_decay))
    check_values("log_decay", log_decay, DECAY, key_mask)
    for name, tensor in (("q", q), ("k", k)):
        check_values(name, tensor, FEATURE, key_mask)
    if log_decay is not None:  # clamp would keep the gradient where it cuts
        log_decay = upcast(log_decay).masked_fill(log_decay < LOG_ZERO, LOG_ZERO)
    op = partial(linear_attention.linear_attention_read, q, k, v, beta, log_decay, free_values)
    return _scan(op, v, causal, key_mask, segment_ids, initial_state, return_state, normalize, backend)


def ssm_read(
    delta: Float[Tensor, "b t h d"],
    A: Float[Tensor, "h d n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, "h d"],
    v: Float[Tensor, "b t h dv"],
    beta: Float[Tensor, "h df"] | None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    initial_state: ScanState | None = None,
    return_state: bool = False,
    normalize: bool = True,
    backend: str = "auto",
    free_values: Float[Tensor, "b t h df"] | None = None,
) -> Read | tuple[Read, ScanState]:
    """The mean of values v and the free energy of values f under the impulse response of a selective state space model.

        s_tj(i) = sum_n C_tn exp(sum_{i<r<=t} delta_rj A_jn) delta_ij B_in + D_j [i = t]       p = s / sum_i s
        mean_tj = sum_i p_tj(i) v_ij        F_tj = (1 / beta_j) log sum_i p_tj(i) exp(beta_j f_ij)       (Eq. 4, 32)

    that is, with state_t = exp(delta_t A) state_{t-1} + delta_t B_t x_t and y(x)_t = C_t . state_t + D x_t,
    mean = y(v) / y(1) and F = (1 / beta) log(y(e^{beta f}) / y(1)).
    v (B, T, H, d_v), f = free_values (B, T, H, d_f) and beta (H, d_f) are those of `channel_scan_read`. With d the
    number of all channels, those of v first: delta (B, T, H, d) >= 0; A (H, d, N) <= 0; B, C (B, T, N) >= 0;
    D (H, d) >= 0.
    Masks, documents, causal=False, states and normalize=False are those of `channel_scan_read`.
    Exact for any finite input, in memory O(T d_v). Raises ValueError on shapes and values, TypeError on dtypes.
    """
    _check_scan(v, beta, causal, initial_state, return_state, normalize, {"delta": delta}, free_values)
    check_floating("v", v, delta=delta, A=A, B=B, C=C, D=D)
    batch, time, heads, width = delta.shape
    rank = max(1, A.shape[-1] if A.dim() else 1)
    shapes = (heads, width, rank), (batch, time, rank), (batch, time, rank), (heads, width)
    for name, tensor, shape in zip("ABCD", (A, B, C, D), shapes):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} beside this delta and A, got {tuple(tensor.shape)}.")
    _check_state(initial_state, v, _cells((batch, rank), v, free_values, beta), compute_dtype(delta, A, B, C, D, v))
    check_values("A", A, FINITE_DECAY, None)
    check_values("D", D, WEIGHT, None)
    for name, tensor in (("delta", delta), ("B", B), ("C", C)):
        check_values(name, tensor, WEIGHT, key_mask)
    op = partial(ssm.ssm_read, delta, A, B, C, D, v, beta, free_values)
    return _scan(op, v, causal, key_mask, segment_ids, initial_state, return_state, normalize, backend)


def decay_scan(
    log_decay: Float[Tensor, "b t *c"],
    u: Float[Tensor, "b t *c"],
    initial_state: Float[Tensor, " b *c"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "b t *c"]:
    """Sums in which older terms decay.

        h_t = exp(log_decay_t) h_{t-1} + u_t        h_0 = initial_state, or 0                    (Eq. 33)

    log_decay: (B, T, C) <= 0 in nats, the decay into step t, -inf to forget all before t; u: (B, T, C);
    initial_state: (B, C). Returns h (B, T, C) in u's dtype, summed in at least fp32; the final state is h[:, -1].
    Raises ValueError on shapes, devices and values, TypeError unless all are floating-point tensors.
    """
    check_floating("u", u, u=u)
    if u.ndim < 3:
        raise ValueError(f"u must have shape (batch, time, channels), got {tuple(u.shape)}.")
    start = () if initial_state is None else (("initial_state", initial_state, u.shape[:1] + u.shape[2:]),)
    for name, tensor, shape in (("log_decay", log_decay, u.shape), *start):
        check_floating("u", u, **{name: tensor})
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)} for this u, got {tuple(tensor.shape)}.")
    check_values("log_decay", log_decay, DECAY, None)
    return decay.decay_scan(log_decay, u, initial_state, backend)


def _scan(op, v, causal, key_mask, segment_ids, initial_state, return_state, normalize, backend):
    """Run a scan, which takes `Tokens` instead of masks; its state is returned with each row's position in it."""
    tokens, cache_position = PLAIN, None
    if return_state or initial_state is not None or key_mask is not None or segment_ids is not None:
        before = None if initial_state is None else initial_state.cache_position
        tokens, cache_position = read_tokens(tuple(v.shape[:2]), v.device, key_mask, segment_ids, before, "key_mask")
    memory = None if initial_state is None else initial_state.memory
    read = op(call=ScanCall(causal, tokens, memory, return_state, normalize, backend))
    if not return_state:
        return read
    read, memory = read
    return read, ScanState(memory, cache_position)


def _check_scan(
    v, beta, causal, initial_state, return_state, normalize, per_channel: dict[str, Tensor | None], free_values
) -> None:
    check_flags(causal=causal, return_state=return_state, normalize=normalize)
    check_floating("v", v, v=v)
    if v.dim() != 4 or v.shape[2] == 0 or (v.shape[3] == 0 and free_values is None):
        raise ValueError(
            f"v must have shape (batch, time, heads, d_v), heads and d_v at least 1, got {tuple(v.shape)}."
        )
    _check_free_energy(v, beta, free_values)
    channels = v.shape[3] + (0 if free_values is None else free_values.shape[3])
    for name, tensor in per_channel.items():
        if tensor is None:
            continue
        check_floating("v", v, **{name: tensor})
        wanted = (*v.shape[:3], channels)
        if tuple(tensor.shape) != wanted:
            what = "the shape of v" if free_values is None else "one entry per channel of v and free_values"
            raise ValueError(f"{name} must have {what}, {wanted}, got {tuple(tensor.shape)}.")
    if not causal and (return_state or initial_state is not None):
        raise ValueError("causal=False reads the future, which no state holds; use causal=True with states.")


def _cells(start: tuple[int, ...], v: Tensor, free_values: Tensor | None, beta: Tensor | None) -> dict[str, tuple]:
    """The tensors of a state of what each channel has read, and their shapes, which begin with `start`."""
    of = lambda x, *names: dict.fromkeys(("log_weight", *names), (*start, *x.shape[2:]))  # noqa: E731
    if free_values is None:
        return of(v, "mean") if beta is None else of(v, "mean", "free_energy")
    pair = {"mean.": (v, "mean"), "free.": (free_values, "free_energy")}
    return {part + n: shape for part, (x, name) in pair.items() if x.shape[3] for n, shape in of(x, name).items()}


def _check_state(state: ScanState | None, v: Tensor, wanted: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Raise unless a state is of v's rows, and holds the tensors of these names and shapes, all of this dtype."""
    if state is None:
        return
    if not isinstance(state, ScanState):
        raise TypeError(f"initial_state must be the state that a scan returned, got a {type(state).__name__}.")
    position = state.cache_position.position
    if len(position) != len(v) or position.device != v.device:
        raise ValueError(
            f"initial_state belongs to a batch of {len(position)} on {position.device}, v has {len(v)} on {v.device}; "
            "pass the state returned for the same rows, or None to start anew."
        )
    described = {name: tuple(tensor.shape) for name, tensor in state.memory.items()}
    dtypes = {tensor.dtype for tensor in state.memory.values()}
    if described != wanted or dtypes != {dtype}:
        raise ValueError(
            f"initial_state must hold {wanted} in {dtype} for this read, got {described} in {dtypes}; pass the state "
            "that this read returned for inputs of these dtypes, with beta and free_values given both times or neither."
        )


def _check_free_energy(v: Tensor, beta: Tensor | None, free_values: Tensor | None) -> None:
    """Raise unless free_values fit v, and beta, of a channel each, is positive and finite where it can be read."""
    if free_values is not None:
        check_floating("v", v, free_values=free_values)
        if free_values.dim() != 4 or free_values.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"free_values must have shape (batch, time, heads, d_f) = ({', '.join(map(str, v.shape[:3]))}, any), "
                f"got {tuple(free_values.shape)}."
            )
        if beta is None:
            raise ValueError("beta must have shape (heads, d_f) where free_values are given, got None.")
        v = free_values
    if beta is None:
        return
    check_floating("v", v, beta=beta)
    if tuple(beta.shape) != tuple(v.shape[2:]):
        raise ValueError(
            f"beta must have one entry per value channel, shape (heads, d_v) = {tuple(v.shape[2:])}, "
            f"got {tuple(beta.shape)}."
        )
    if not may_look(beta):
        return
    wrong = ~((beta > 0) & (beta < torch.inf))
    if bool(wrong.any()):
        raise ValueError(
            f"beta must be positive, finite and not NaN, got {beta[wrong][0].item()}; "
            "make it so with softplus, or pass beta=None for the mean only."
        )


def _check_projections(q: Tensor, k: Tensor, v: Tensor, free_values: Tensor | None) -> None:
    check_floating("q", q, q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, time, heads, width), got shape {tuple(tensor.shape)}."
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, time and heads, got {tuple(k.shape)} and {tuple(v.shape)}.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and width, got {tuple(q.shape)} and {tuple(k.shape)}.")
    if 0 in k.shape[2:] or (free_values is None and v.shape[3] == 0):
        raise ValueError(
            f"k and v must have at least one head and one channel, got {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q must have a multiple of the heads of k, got {q.shape[2]} and {k.shape[2]}.")


def _check_bias(bias: Tensor, q: Tensor, scores: tuple[int, int, int, int]) -> None:
    if isinstance(bias, Tensor) and not bias.is_floating_point():
        raise TypeError(f"bias must be floating point, got dtype {bias.dtype}; for a mask of keys use key_mask.")
    check_floating("q", q, bias=bias)
    try:
        fits = torch.broadcast_shapes(bias.shape, scores) == torch.Size(scores)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"bias must broadcast to (batch, heads, queries, keys) = {scores}, got shape {tuple(bias.shape)}."
        )
    check_values("bias", bias, BIAS, None)
