"""The linear-time priors on one CPU thread: how a train step grows with T, against the formulas they replace.

python benchmarks/scans_cpu.py            # writes runs/scans_cpu.{json,md}
python benchmarks/scans_cpu.py split      # split values against the prior alone: runs/scans_split.{json,md}
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from measure import save

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
from fem.functional import channel_scan_read
from fem.ops.common.read import Read
from fem_research.common.measure import Step, alternate, cpu_growth, in_fresh_process

WIDTH, HEADS = 256, 4
SHORT, LONG = 1024, 8192
SECONDS, CPU = 5.0, torch.device("cpu")
LINEAR = [name for name in PRIORS if name != "softmax"]


def train_step(name: str, length: int):
    torch.manual_seed(0)
    config = FreeEnergyMixerConfig.matched(n_embd=WIDTH, n_head=HEADS, prior_type=name, use_conv=False)
    layer, x = FreeEnergyMixer(config), torch.randn(1, length, WIDTH)

    def step():
        layer.zero_grad(set_to_none=True)
        layer(x).square().sum().backward()

    return step


def train_growth(train_step: Callable[[str, int], Step], name: str, length: int) -> int | None:
    """Bytes of memory that a train step adds, after a short one that loads all code."""
    torch.set_num_threads(1)
    train_step(name, 64)()
    return cpu_growth(train_step(name, length))


def state_bytes(name: str) -> int:
    config = FreeEnergyMixerConfig.matched(n_embd=WIDTH, n_head=HEADS, prior_type=name, use_conv=False)
    return FreeEnergyMixer(config)(torch.randn(1, 16, WIDTH), return_state=True)[1].nbytes


def streamed(name: str, chunk: int = 100, chunks: int = 1000) -> tuple[float, float]:
    """Median CPU seconds of a chunk at the start and at the end of 100,000 tokens."""
    config = FreeEnergyMixerConfig.matched(n_embd=WIDTH, n_head=HEADS, prior_type=name)
    layer, state, seconds = FreeEnergyMixer(config), None, []
    for _ in range(chunks):
        x = torch.randn(1, chunk, WIDTH)
        start = time.process_time()
        with torch.no_grad():
            _, state = layer(x, state=state, return_state=True)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1 : chunks // 10]), statistics.median(seconds[-chunks // 10 :])


def growth() -> tuple[dict, list[dict]]:
    results, rows = {}, []
    for name in LINEAR:
        seconds = alternate({t: train_step(name, t) for t in (SHORT, LONG)}, SECONDS, CPU)
        memory = {t: in_fresh_process(train_growth, train_step, name, t) for t in (SHORT, LONG)}
        first, last = streamed(name)
        results[name] = {
            "train_s": seconds,
            "train_extra_bytes": memory,
            "state_bytes": state_bytes(name),
            "streamed_chunk_s": {"first": first, "last": last},
        }
        rows.append(
            {
                "prior": name,
                f"train step T={SHORT}, ms": f"{1e3 * seconds[SHORT]:.0f}",
                f"T={LONG}, ms": f"{1e3 * seconds[LONG]:.0f}",
                "time ratio (8 is linear)": f"{seconds[LONG] / seconds[SHORT]:.1f}",
                f"extra memory T={LONG}, MiB": f"{memory[LONG] / 2**20:.0f}",
                "memory ratio": f"{memory[LONG] / memory[SHORT]:.1f}",
                "state, bytes": f"{results[name]['state_bytes']:,}",
                "chunk of 100 tokens, first / last of 100k, ms": f"{1e3 * first:.1f} / {1e3 * last:.1f}",
            }
        )
    return results, rows


def materialised_gla(q, k, v, beta, decay):
    """GLA's read with all T states in memory, as cumulative sums scaled by the accumulated decay."""
    envelope = decay.cumsum(1)
    keys = k * (-envelope)[..., None].exp()
    mix = torch.cat([v, (beta * v).exp(), torch.ones_like(v[..., :1])], -1)
    states = (keys[..., :, None] * mix[..., None, :]).cumsum(1)
    out = torch.einsum("bthk,bthkd->bthd", q * envelope[..., None].exp(), states)
    mean, e, z = out.split([v.shape[-1], v.shape[-1], 1], -1)
    return mean / z, (e / z).log() / beta


class MaterialisedGLA(FreeEnergyMixer):
    """The same layer, whose read is `materialised_gla`."""

    def _read(self, features, v, tokens, memory):
        prior = self.prior
        q, k = (prior._feature_map(projection(features), tokens) for projection in (prior.query, prior.key))
        return Read(*materialised_gla(q, k, v, self.beta(), prior.log_decay(features))), None


def against_materialised() -> dict[str, float]:
    config = FreeEnergyMixerConfig(n_embd=512, n_head=8, prior_type="gla", use_conv=False)
    x, steps = torch.randn(1, 2048, 512), {}
    for name, kind in (("chunked", FreeEnergyMixer), ("materialised", MaterialisedGLA)):
        layer = kind(config)
        steps[name] = lambda layer=layer: layer(x).square().sum().backward()
    return alternate(steps, SECONDS, CPU)


def against_cumulative_sums() -> dict[str, float]:
    """Forward and backward of the AFT read, and of its formula: exp(k - max), two cumulative sums and a division."""
    shape = (1, 2048, HEADS, WIDTH // HEADS)
    k, v = (torch.randn(shape, requires_grad=True) for _ in range(2))
    decay = (-torch.rand(shape)).requires_grad_()
    beta = torch.full(shape[2:], 2.0)

    def cumulative(log_weight):
        weight = (log_weight - log_weight.amax(1, keepdim=True)).exp()
        z = weight.cumsum(1)
        return (weight * v).cumsum(1) / z, ((weight * (beta * v).exp()).cumsum(1) / z).log() / beta

    back = lambda read: (read[0].sum() + read[1].sum()).backward()  # noqa: E731
    return alternate(
        {
            "rnn_softmax": lambda: back(channel_scan_read(k, v, beta)),
            "rnn_softmax by cumulative sums": lambda: back(cumulative(k)),
            "rnn_decay": lambda: back(channel_scan_read(None, v, beta, decay)),
            "rnn_decay by cumulative sums": lambda: back(cumulative(-decay.cumsum(1))),
        },
        SECONDS,
        CPU,
    )


def split_and_alone(name: str) -> dict[str, FreeEnergyMixer]:
    """The prior as it was published, without any part of FEM, and with split values; of equal linear weights."""
    off = dict.fromkeys(("use_conv", "use_lse", "use_temperature", "use_outer_gate"), False)
    fields = {"n_embd": WIDTH, "n_head": HEADS, "prior_type": name}
    raw = {"normalize": False} if name in ("gla", "mamba") else {}
    alone, split = FreeEnergyMixerConfig.matched(**fields, **off, **raw), FreeEnergyMixerConfig.split(**fields)
    return {"alone": FreeEnergyMixer(alone), "split": FreeEnergyMixer(split)}


def train_steps(layers: dict[str, FreeEnergyMixer], length: int) -> dict[str, float]:
    x = torch.randn(1, length, WIDTH)
    steps = {kind: lambda layer=layer: layer(x).square().sum().backward() for kind, layer in layers.items()}
    return alternate(steps, SECONDS, CPU)


def split_against_alone() -> None:
    """Time of a train step and bytes of the state of split values, over those of the prior alone."""
    results, rows = {}, []
    for name in (name for name in LINEAR if PRIORS[name].takes_pairs):
        layers = split_and_alone(name)
        taken = {length: train_steps(layers, length) for length in (SHORT, 4 * SHORT)}
        x = torch.randn(1, 16, WIDTH)
        state = {kind: layer(x, return_state=True)[1].nbytes for kind, layer in layers.items()}
        results[name] = {"train_s": taken, "state_bytes": state}
        ratio = lambda of: f"{of['split'] / of['alone']:.2f}"  # noqa: E731
        row = {f"train step T={t}, ms, and ratio": f"{1e3 * of['split']:.0f}, {ratio(of)}" for t, of in taken.items()}
        rows.append({"prior": name, **row, "state, bytes, and ratio": f"{state['split']:,}, {ratio(state)}"})
    note = (
        "A layer with split values (`FreeEnergyMixerConfig.split`: half of a head's channels read F, the others the "
        "mean; an outer gate of rank D / 16; no conditioner) against the prior alone, GLA and Mamba unnormalised as "
        f"they were published. Equal linear weights, batch 1, width {WIDTH}, {HEADS} heads, fp32; process CPU time of "
        "one thread, medians of steps in turn, on a machine that ran other programs."
    )
    save("runs/scans_split", "Split values under linear-time priors, on a CPU", results, rows, note)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["split"]:
        split_against_alone()
        return
    results, rows = growth()
    gla, sums = against_materialised(), against_cumulative_sums()
    results |= {"gla_against_materialised_s": gla, "against_cumulative_sums_s": sums}
    ratio = lambda name: f"{sums[name] / sums[name + ' by cumulative sums']:.2f}"  # noqa: E731
    slowest = max(float(row["time ratio (8 is linear)"]) for row in rows)
    note = (
        f"Every prior takes linear time: {LONG // SHORT} times the tokens take at most {slowest} times as long, and a "
        "chunk after 100,000 tokens takes what the first does.\n\n"
        f"Batch 1, width {WIDTH}, {HEADS} heads, fp32, without the conditioner; process CPU time of one thread, "
        "medians of alternating runs. State: what a layer keeps from token to token, for one sequence.\n\n"
        f"A `gla` layer (width 512, 8 heads, T 2048) trains {gla['materialised'] / gla['chunked']:.1f}x faster than "
        "the same layer with its states materialised. Against exp, two cumulative sums and a division for mean and "
        "free energy (inexact: it underflows and leaks the future), the exact read takes "
        f"{ratio('rnn_softmax')} of the time for `rnn_softmax` and {ratio('rnn_decay')} for `rnn_decay`."
    )
    save("runs/scans_cpu", "Linear-time priors on a CPU", results, rows, note)


if __name__ == "__main__":
    main()
