"""Every read with random inputs, its definition as a table of all scores, and the rule for its errors."""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem import FreeEnergyMixerConfig, functional
from fem.ops.common.tokens import read_tokens
from fem.priors.softmax import SoftmaxPrior

KEYED = ("linear", "gla", "gla by channel")
RECURRENT = ("aft", "decay", "aft with decay", "ssm")
SCANS = (*KEYED, *RECURRENT)
SOFTMAX = ("softmax", "softmax by blocks", "softmax by window", "softmax with bias")
READS = (*SOFTMAX, *SCANS)
SHARED = ("beta", "A", "D")  # arguments without a time dimension
FEATURES = ("q", "k", "delta", "B", "C", "D")  # of scans: they enter as logarithms, and theirs are judged


class Given(SoftmaxPrior):
    """The softmax prior with queries and keys in the place of features: its cache reads a stream."""

    def queries_and_keys(self, features, position):
        return features


@dataclass(frozen=True)
class Call:
    """A public read and its arguments by name, those that say what a row may see or how it is computed in `rules`."""

    op: str
    arguments: dict[str, Tensor | None]
    rules: dict = field(default_factory=dict)
    place: Tensor | None = None  # of the tokens in the row from which `at` took them

    @property
    def softmax(self) -> bool:
        return self.op == "softmax_read"

    @property
    def causal(self) -> bool:
        return self.rules.get("causal", True)

    @property
    def along(self) -> dict[str, Tensor]:
        """The arguments with a time dimension."""
        return {n: x for n, x in self.arguments.items() if x is not None and n not in SHARED}

    def tensors(self) -> list[Tensor]:
        return [x for x in self.arguments.values() if x is not None]

    def map(self, change) -> Call:
        return replace(self, arguments={n: None if x is None else change(x) for n, x in self.arguments.items()})

    def set(self, **tensors: Tensor) -> Call:
        return replace(self, arguments=self.arguments | tensors)

    def spiked(self, size: float, at: int) -> Call:
        """The call whose values, those of free energies too, are so much larger at a token."""
        values = {n: x.clone() for n, x in self.along.items() if n in ("v", "free_values")}
        for x in values.values():
            x[:, at] += size
        return self.set(**values)

    def leaves(self, dtype: torch.dtype | None = None) -> Call:
        return self.map(lambda x: x.detach().to(dtype or x.dtype).clone().requires_grad_())

    def at(self, tokens) -> Call:
        """The call of some tokens alone; a window still counts them as they stood."""
        cut = lambda n, x: x[:, tokens][:, :, tokens] if n == "bias" else x[:, tokens]  # noqa: E731
        kept = self.arguments | {n: cut(n, x) for n, x in self.along.items()}
        time = self.arguments["v"].shape[1]
        return replace(self, arguments=kept, place=torch.arange(time)[tokens])

    def read(self, **options):
        return getattr(functional, self.op)(**self.arguments, **self.rules | options)

    def in_pieces(self, *sizes: int, **marks: Tensor):
        """The joined reads of pieces: of a scan each from the state before, of softmax over the keys so far."""
        return self.with_state(*sizes, **marks)[0]

    def with_state(self, *sizes: int, **marks: Tensor):
        """The same, and a scan's state after the last piece."""
        reads, state, first = [], None, 0
        for size in sizes:
            piece = slice(first, first + size)
            if self.softmax:
                keys = slice(piece.stop if self.causal else None)
                part = {n: x if n == "bias" else x[:, piece if n == "q" else keys] for n, x in self.along.items()}
                if "bias" in part:
                    part["bias"] = part["bias"][:, piece, keys]
                read = self.set(**part).read(**{n: mark[:, keys] for n, mark in marks.items()})
            else:
                here = {n: mark[:, piece] for n, mark in marks.items()}
                read, state = self.at(piece).read(initial_state=state, return_state=True, **here)
            reads.append(read)
            first += size
        return functional.Read(*(None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*reads))), state

    def streamed(self, *sizes: int, key_mask=None, segment_ids=None):
        """The causal softmax read by the cache that a layer keeps."""
        q, k, v, f, beta = (self.arguments.get(n) for n in ("q", "k", "v", "free_values", "beta"))
        heads = {"n_embd": 8 * q.shape[2], "n_head": q.shape[2], "n_kv_head": k.shape[2]}
        prior = Given(FreeEnergyMixerConfig(**heads, window=self.rules.get("window"), use_rope=False))
        memory, cache_position, reads, first = {}, None, [], 0
        for size in sizes:
            piece = slice(first, first + size)
            marks = (None if mark is None else mark[:, piece] for mark in (key_mask, segment_ids))
            tokens, cache_position = read_tokens((len(v), size), v.device, *marks, cache_position, "key_mask")
            free = None if f is None else f[:, piece]
            read, memory = prior.read((q[:, piece], k[:, piece]), v[:, piece], beta, tokens, memory, free)
            reads.append(read)
            first += size
        return functional.Read(*(torch.cat(parts, 1) for parts in zip(*reads)))

    def definition(self):
        """The read from a table of all log-scores, in the dtype of the inputs; a row that sees nothing reads 0."""
        v, beta, f = (self.arguments.get(n) for n in ("v", "beta", "free_values"))
        log_p, time = self._scores(), v.shape[1]
        groups = self.arguments["q"].shape[2] // v.shape[2] if self.softmax else 1
        v, f, beta = (x.repeat_interleave(groups, -2) for x in (v, v if f is None else f, beta))
        place = torch.arange(time) if self.place is None else self.place
        away, window = place[:, None] - place, self.rules.get("window")
        seen = (away >= 0) if self.causal else torch.ones_like(away, dtype=torch.bool)
        seen &= torch.ones_like(seen) if window is None else away.abs() < window
        seen = seen[None, :, :, None, None] & (log_p.detach() > -torch.inf)
        empty = ~seen.any(2, keepdim=True)
        log_p = torch.where(seen, log_p, -torch.inf).masked_fill(empty, 0.0)
        channels = lambda x: (x, x) if x.shape[-1] == 1 else (x[..., : v.shape[3]], x[..., x.shape[-1] - f.shape[3] :])  # noqa: E731
        first, last = channels(log_p)
        if self.rules.get("normalize", True):
            mean = (first.log_softmax(2).exp() * v.unsqueeze(1)).sum(2)
            free_energy = free_energy_of(last.log_softmax(2), f.unsqueeze(1), beta)
        else:
            mean = (first.exp() * v.unsqueeze(1)).sum(2)
            free_energy = (last + beta * f.unsqueeze(1)).logsumexp(2) / beta
        blind = channels(empty[:, :, 0])
        return functional.Read(*map(torch.Tensor.masked_fill, (mean, free_energy), blind, (0.0, 0.0)))

    def _scores(self) -> Tensor:
        """log s_t(i), (B, T, T, H, channels or 1)."""
        given, sides = self.arguments, 1 if self.causal else 2
        if self.softmax:
            k = given["k"].repeat_interleave(given["q"].shape[2] // given["k"].shape[2], 2)
            scores = (given["q"].unsqueeze(2) * k.unsqueeze(1)).sum(-1) * k.shape[-1] ** -0.5
            scores = scores if given.get("bias") is None else scores + given["bias"].permute(1, 2, 0)
            return scores.unsqueeze(-1)
        if self.op == "keyed_scan_read":
            scores = given["q"].log().unsqueeze(2) + given["k"].log().unsqueeze(1)
            if (decay := given["log_decay"]) is not None:
                scores = scores + between(decay if decay.ndim == 4 else decay.unsqueeze(-1), sides)
            return scores.logsumexp(-1, keepdim=True)
        if self.op == "channel_scan_read":
            weight, decay, time = given["log_weight"], given["log_decay"], given["v"].shape[1]
            scores = 0.0 if weight is None else weight.unsqueeze(1).expand(-1, time, -1, -1, -1)
            return scores if decay is None else scores + between(decay, sides)
        delta, B, C = given["delta"], given["B"], given["C"]
        scores = between(delta.unsqueeze(-1) * given["A"], sides) + delta.log().unsqueeze(1).unsqueeze(-1)
        scores = (scores + B.log()[:, None, :, None, None] + C.log()[:, :, None, None, None]).logsumexp(-1)
        itself = torch.eye(delta.shape[1], dtype=torch.bool)[None, :, :, None, None]
        return torch.logaddexp(scores, torch.where(itself, given["D"].log(), -torch.inf))

    def largest_score(self) -> float:
        """Of softmax, at most."""
        q, k = (self.arguments[name].detach().norm(dim=-1).amax().item() for name in "qk")
        return q * k * self.arguments["q"].shape[-1] ** -0.5


def free_energy_of(log_p: Tensor, f: Tensor, beta: Tensor) -> Tensor:
    """Along dim 2: of e^z - 1 where z = beta (f - mean) is small, so that F keeps its digits."""
    p = log_p.exp()
    mean = (p * f).sum(2)
    z = beta * (f - mean.detach().unsqueeze(2))
    near = torch.log1p((p * torch.expm1(z.clamp(max=1))).sum(2)) / beta + mean.detach()
    far = (log_p + beta * f).logsumexp(2) / beta
    return torch.where(((z.abs() < 1) | (p == 0)).all(2), near, far)


def between(decay: Tensor, sides: int) -> Tensor:
    """At (t, i) sum_{i<r<=t} decay_r, of both sides sum_{t<=r<i} as well: summed, not subtracted."""
    time = decay.shape[1]
    later = torch.ones(time, time, dtype=torch.bool).tril(-1).view(1, time, time, *(1,) * (decay.ndim - 2))
    past = torch.where(later, decay.unsqueeze(2), 0).cumsum(1)
    return past if sides == 1 else past + between(decay.flip(1), 1).flip(1, 2)


def make(
    name: str,
    time: int,
    batch=1,
    heads=2,
    groups=1,
    width=3,
    keys=3,
    rank=2,
    beta=2.0,
    spread=1.0,
    weights=2.0,
    decay=0.1,
    bias=0.3,
    free=None,
    dtype=torch.float32,
    **rules,
) -> Call:
    """Values of that spread, log-weights or scores of that size, decays of that many nats a token.

    free: how many values of their own have a free energy; None: all have. bias: the share of pairs that one forbids.
    groups: of the heads of a softmax read have one key head each. Numbers are drawn in float64: those of other dtypes
    are these, rounded.
    """
    normal = lambda *shape: torch.randn(batch, time, *shape, dtype=torch.float64)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, dtype=torch.float64)  # noqa: E731
    falls = lambda *shape: -2 * decay * uniform(batch, time, *shape)  # noqa: E731
    channels, of_free = width + (free or 0), width if free is None else free
    kv = heads // groups
    values = {"v": spread * normal(kv, width), "beta": beta * (0.5 + uniform(kv, of_free))}
    if free is not None:
        values["free_values"] = spread * normal(kv, free)
    if name in SOFTMAX:
        q, k = normal(heads, keys), normal(kv, keys)
        if q.numel():
            q = q * (weights / (q.norm(dim=-1).amax() * k.norm(dim=-1).amax() * keys**-0.5))
        op, arguments = "softmax_read", {"q": q, "k": k}
        if name == "softmax with bias":
            forbidden = uniform(heads, time, time) < bias
            arguments["bias"] = torch.randn(heads, time, time, dtype=torch.float64).masked_fill(forbidden, -torch.inf)
        if name == "softmax by window":
            rules = {"window": 5} | rules
        if name == "softmax by blocks":
            rules = {"backend": "plain"} | rules
    elif name in KEYED:
        fall = {"linear": None, "gla": (heads,), "gla by channel": (heads, keys)}[name]
        features = {n: (weights / 2 * normal(heads, keys)).exp() for n in "qk"}
        op, arguments = "keyed_scan_read", features | {"log_decay": None if fall is None else falls(*fall)}
    elif name == "ssm":
        positive = lambda x: softplus(x) + 1e-3  # noqa: E731
        rates = -10 * decay * softplus(torch.randn(heads, channels, rank, dtype=torch.float64))
        skip = positive(torch.randn(heads, channels, dtype=torch.float64))
        op, arguments = "ssm_read", {"delta": positive(normal(heads, channels)), "A": rates, "D": skip}
        arguments |= {"B": positive(normal(rank)), "C": positive(normal(rank))}
    else:
        weight = None if name == "decay" else weights * normal(heads, channels)
        op, arguments = "channel_scan_read", {"log_weight": weight}
        arguments["log_decay"] = None if name == "aft" else falls(heads, channels)
    return Call(op, arguments | values, rules).map(lambda x: x.to(dtype))


LAYOUTS = {
    "time innermost": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "axes reversed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "one channel expanded": lambda x: x[..., :1].expand(x.shape),
    "one token expanded": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (1,) * x.dim()),
}
KEEPS_VALUES = list(LAYOUTS)[:4]


def gradients_of(call: Call, read, cotangents) -> dict[str, Tensor]:
    names = [n for n, x in call.arguments.items() if x is not None]
    loss = sum((part.double() * c).sum() for part, c in zip(read, cotangents))
    return dict(zip(names, torch.autograd.grad(loss, call.tensors(), retain_graph=True, materialize_grads=True)))


def beside_float64(call: Call, of_mean=torch.randn_like, of_f=torch.randn_like, definition=Call.definition):
    """A read and its definition in float64, and the gradients of both, for cotangents that are made of the results."""
    mine, exact = call.leaves(), call.leaves(torch.float64)
    read, wanted = mine.read(), definition(exact)
    cotangents = [of_mean(wanted.mean), of_f(wanted.free_energy)]
    return read, wanted, gradients_of(mine, read, cotangents), gradients_of(exact, wanted, cotangents)


def relative(got: Tensor, wanted: Tensor, least: float = 1e-30) -> float:
    """The largest error in units of the largest entry, or of `least` where all entries are smaller."""
    wanted = wanted.double()
    return ((got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(least)).item()


def documents_of(key_mask: Tensor, segment_ids: Tensor) -> list[Tensor]:
    """The kept tokens of every document of one row: a new one begins where the id of the kept tokens changes."""
    kept = torch.nonzero(key_mask)[:, 0]
    number = torch.nn.functional.pad(segment_ids[kept].diff() != 0, (1, 0)).cumsum(0)[: len(kept)]
    return [kept[number == n] for n in number.unique()]


def pieces(time: int, seed: int) -> list[int]:
    """Sizes that add up, of two pieces at least."""
    choose, sizes = random.Random(seed), []
    while sum(sizes) < time:
        some = [size for size in (1, 1, 2, 16, 63, 64, 100) if size < max(2, time)]
        sizes.append(min(choose.choice(some), time - sum(sizes)))
    return sizes


def by_definition(call: Call, documents: list[Tensor]) -> list[Tensor]:
    """The reads of the kept tokens, every document apart: what masking and packing mean."""
    reads = [call.at(tokens).definition() for tokens in documents]
    return [torch.cat(parts, 1) for parts in zip(*reads)]


def of_one_query(q, k, v, f, beta, mask, scale):
    """In float64, the reads of queries (B, H, d) over a cache (B, H, T, .), with a mask or bias (B or 1, H or 1, T)."""
    (q, beta), (k, v, f) = (x.double() for x in (q, beta)), (x.double().transpose(1, 2) for x in (k, v, f))
    how = {"scale": scale, "free_values": f, "bias": None if mask is None else mask.double()[:, :, None]}
    return functional.softmax_read(q[:, None], k, v, beta, **how, backend="reference")


@contextmanager
def flushed():
    """Numbers below 1e-38 become 0, as on a GPU."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush small numbers to zero")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def draw_for_kernels(name, time, dtype=torch.float32, **options):
    """Values in the dtype, everything else in float32; equal calls are equal."""
    torch.manual_seed(0)
    call = make(name, time, batch=2, **{"width": 4, "weights": 1.0} | options)
    return call.set(**{n: x.to(dtype) for n, x in call.along.items() if n in ("v", "free_values")})


def errors(call, backends, sizes=None, **marks):
    """Of each result and gradient by the last backend, and of those by the one before it, relative to its norm."""
    results = []
    for name, dtype in backends:
        mine = replace(call.leaves(dtype), rules=call.rules | {"backend": name})
        read, state = (mine.read(**marks), None) if sizes is None else mine.with_state(*sizes, **marks)
        read = [*read, *(state.memory.values() if state else ())]
        torch.manual_seed(1)
        cotangents = [torch.randn(x.shape) for x in read]
        results.append([*read, *gradients_of(mine, read, cotangents).values()])
    for exact, other, one in zip(*results, strict=True):
        yield (*((x.double() - exact).norm() / exact.norm().clamp_min(1e-3) for x in (one, other)),)


def check(call, limit, exact="reference", sizes=None, **marks):
    """The kernels err by at most twice what the plain form does, or `limit` of the norm."""
    backends = ((exact, torch.float64), ("plain", None), ("triton", None))
    for error, floor in errors(call, backends, sizes, **marks):
        assert error <= max(2 * floor, limit), (error, floor)


def excess(call: Call, documents: list[Tensor], marks: dict[str, Tensor], seed: int = 0) -> dict[str, float]:
    """Errors of reads and gradients over what is allowed: twice the plain form's, or 16 eps (1 + max|v|).

    Of one read in every form: whole and in pieces, with and without gradients, and as a layer's cache streams it.
    In chunks twice that: states are rounded where they are handed on, and so are the gradients that come back by them.
    Scores of softmax beyond 16 cost what rounding them in float32 does, and its dbeta may err by 16 times as much. In
    float64, which no wider type helps, 1e-11 (1 + max|v|), and F and gradients that over beta where beta < 1.
    """
    dtype = call.arguments["v"].dtype
    exact, mine, plain = call.leaves(torch.float64), call.leaves(), call.leaves()
    wanted, other = by_definition(exact, documents), by_definition(plain, documents)
    rows = torch.cat(documents)
    values = [x.double().abs().max().item() for n, x in call.along.items() if n in ("v", "free_values") and x.numel()]
    largest, softmax = max(values), call.softmax
    score = exact.largest_score() if softmax else 0.0
    floor = max(16 * torch.finfo(dtype).eps, score * torch.finfo(torch.float32).eps) * (1 + largest)
    of_mean = floor
    if dtype == torch.float64:
        of_mean = 1e-11 * (1 + largest)
        betas = exact.arguments["beta"]
        floor = of_mean / min(1.0, betas.min().item() if betas.numel() else 1.0)
    cotangents = [torch.randn_like(part) for part in wanted]
    expected = gradients_of(exact, wanted, cotangents)
    of_plain = gradients_of(plain, other, cotangents)

    def over(how, got, want, theirs, floor=floor, unit=1.0):
        if not want.numel():
            return 0.0
        got, want, theirs = (x.double() * unit for x in (got, want, theirs))
        scale = max(1.0, want.abs().max().item())
        error, theirs = ((x - want).abs().max().item() for x in (got, theirs))
        allowed = max(2 * theirs if math.isfinite(theirs) else 0.0, floor * scale) * (2 if how == "chunks" else 1)
        return error / allowed if math.isfinite(error) else math.inf

    cut, whole = pieces(call.arguments["v"].shape[1], seed), not call.causal
    in_chunks = (call.causal or not (call.rules.get("window") or marks)) if softmax else call.causal
    with torch.no_grad():
        reads = {"no gradient": call.read(**marks)}
        if in_chunks:
            reads["no gradient, one by one"] = call.in_pieces(*cut, **marks)
        if softmax and not whole and call.arguments.get("bias") is None:
            reads["streamed"] = call.streamed(*cut, **marks)
    reads["whole"] = mine.read(**marks)
    if in_chunks:
        reads["chunks"] = mine.in_pieces(*cut, **marks)
    found = {}
    sizes = {n: max(1.0, exact.arguments[n].abs().max().item()) for n in "qk"} if softmax else {}
    units = {"q": sizes.get("k", 1.0), "k": sizes.get("q", 1.0)}  # of which gradients of scores are sums
    units |= {"beta": 16.0} if softmax else {}  # a difference of nearly equal sums
    for how, read in reads.items():
        for part, got, want, theirs in zip(("mean", "F"), read, wanted, other):
            assert got.dtype == dtype
            found[f"{part}, {how}"] = over(how, got[:, rows], want, theirs, of_mean if part == "mean" else floor)
        if how in ("whole", "chunks"):
            gradients = gradients_of(mine, [part[:, rows] for part in read], cotangents)
            for part, gradient in gradients.items():
                logarithm = part == "beta" or (part in FEATURES and not softmax)
                unit = exact.arguments[part].detach() if logarithm else 1.0
                allowed = floor * units.get(part, 1.0)
                found[f"d{part}, {how}"] = over(how, gradient, expected[part], of_plain[part], allowed, unit)
    return found
