"""How far float32 is from float64, by prior: writes research/results/checks/accuracy.{md,json}.

PYTHONPATH=tests/support:tests/ops python benchmarks/accuracy.py [calls]    # ten minutes of one core
"""

from __future__ import annotations

import math
import sys

import torch
from measure import save
from reads import excess, gradients_of, make, relative
from test_fuzz import KINDS, draw
from torch import Tensor

from fem import PRIORS, FreeEnergyMixerConfig
from fem.functional import keyed_scan_read, softmax_read
from fem.ops.common.tokens import Tokens

READS = {  # of each prior, as the tests' random calls name them
    "softmax": "softmax",
    "linear": "linear",
    "gla": "gla",
    "rnn_softmax": "aft",
    "rnn_decay": "decay",
    "mamba": "ssm",
}
BETA, TIME, WIDTH, HEADS = 2.0, 300, 16, 2
SPANS, SPIKE = (1, 10, 100, 1000), 1000.0  # nats
STREAMED, CHUNK, LAST = 100_000, 1000, 200  # tokens: of a stream, of a call in float64, compared at the end


def worst_of_random_calls(calls: int) -> tuple[dict[str, float], list[str]]:
    """Of each kind of read, the largest error of a result or gradient over what the rule of `make fuzz` allows; and
    which calls were above it."""
    worst, above = dict.fromkeys(KINDS, 0.0), []
    for seed in range(calls):
        kind = KINDS[seed % len(KINDS)]
        call, documents, marks, _ = draw(kind, seed)
        if documents:
            found = excess(call, documents, marks, seed)
            worst[kind] = max(worst[kind], *found.values())
            above += [f"{part} of `{kind}`, seed {seed}: {size:.2f}" for part, size in found.items() if size > 1]
    return worst, above


def called(read: str):
    return make(read, TIME, heads=HEADS, beta=BETA)


def errors(call, rows: slice = slice(None)) -> dict[str, float]:
    """Of mean, free energy and the worst gradient in float32, relative to the largest entry of each in float64.

    rows: whose results count; the loss is of these alone.
    """
    mine, exact = call.leaves(torch.float32), call.map(lambda x: x.float().double()).leaves(torch.float64)
    got, wanted = ([part[:, rows] for part in read] for read in (mine.read(), exact.definition()))
    cotangents = [torch.randn_like(part) for part in wanted]
    expected = gradients_of(exact, wanted, cotangents)
    found = gradients_of(mine, got, cotangents)
    worst = max(relative(found[name], expected[name], 0.1) for name in expected)
    return {"mean": relative(got[0], wanted[0]), "F": relative(got[1], wanted[1]), "gradient": worst}


def spread(read: str, span: float):
    """A call whose values cover as many nats, beta (max v - min v)."""
    call = called(read)
    v = torch.rand_like(call.arguments["v"])
    return call.set(v=v * span / call.arguments["beta"].max())


def before_a_spike(read: str) -> dict[str, float]:
    """Errors of the rows that come before a value larger by `SPIKE` nats than all others."""
    call, at = called(read), 2 * TIME // 3
    v = call.arguments["v"].clone()
    v[:, at] += SPIKE / call.arguments["beta"].min()
    return errors(call.set(v=v), slice(at))


@torch.no_grad()
def drift(name: str) -> dict[str, float]:
    """Errors of the last rows of a prior's stream, token by token in float32, against calls of many in float64.

    In units of the values' standard deviation, and of the largest mean, which is small over so many values.
    """
    torch.manual_seed(0)
    config = FreeEnergyMixerConfig(n_embd=WIDTH, n_head=HEADS, prior_type=name, use_conv=False)
    prior = PRIORS[name](config)
    features, v = torch.randn(1, STREAMED, WIDTH), torch.randn(1, STREAMED, HEADS, config.value_width)
    beta = torch.full(prior.beta_shape(config), BETA)
    got, memory, start = [], {}, 0
    while start < STREAMED:  # a cache sums nothing up before it is read, so that its earlier tokens may come together
        many = name == "softmax" and start < STREAMED - LAST
        here = slice(start, start + (min(CHUNK, STREAMED - LAST - start) if many else 1))
        read, memory = prior.read(features[:, here], v[:, here], beta, standing(here), memory)
        got.append(read if start >= STREAMED - LAST else None)
        start = here.stop
    wanted = in_float64(prior.double(), features.double(), v.double(), beta.double())
    mean, free_energy = (torch.cat(parts, 1) for parts in zip(*got[-LAST:]))
    far = {"mean": mean - wanted[0], "F": free_energy - wanted[1]}
    largest = {name: difference.abs().max().item() for name, difference in far.items()}
    return largest | {"mean over the largest": relative(mean, wanted[0])}


def in_float64(prior, features: Tensor, v: Tensor, beta: Tensor) -> list[Tensor]:
    """Mean and free energy of the last rows."""
    if prior.name == "softmax":
        q, k = prior.queries_and_keys(features, torch.arange(STREAMED))
        return list(softmax_read(q[:, -LAST:], k, v, beta))
    memory = {}
    for start in range(0, STREAMED, CHUNK):
        here = slice(start, start + CHUNK)
        read, memory = prior.read(features[:, here], v[:, here], beta, standing(here), memory)
    return [part[:, -LAST:] for part in read]


@torch.no_grad()
def drift_under_steady_keys(heads: int = 128) -> dict[str, float]:
    """How far weights of `linear` drift in a stream whose keys have constant sizes, and a read over two such keys.

    One key stands for the even tokens, whose values are 1, the other for the odd ones, whose values are -1.
    """
    torch.manual_seed(1)
    even = (torch.arange(STREAMED) % 2 == 0).float()[None, :, None, None]
    k = 3 * torch.rand(1, 1, heads, 2) * torch.cat([even, 1 - even], -1)
    v, beta = (2 * even - 1).expand(-1, -1, heads, 1), torch.full((heads, 1), BETA)
    got, state = [], None
    for t in range(STREAMED):
        here = slice(t, t + 1)
        call = torch.ones_like(k[:, here]), k[:, here], v[:, here], beta
        read, state = keyed_scan_read(*call, initial_state=state, return_state=True)
        got.append(read if t >= STREAMED - LAST else None)
    wanted, exact = keyed_scan_read(*(x.double() for x in (torch.ones_like(k), k, v, beta)), return_state=True)
    far = lambda one, other: (one - other).abs().max().item()  # noqa: E731
    mean, free_energy = (torch.cat(parts, 1) for parts in zip(*got[-LAST:]))
    weights = far(state.memory["log_weight"], exact.memory["log_weight"])
    read = {"mean": far(mean, wanted.mean[:, -LAST:]), "F": far(free_energy, wanted.free_energy[:, -LAST:])}
    return {"weights": weights} | read


def under_bfloat16(time: int = 512) -> dict[str, dict[str, float]]:
    """F's error in nats where a kernel rounds exp(scores) and e to bfloat16 and sums in float32."""
    found = {}
    for name in ("random", "peaked", "span"):
        torch.manual_seed(0)
        q, k, v = (torch.randn(4, time, 64) for _ in range(3))
        q = 8 * q if name == "peaked" else q
        nats = torch.rand_like(v) * 70 if name == "span" else BETA * v
        nats = nats - nats.amax(1, keepdim=True)
        scores = (q @ k.mT / 8).masked_fill(torch.ones(time, time).triu(1).bool(), -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = (weights.bfloat16().float() @ nats.exp().bfloat16().float()) / weights.sum(-1, keepdim=True)
        exact = weights.double() @ nats.double().exp() / weights.double().sum(-1, keepdim=True)
        error = (rounded.double().log() - exact.log())[exact > math.exp(-60)]
        found[name] = {"rms": error.square().mean().sqrt().item(), "largest": error.abs().max().item()}
    return found


def standing(here: slice) -> Tokens:
    """Tokens of one document at these positions."""
    return Tokens(None, None, None, torch.arange(here.start, here.stop))


def measured(fuzz: dict[str, float]) -> dict[str, dict]:
    results: dict[str, dict] = {name: {"drift": drift(name)} for name in PRIORS}
    for name, read in READS.items():
        torch.manual_seed(0)
        results[name]["fuzz"] = max(size for kind, size in fuzz.items() if kind.startswith(read))
        results[name]["spans"] = {span: errors(spread(read, span)) for span in SPANS}
        results[name]["before a spike"] = before_a_spike(read)
    return results


def table(results: dict[str, dict]) -> list[dict[str, str]]:
    def shown(found: dict[str, float]) -> str:
        return " / ".join(f"{found[name]:.0e}" for name in ("mean", "F", "gradient") if name in found)

    rows = []
    for name, found in results.items():
        row = {"prior": name, "random calls": f"{found['fuzz']:.2f}" if "fuzz" in found else ""}
        row |= {f"{span:,} nats": shown(found["spans"][span]) if "spans" in found else "" for span in SPANS}
        row["before a spike"] = shown(found["before a spike"]) if "before a spike" in found else ""
        rows.append(row | {f"after {STREAMED:,} tokens": shown(found["drift"])})
    return rows


NOTE = """Errors in float32, of the mean / of F / of the worst gradient, relative to the largest entry of each.

* **random calls**: the worst of {calls:,} calls of all kinds of reads, over what the rule allows: twice the error of
  the plain form (1/beta) log sum p exp(beta v) in the same dtype, or 16 eps (1 + max |v|). Below 1 it holds. Values,
  sizes, masks, documents, chunks and dtypes are drawn, beta from 1e-6 to 10, spikes up to 1,000. Above 1: {above}.
* **1 to 1,000 nats**: values that cover beta (max v - min v), T {time}, against a table of all scores in float64.
* **before a spike**: the {before} rows before a value {spike:,.0f} nats above all others; gradients of these rows.
* **after {tokens:,} tokens**: the mean / F of the last {last} rows of a stream, read token by token, against float64,
  in units of the values' standard deviation. Means of so many values are small: over the largest of them, the error
  of `linear` is {linear:.1e}. The cache of `softmax` sums nothing up: its earlier tokens come in calls of 1,000.

A stream of a scan rounds the logarithm of its weights once a token. Keys of constant sizes are rounded alike every
time: weights of `linear` drifted by up to {weights:.1e} then, and what two such keys read, of which each stands for
half of the tokens, by {mean:.1e} of its mean and {F:.1e} of F, for values of 1 and -1. `mamba_interactive` mixes what
`mamba` reads; its stream alone is measured."""


def main() -> None:
    torch.set_num_threads(1)
    calls = int(sys.argv[1]) if sys.argv[1:] else 1100
    fuzz, above = worst_of_random_calls(calls)
    results, steady = measured(fuzz), drift_under_steady_keys()
    facts = {"calls": calls, "time": TIME, "before": 2 * TIME // 3, "spike": SPIKE, "tokens": STREAMED, "last": LAST}
    facts |= {"above": "; ".join(above) or "none", "linear": results["linear"]["drift"]["mean over the largest"]}
    found = {"priors": results, "steady keys": steady, "random calls above the rule": above}
    found["bfloat16"] = under_bfloat16()
    save("research/results/checks/accuracy", "Accuracy by prior", found, table(results), NOTE.format(**facts, **steady))


if __name__ == "__main__":
    main()
