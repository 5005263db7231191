"""Every measured number of the README, and of the FAQ's sections of figures, is drawn here from what the results pages
keep beside them as JSON. A number that no claim below covers fails: add the claim, with the key that holds it."""

import math
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import mean

import torch
from said import MEASURED, level_at, results
from said_language import on_three_seeds
from said_tasks import pooled

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem_research.common.paired import shown

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "figures"))

import language as figures  # noqa: E402

NOT_MEASURED = ("Python 3.10", "Apache-2.0")
FAQ = (
    *("When should I not use FEM?", "Which parts do I need?", "Which prior should I take?"),
    *("How large is the state?", "What runs where?"),
)

WIDE = "ablate_512_time"
DOUBLED, DOUBLE = "regimes_double_peak", "softmax/double/h64/norope"
WIDE_RUN = "regimes_peak64_seeds"
TRAINED = "attention+LTG"  # FEM in a model that was trained without it


def slim_lead() -> str:
    """Of slim FEM over attention with 16M tokens, on three seeds."""
    paired = results("ablate_16m_seeds")["ablate"]["full/r8"]["below attention, paired"]
    return paired.removeprefix("+").replace("0.", ".")


def score(task: str, mixer: str, page: str = "regimes") -> float:
    return mean(results(page)["regimes"][task][mixer]["test"])


def loss(page: str, row: str) -> float:
    return results(page)["ablate"][row]["loss"]


def losses(page: str) -> dict[str, float]:
    return {row: found["loss"] for row, found in results(page)["ablate"].items()}


def short(x: float, digits: int) -> str:
    """A number below 1 without its leading zero."""
    return f"{x:.{digits}f}".lstrip("0")


def lead(page: str, row: str, over: str = "-C,G,T,L") -> str:
    """Nats by which the loss of a row is below another's, attention's by default."""
    return short(loss(page, over) - loss(page, row), 3)


def millions(page: str) -> str:
    return f"{results(page)['ablate']['-C,G,T,L']['parameters'] / 1e6:.2f}M"


def ratio(part: str, time: int, mixer: str, what: str, page: str | None = None, beside: str = "attention") -> float:
    """Over attention's, at this length."""
    cases = results(page or f"{part}_cpu")["bench"]
    (case,) = (case for case in cases if (case["part"], case["size"]["time"]) == (part, time))
    return case["results"][mixer][what] / case["results"][beside][what]


def layer(mixer: str, *pages: str) -> str:
    """A train step and its memory, from the machine where it costs less to the other."""
    cells = ((512, "train_s"), (2048, "train_s"), (2048, "train_extra_bytes"))
    return " | ".join(span([ratio("layer", time, mixer, what, page) for page in pages]) + "x" for time, what in cells)


def span(ratios: list[float], digits: int = 2) -> str:
    return " to ".join(sorted({f"{x:.{digits}f}" for x in (min(ratios), max(ratios))}))


def token(mixer: str, part: str = "decode") -> str:
    return span([ratio(part, time, mixer, "token_s", "decode_cpu") for time in (1024, 4096, 16384)])


def top1(data: str, mixer: str) -> float:
    return 100 * results(f"vision_{data}")["vision"][mixer]["accuracy"]


def slower(data: str) -> float:
    found = results(f"vision_{data}")["vision"]
    return found["softmax"]["images_per_second"] / found["softmax+CLTG"]["images_per_second"]


def mse(page: str, data: str, model: str, what: str = "mse") -> float:
    (run,) = (run for run in results(page)["forecast"] if (run["data"], run["model"]) == (data, model))
    return run[what]


def after(model: str, mixer: str) -> float:
    return mean(results(f"finetune_{model}")["finetune"][mixer]["after"])


def gained(model: str, mixer: str) -> float:
    return after(model, "attention") - after(model, mixer)


def mad(mixer: str) -> float:
    return 100 * results("mad_laptop")["mad"]["normal"][mixer]["mean"]["average"]["mean"]


def paired_mad(mixer: str, other: str) -> str:
    """How many percent a row is ahead of another in the mean over training, seed by seed."""
    rows = results("mad_laptop")["mad"]["normal"]
    return shown(*(rows[row]["mean"]["average"]["seeds"] for row in (mixer, other)), 100, 1)


def recalls(mixer: str) -> str:
    """Steps until 99.9 % of MAD's recall is right."""
    found = results("mad_recall")["mad"]["torch"][mixer]["steps"]
    assert found["to"] == 0.999
    (steps,) = found["by_seed"]["in-context-recall"]
    return f"{steps:,}"


def scan(prior: str, length: str) -> float:
    return 1000 * results("scans_cpu")[prior]["train_s"][length]


def state(prior: str) -> float:
    """Kilobytes that a layer of width 256 keeps of a row: for softmax per token."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig.matched(n_embd=256, n_head=4, prior_type=prior))
    short, long = (layer(torch.zeros(1, tokens, 256), return_state=True)[1].nbytes for tokens in (1, 101))
    return (long - short) / 1e5 if prior == "softmax" else long / 1e3


FULL, OWN = "softmax+CLTG", "softmax+LTG"
SLIM, SLIM_C = "softmax+LTG/r4", "softmax+CLTG/r4"
PARTS_PAGE = "regimes_parts"


def percent(task: str, mixer: str, page: str = PARTS_PAGE, digits: int = 0) -> str:
    return f"{100 * score(task, mixer, page):.{digits}f} %"


def share(task: str, mixer: str, page: str = PARTS_PAGE, digits: int = 2) -> str:
    return f"{score(task, mixer, page):.{digits}f}"


def at_its_best(task: str) -> float:
    """Attention's score, over its numbers of heads and with RoPE or without."""
    rows = results("regimes_heads_peak" if task == "peak" else "regimes_heads")["regimes"][task]
    return max(mean(found["test"]) for row, found in rows.items() if re.fullmatch(r"softmax(/h\d+)?(/norope)?", row))


def gla_at_its_best(task: str) -> float:
    """Normalised GLA's score, over its numbers of heads."""
    rows = results("regimes_heads_gla")["regimes"][task]
    return max(mean(found["test"]) for row, found in rows.items() if row.endswith("/norm"))


def level_later() -> float:
    """What attention with a head for every channel and slim FEM both explain after 2,000 steps."""
    rows = results("regimes_heads_long")["regimes"]["peak"].values()
    (found,) = {round(mean(row["test"]), 2) for row in rows}
    return found


def with_heads(task: str, row: str) -> str:
    return percent(task, row, "regimes_heads")


def the_three(row: str) -> str:
    return f"{share('peak', row)}, {percent('snapshot', row)}, {percent('high-water', row)}"


@cache
def matched(**fields) -> FreeEnergyMixerConfig:
    return FreeEnergyMixerConfig.matched(n_embd=512, n_head=8, **fields)


@cache
def weights(**fields) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in FreeEnergyMixer(matched(**fields)).parameters())


def cached(**fields) -> int:
    """Bytes of a token in a float32 cache of keys and of what is read."""
    config = matched(**fields)
    return 4 * (config.qk_dim + (2 if config.use_lse else 1) * config.fem_dim)


ATTENTION = {"use_lse": False, "use_temperature": False, "use_outer_gate": False}
PLAIN = {**ATTENTION, "use_conv": False}
SLIM_512 = {"gate_rank": 32}
assert matched(**SLIM_512) == FreeEnergyMixerConfig.slim(n_embd=512, n_head=8)  # what README's first lines build


def extra_weights() -> list[float]:
    """Percent more parameters of the fine-tuned models with full gates."""
    sizes = [results(f"finetune_{name}")["finetune"] for name in ("gpt2", "llama")]
    return [100 * (found[TRAINED]["parameters"] / found["attention"]["parameters"] - 1) for found in sizes]


def of_nats(page: str, row: str = "full/r8") -> str:
    return f"{loss(page, '-C,G,T,L'):.3f} | {loss(page, row):.3f}"


def slower_step() -> str:
    timed = results("ablate_16m_time")["ablate"]
    return f"{timed['full/r8']['ms a step'] / timed['-C,G,T,L']['ms a step']:.2f}"


def without_f(over: str = "-C,G,T,L") -> str:
    """Nats by which attention with the slim outer gate and the conditioner is below a row, each at its best rate."""
    return short(loss("ablate_16m_rates", over) - loss("ablate_16m_attribution_rate8", "+C,G/r8"), 3)


def at_best_rates(row: str) -> str:
    """Nats after 16M tokens, the mean of three seeds."""
    return f"{mean(on_three_seeds(row)):.3f}"


def alone_in_text() -> str:
    """The loss of attention with the conditioner after 16M tokens."""
    return f"{loss('ablate_16m_conditioner_alone', '-G,T,L'):.3f}"


def below(row: str, over: str = "-C,G,T,L") -> str:
    """Nats below another row on the same three seeds, with the standard error."""
    return shown(on_three_seeds(over), on_three_seeds(row)).removeprefix("+").replace("0.", ".")


def readme() -> list[str]:
    """The first screen's sentences, its table row by row, and what stands below."""
    types = Counter(found["result"] for found in results("clients")["model_types"])
    slim, split = (
        span([ratio("layer", time, name, "train_s", "layer_cpu") for time in (512, 2048)])
        for name in ("slim with C", "split")
    )
    more = 100 * (weights(**SLIM_512) / weights(**PLAIN) - 1)
    pools = {name: percent("bags", f"pool:{name}", "regimes_pools", 1) for name in ("attention", "fem", "max", "lse")}
    (fields,) = {with_heads(task, "softmax/h16") for task in ("snapshot", "high-water")}
    return [
        f"it explains {percent('peak', SLIM_C)} of the variance, attention with as many heads "
        f"{percent('peak', 'softmax')}, with a head for every channel {100 * at_its_best('peak'):.0f} %.",
        f"the layer ends {below('full/r8')[:4]} nats a token below attention, two of its parts without the maximum "
        f"{below('+C,G/r8')[:4]}.",
        f"| {share('peak', 'softmax')} → {share('peak', SLIM_C)} of the variance | `torch.cummax` between two linear "
        f"maps has {share('peak', 'cummax', 'regimes_heads_peak')} too. Attention with 64 heads has "
        f"{at_its_best('peak'):.2f}, with values twice as wide {share('peak', DOUBLE, DOUBLED)}, after 2,000 steps for "
        "500 all of it. Of [64 sensors](results/regimes_peak64.md), after 2,000 steps, attention has "
        f"{wide('softmax/h256/norope')} at its best, slim FEM {wide('softmax+CLTG/r16')} |",
        f"| {percent('snapshot', 'softmax')[:-2]} → {percent('snapshot', SLIM_C)}, "
        f"{percent('high-water', 'softmax')[:-2]} → {percent('high-water', SLIM_C)} with 4 heads | attention with 16 "
        f"heads has {fields} of both |",
        f"| {share('peak', 'gla/norm')} → {share('peak', 'gla+LTG/r4')} | GLA (gated linear attention) with more "
        f"heads: {gla_at_its_best('peak'):.2f} at its best, one seed |",
        f"| {pools['attention'][:-2]} → {pools['fem']} | maximum {pools['max']}, log-sum-exp {pools['lse']}. On "
        "[natural labels]",
        f"| {at_best_rates('-C,G,T,L')} → {at_best_rates('+C,G/r8')} nats | all of slim FEM "
        f"{at_best_rates('full/r8')}. In equal training time slim FEM is "
        f"{lead('ablate_16m_time', '-C,G,T,L', 'full/r8')} behind attention at width 128, and "
        f"[{lead('ablate_512_two', 'full/r32')} ahead at width 512]",
        f"{mad('softmax'):.1f} → {mad(FULL):.1f} %, CIFAR-10 {top1('cifar', 'softmax'):.1f} → "
        f"{top1('cifar', FULL):.1f} % | the conditioner alone has {mad('softmax+C'):.1f} % of MAD |",
        f"| {share('statistics', 'softmax', digits=3)} → {share('statistics', SLIM_C, digits=3)}; MSE "
        f"{mse('forecast_etth1', 'ETTh1', 'softmax'):.3f} → {mse('forecast_etth1', 'ETTh1', FULL):.3f}; "
        f"{after('gpt2', 'attention'):.3f} → {after('gpt2', TRAINED):.3f} nats | the last for "
        f"{extra_weights()[0]:.0f} % more parameters |",
        f"takes [{slim} times](results/layer_cpu.md) the train step, caches {cached(**SLIM_512):,} bytes a token for "
        f"{cached(**PLAIN):,} and has {more:.0f} % more parameters.",
        f"split values {split} times and no wider cache.",
        f"{types['right']} model types of transformers](results/clients.md) in all; {types['refused']} others",
    ]


def natural(pool):
    """Per cent of right answers, averaged over the sets with natural labels."""
    return 100 * mean(mean(rows[f"pool:{pool}"]["right"]) for rows in results("natural")["natural"].values())


def points(pool):
    return f"{100 * results('natural_points')['natural']['points'][f'pool:{pool}']['accuracy'][0]:.1f} %"


def lead_on_natural(pool):
    """What `natural` is ahead of attention pooling by, with the standard error of the difference, paired by bag."""
    lead, error = (100 * x for x in pooled(pool, "natural"))
    return f"{lead:.1f} ± {error:.1f}".replace("0.", ".")


def summary() -> list[str]:
    argmax = results("argmax")
    hits = {name: 100 * mean(argmax["argmax"][name]["hits"]) for name in ("softmax", "fem")}
    constant = 100 * argmax["baselines"]["the best constant"]["hits"]
    full = "FEM-SM"
    extra, at_10m = extra_weights(), losses("ablate_10m")
    ett = ("ett-extremes", "ett-events")
    gla, gla_slim, gla_full = "gla/norm", "gla+LTG/r4", "gla+LTG"
    sizes = {
        model: mse("forecast_ett96", "ETTm1", model, "parameters") for model in ("patchtst", "femforecaster", "dlinear")
    }
    mses = {
        model: ", ".join(f"{mse('forecast_ett96', data, model):.3f}" for data in ("ETTm1", "ETTh2")) for model in sizes
    }
    gained_lt = paired_mad("softmax+CLT", "softmax+C")
    return [
        f"3 seeds | {share('peak', 'softmax')} | {share('peak', SLIM_C)} | the free energy, given width: slim "
        f"{share('peak', SLIM_C)}, without C {share('peak', SLIM)}; full gates {share('peak', FULL)}, without C "
        f"{share('peak', OWN)}; outer gate alone {share('peak', 'softmax+G')}. [Attention with a head for every "
        f"channel](regimes_heads.md): {at_its_best('peak'):.2f}, with values twice as wide "
        f"{share('peak', DOUBLE, DOUBLED)}, after 2,000 steps {level_later():.2f} |",
        f"| {percent('snapshot', 'softmax')} | {percent('snapshot', SLIM_C)} | slim {percent('snapshot', SLIM_C)}, "
        f"without C {percent('snapshot', SLIM)}, the conditioner alone {percent('snapshot', 'softmax+C')}, L alone "
        f"{percent('snapshot', 'softmax+L')}, full {percent('snapshot', FULL)}. Heads do it as well: "
        f"[attention with 8](regimes_heads.md) {with_heads('snapshot', 'softmax/h8')} |",
        f"| {percent('high-water', 'softmax')} | {percent('high-water', SLIM_C)} | slim "
        f"{percent('high-water', SLIM_C)}, without C {percent('high-water', SLIM)}, L alone "
        f"{percent('high-water', 'softmax+L')}, full {percent('high-water', FULL)}. Heads do it as well: "
        f"[attention with 16](regimes_heads.md) {with_heads('high-water', 'softmax/h16')} |",
        f"| {the_three(gla)} | {the_three(gla_slim)} | slim without C; full without C {the_three(gla_full)}. [GLA "
        f"with more heads](regimes_heads.md), one seed: {gla_at_its_best('peak'):.2f}, "
        f"{100 * gla_at_its_best('snapshot'):.0f} %, {100 * gla_at_its_best('high-water'):.0f} % at its best |",
        f"one rate | {share(ett[0], 'softmax', 'regimes_ett')} | {share(ett[0], SLIM, 'regimes_ett')} | slim without C "
        f"{share(ett[0], SLIM, 'regimes_ett')}, L alone {share(ett[0], 'softmax+L', 'regimes_ett')}, full "
        f"{share(ett[0], OWN, 'regimes_ett')}, outer gate alone {share(ett[0], 'softmax+G', 'regimes_ett')}. "
        f"[Attention with 8 heads](regimes_heads.md), its best number, one seed: "
        f"{share(ett[0], 'softmax/h8', 'regimes_heads_ett')} |",
        f"| {percent(ett[1], 'softmax', 'regimes_ett', 1)} | {percent(ett[1], SLIM, 'regimes_ett', 1)} | L alone "
        f'{percent(ett[1], "softmax+L", "regimes_ett", 1)}; always "no" '
        f"{100 * results('regimes_ett')['constants'][ett[1]]:.1f} % |",
        f"| {percent('bags', 'softmax')} | {percent('bags', SLIM)} | slim without C {percent('bags', SLIM)}, with it "
        f"{percent('bags', SLIM_C)}; but [mean pooling behind an encoder](regimes_pools.md) has "
        f"{percent('bags', 'pool:mean', 'regimes_pools', 1)}:",
        f"(regimes_split.md) {percent('bags', 'softmax', 'regimes_split')} and "
        f"{percent('bags', SLIM, 'regimes_split')}; with [16 heads](regimes_heads.md), one seed, attention "
        f"{percent('bags', 'softmax/h16', 'regimes_heads_bags')}, slim FEM with 4 "
        f"{percent('bags', SLIM, 'regimes_heads_bags')} |",
        f"3 seeds | {wide('softmax/h256/norope')} | {wide('softmax+LTG/r16')} | slim without C "
        f"{wide('softmax+LTG/r16')}, with it {wide('softmax+CLTG/r16')}, L alone {wide('softmax+L')};",
        f"which has {wide('softmax/h256/norope', 'regimes_peak64_8000')} after 8,000 steps (one seed) |",
        f"the conditioner alone {top1('cifar_slim', 'softmax+C'):.1f} %, slim FEM "
        f"{top1('cifar_slim', f'{FULL}/r6'):.1f} %, split values {top1('cifar_slim', f'{FULL}/r6/s.5'):.1f} % |",
        f"| {percent('bags', 'pool:attention', 'regimes_pools', 1)} | {percent('bags', 'pool:fem', 'regimes_pools', 1)}"
        f" | maximum {percent('bags', 'pool:max', 'regimes_pools', 1)}, log-sum-exp "
        f"{percent('bags', 'pool:lse', 'regimes_pools', 1)} |",
        f"| {natural('attention'):.1f} % | {natural('fem'):.1f} % | level (+{lead_on_natural('fem')}); "
        f"maximum {natural('max'):.1f} %, log-sum-exp {natural('lse'):.1f} % |",
        f"one repeat | {points('attention')} | {points('fem')} | loses; log-sum-exp {points('lse')}, maximum "
        f"{points('max')}, mean {points('mean')} |",
        f"| {share('statistics', 'softmax', digits=3)} | {share('statistics', SLIM, digits=3)} | none: the mean is "
        f"right here; L alone loses, {share('statistics', 'softmax+L', digits=3)} |",
        f"| {hits['softmax']:.1f} % | {hits['fem']:.1f} % | the free energy; a constant hits {constant:.0f} % |",
        f"[{millions('ablate_softmax')}, 0.3M tokens](ablate_softmax.md), 3 seeds | "
        f"{of_nats('ablate_softmax', 'full')} | without C {loss('ablate_softmax', '-C'):.3f}; outer gate alone "
        f"{loss('ablate_softmax', '+G'):.3f} |",
        f"[{millions('ablate_10m')}, 1.8M tokens](ablate_10m.md), one seed, one rate | {of_nats('ablate_10m', 'full')} "
        f"| not taken apart; slim {at_10m['full/r8']:.3f} |",
        f"[{millions('ablate_16m_rates')}, 16M tokens](ablate_16m.md), 3 seeds, attention at its best rate of "
        f"three | {at_best_rates('-C,G,T,L')} | {at_best_rates('full/r8')} | slim; not the free energy: the slim "
        f"outer gate and the conditioner alone have {at_best_rates('+C,G/r8')} |",
        f"suits attention least | {of_nats('ablate_16m_seeds')} | slim; [with one seed](ablate_16m.md) the slim outer "
        f"gate alone brings {lead('ablate_16m', '+G/r8')} of {lead('ablate_16m', 'full/r8')}, full gates nothing |",
        f"[{millions('ablate_16m_3m')}, 16M tokens](ablate_16m.md), one seed, one rate | {of_nats('ablate_16m_3m')} "
        "| slim |",
        f"[{millions('ablate_16m_time')}, in equal time](ablate_16m.md) on a CPU, one seed, one rate | "
        f"{of_nats('ablate_16m_time')} | slim gates lose: their step takes {slower_step()} times attention's |",
        f"[{millions(WIDE)}, in equal time](ablate_512_time.md), one block of width 512, 4M tokens, one seed, one "
        f"rate | {of_nats(WIDE, 'full/r32')} | not the free energy: the slim outer gate and the conditioner alone have "
        f"{loss(WIDE, '+C,G/r32'):.3f}; split values {loss(WIDE, '-C/r32/s.5'):.3f} |",
        f"[{millions('ablate_512_two')}, in equal time](ablate_512_two.md), two blocks of width 512, 4M tokens, one "
        f"seed, one rate | {of_nats('ablate_512_two', 'full/r32')} | not taken apart |",
        f"[on GLA, 0.3M tokens](ablate_gla.md), 3 seeds | {of_nats('ablate_gla', 'full')} | ",
        f"| {after('gpt2', 'attention'):.3f}, {after('llama', 'attention'):.3f} | {after('gpt2', TRAINED):.3f}, "
        f"{after('llama', TRAINED):.3f} | with {min(extra):.0f} to {max(extra):.0f} % more parameters",
        f"| {mad('softmax'):.1f} % | {mad(FULL):.1f} % | the conditioner alone {mad('softmax+C'):.1f} %; L and T bring "
        f"it {gained_lt}, the outer gate",
        f"steps to 99.9 %, one seed | {recalls('softmax')} | {recalls(FULL)} | the conditioner; without it "
        f"{recalls(OWN)} |",
        f"| {top1('cifar', 'softmax'):.1f} % | {top1('cifar', FULL):.1f} % |",
        f"| {top1('digits', 'softmax'):.1f} % | {top1('digits', FULL):.1f} % |",
        f"| {mse('forecast_etth1', 'ETTh1', 'softmax'):.3f} | {mse('forecast_etth1', 'ETTh1', FULL):.3f} | a tie; "
        f"without any mixer {mse('forecast_etth1', 'ETTh1', 'none'):.3f} |",
        f"| {mses['patchtst']} (PatchTST, {sizes['patchtst']:,} parameters) | {mses['femforecaster']} "
        f"(`FEMForecaster`, {sizes['femforecaster']:,}) | not at equal parameters, not taken apart; DLinear "
        f"({sizes['dlinear']:,}) {mses['dlinear']} |",
        f"attention has {weights(**PLAIN):,} parameters and caches {cached(**PLAIN):,} bytes a token. Full FEM has "
        f"{weights():,}, of which the conditioner {weights() - weights(use_conv=False):,}, and the same cache.",
        f"cache {cached(gate_rank=4, use_conv=False):,}, {cached(gate_rank=8):,} and {cached(gate_rank=32):,} bytes",
        f"of rank 8 with the conditioner they have {weights(gate_rank=8):,} parameters, "
        f"{100 * (weights(gate_rank=8) / weights(**PLAIN) - 1):.1f} % more than attention.",
        *(
            f"| {shown} | {layer(name, 'layer_epyc', 'layer_cpu')} |"
            for shown, name in (
                ("FEM without the conditioner", f"{full} without C"),
                ("FEM", full),
                ("FEM on a GLA prior", "FEM-GLA"),
            )
        ),
        *(
            f"| {shown} | {layer(name, 'layer_cpu')} |"
            for shown, name in (
                ("slim gates of rank 32, without the conditioner (Xeon alone)", "slim"),
                ("the same with the conditioner (Xeon alone)", "slim with C"),
                ("split values, without the conditioner (Xeon alone)", "split"),
                ("the same with the conditioner (Xeon alone)", "split with C"),
            )
        ),
        f"{slower('cifar'):.1f} to {slower('digits'):.1f} times at 65 and 17 tokens of small width",
        *by_heads(*(f"attention, {heads} heads" for heads in (16, 64, 128))),
        f"slim FEM with 4 heads {' and '.join(by_heads('slim FEM without C, 4 heads'))} times without the conditioner, "
        f"{' and '.join(by_heads('slim FEM, 4 heads'))} with it.",
        f"one at a time: {token(full)} times attention's time, {token(f'{full} without C')} without the conditioner, "
        f"and then {token(f'{full} without C', 'served')} where both are compiled",
        f"with a GLA prior {ratio('decode', 16384, 'FEM-GLA', 'state_bytes'):.3f} times as large at 16k tokens",
    ]


def wide(mixer: str, page: str = WIDE_RUN) -> str:
    return share("peak-64", mixer, page)


def by_heads(*layers: str) -> list[str]:
    """A train step over that of attention with 4 heads, of 512 and of 2,048 tokens."""
    steps = [results("heads_cpu")["train_s"][length] for length in ("512", "2048")]
    ratios = [[f"{taken[layer] / taken['attention, 4 heads']:.2f}" for layer in layers] for taken in steps]
    return [f"{', '.join(of[:-1])} and {of[-1]}" if len(of) > 1 else of[0] for of in ratios]


def faq() -> list[str]:
    least, most = (
        pick(ratio("layer", time, "FEM-SM", "train_s", page) for time in (512, 2048))
        for pick, page in ((min, "layer_epyc"), (max, "layer_cpu"))
    )
    memory = max(ratio("layer", time, "FEM-SM", "train_extra_bytes", "layer_epyc") for time in (512, 2048))
    own = "FEM-SM without C"
    wider = span([ratio("layer", time, "slim", "train_s", "layer_cpu", own) for time in (512, 2048)], 1)
    steps = {
        name: span([ratio("layer", time, name, "train_s", "layer_cpu") for time in (512, 2048)])
        for name in ("slim", "slim with C", "FEM-SM")
    }
    tokens = [ratio("decode", time, "FEM-SM", "token_s") for time in (1024, 4096, 16384)]
    demo, small = results("demo")["lm"], losses("ablate_softmax")
    speed = demo["fem"]["tokens_per_second"] / demo["softmax"]["tokens_per_second"]
    rate, at_3m = results("ablate_long_rate")["ablate"], losses("ablate_3m")
    seconds = [mse("forecast_etth1", "ETTh1", model, "cpu_seconds") for model in ("softmax", FULL)]
    at_16m = losses("ablate_16m")
    lost = [short(score("statistics", "softmax") - score("statistics", mixer), 3) for mixer in (SLIM, "softmax+L")]
    pools = [100 * score("bags", f"pool:{pool}", "regimes_pools") for pool in ("fem", "attention")]
    machines = f"{state('mamba'):.0f}, {state('mamba_interactive'):.0f} kB"
    cases = Counter(found["outcome"] for found in results("chaos")["cases"])
    assert set(cases) == {"same"}
    bare, cache = weights(**PLAIN), cached(**PLAIN)

    def cost(**fields) -> str:
        return f"{weights(**fields) / bare:.2f}, {cached(**fields) / cache:.2f}"

    gla = weights(prior_type="gla", use_conv=False, **SLIM_512) / weights(prior_type="gla", **PLAIN)
    return [
        f"(MSE {mse('forecast_etth1', 'ETTh1', FULL):.4f} against {mse('forecast_etth1', 'ETTh1', 'softmax'):.4f}, two "
        f"seeds) for {seconds[1] / seconds[0]:.1f} times the training time",
        f"{top1('digits', FULL):.1f} against {top1('digits', 'softmax'):.1f} % lies within the spread",
        f"[{least:.2f}](results/layer_epyc.md) to [{most:.2f} times](results/layer_cpu.md) that of attention, "
        f"and up to {memory:.2f} times its memory",
        f"a streamed token [{min(tokens):.1f} to {max(tokens):.1f} times](results/decode_cpu.md)",
        f"[{wider} times](results/layer_cpu.md) the full gates' train step",
        f"at 17 tokens of width 48 it takes {slower('digits'):.1f} times as long",
        f"language model runs at {100 * speed:.0f} % of",
        f"brought {small['-C,G,T,L'] - small['+G']:.3f} of the {small['-C,G,T,L'] - small['-C']:.3f} nats",
        f"it was {at_3m['-C,G,T,L'] - at_3m['+G']:.3f} of {at_3m['-C,G,T,L'] - at_3m['-C']:.3f}, "
        f"and the conditioner brought {at_3m['-C'] - at_3m['full']:.3f} more",
        f"attention ends at {at_best_rates('-C,G,T,L')} nats and slim FEM at {at_best_rates('full/r8')}; its outer "
        f"gate and conditioner without the free energy end at {at_best_rates('+C,G/r8')}. Full gates were run there "
        f"only at rate .002, at which attention ({at_16m['-C,G,T,L']:.3f}) is not at its best: with "
        f"the conditioner they end at {at_16m['full']:.3f}, without it at {at_16m['-C']:.3f}.",
        f"takes {slower_step()} times attention's in a model of {millions('ablate_16m_time')} parameters",
        f"attention is ahead by {lead('ablate_16m_time', '-C,G,T,L', 'full/r8')} nats.",
        f"has {at_its_best('peak'):.2f} of the variance, with values twice as wide {share('peak', DOUBLE, DOUBLED)}, "
        f"where slim FEM with 4 heads has {share('peak', SLIM_C)};",
        f"explains {percent('peak', SLIM_C)} of the variance, attention {100 * score('peak', 'softmax'):.0f})",
        f"{1.95} is the default",
        f"| {1.95}; [no other start",
        f"| {cost(**SLIM_512)}, {steps['slim with C']} | [heads](results/regimes_heads.md), "
        f"[parts](results/regimes_parts.md): {share('peak', SLIM_C)} of the variance, without C "
        f"{share('peak', SLIM)}, attention {share('peak', 'softmax')} |",
        f"| {1.95} | {cost(use_conv=False, **SLIM_512)}, {steps['slim']} |",
        f"computed extremes: {share('ett-extremes', SLIM, 'regimes_ett')} and "
        f"{share('ett-extremes', 'softmax', 'regimes_ett')} |",
        f"`beta_max_init={math.log(math.expm1(4)):.2f}` | {cost()}, {steps['FEM-SM']} | {share('peak', FULL)} of the "
        "variance;",
        f"| {1.95} | {gla:.2f}, a state of fixed size, | [parts](results/regimes_parts.md): "
        f"{share('peak', 'gla+LTG/r4')} of the variance, GLA {share('peak', 'gla/norm')}; [GLA with more heads]"
        f"(results/regimes_heads.md) {gla_at_its_best('peak'):.2f} |",
        f"| a step of slim FEM [{slower_step()}](results/ablate_16m.md) in a model of {millions('ablate_16m_time')}",
        f"{at_best_rates('+C,G/r8')} nats after 16M tokens, slim FEM {at_best_rates('full/r8')}, attention "
        f"{at_best_rates('-C,G,T,L')}, at its best rate",
        f"have {share('peak', f'{FULL}/thirds', 'regimes_thirds')}, one seed |",
        f"| {cost(**ATTENTION)}, | [MAD](results/mad_laptop.md)",
        "| | 1.00, 1.00, 1.00 |",
        f"they lost [{lead('ablate_10m', 'full', 'full/r8')} nats](results/ablate_10m.md)",
        "to full gates after 1.8M tokens.",
        f"{recalls('softmax+C')} steps to 99.9 %, FEM without C {recalls(OWN)}, attention {recalls('softmax')} |",
        f"conditioner reaches {mad('softmax+C'):.1f} %, full FEM {mad(FULL):.1f} %, attention {mad('softmax'):.1f} %.",
        f"[{gained('gpt2', TRAINED):.3f} nats for a GPT-2]",
        f"[{gained('llama', TRAINED):.3f} for a Llama]",
        f"{rate['-C']['loss']:.3f} against {rate['-C,G,T,L']['loss']:.3f} nats per token",
        f"({top1('cifar', FULL):.1f} against {top1('cifar', 'softmax'):.1f} %, [half of it]",
        f"{short(gained('gpt2', 'attention+G'), 3)} to {short(gained('llama', 'attention+G'), 3)} nats |",
        f"attention; slim gates lose {lost[0]}, only L {lost[1]} ",
        f"instead of attention pooling, {pools[0]:.1f} against {pools[1]:.1f} % | {1.95} | | [bags]",
        f"{scan('gla', '8192'):.0f} ms for a train step at 8192 tokens, "
        f"{scan('gla', '8192') / scan('gla', '1024'):.1f} times that of 1024",
        f"{scan('rnn_softmax', '8192'):.0f} and {scan('rnn_decay', '8192'):.0f} ms, and a state of "
        f"{state('rnn_decay'):.0f} kB a layer;",
        f"{scan('mamba', '8192'):.0f} ms; time and state",
        f"of its tokens only | {state('softmax'):.1f} kB a token |",
        f"| `linear`, `gla` | D (2 d/H + 1) | {state('gla'):.0f} kB |",
        f"| `rnn_softmax`, `rnn_decay` | 4 d | {state('rnn_decay'):.1f} kB |",
        f"| `mamba`, `mamba_interactive` | 4 d N, N the rank | {machines} |",
        f"of {cases.total()} small trainings",
    ]


def language() -> list[str]:
    sizes = ", ".join(
        f"{lead(page, 'full/r8')} {'nats ' if page == 'ablate_16m_3m' else ''}with [{millions(page)}]"
        "(results/ablate_16m.md)"
        for page in ("ablate_16m_half", "ablate_16m_rate4", "ablate_16m_3m")
    )
    timed = losses("ablate_16m_time")
    at_4, split = losses("ablate_16m_rate4"), loss("ablate_16m_split", "-C/r8/s.5")
    timed_split, wide = losses("ablate_16m_split_time"), results(WIDE)["ablate"]
    wide_step = wide["full/r32"]["ms a step"] / wide["-C,G,T,L"]["ms a step"]
    return [
        f"slim FEM ends {below('full/r8')} nats below attention**, {at_best_rates('full/r8')} against "
        f"{at_best_rates('-C,G,T,L')}: {millions('ablate_16m_rates')} parameters, three seeds",
        f"the gate and the conditioner alone end at {timed_split['+C,G/r8']:.3f}, ahead.",
        f"At .008 they end at {loss('ablate_16m_split_rate8', '-C/r8/s.5'):.3f}.",
        f"they end at {timed_split['-C/r8/s.5']:.3f} and attention at {timed_split['-C,G,T,L']:.3f}: "
        f"{lead('ablate_16m_split_time', '-C/r8/s.5')} below",
        f"At rate .002, which suits attention least, it is [{slim_lead()} on three seeds](results/ablate_16m.md)",
        "[Each at its best rate](results/ablate_16m.md), one seed, attention with",
        f"but without the free energy, ends {without_f()} nats below attention and {without_f('full/r8')} below slim "
        f"FEM; on three seeds, at rate .004, {below('+C,G/r8')} below attention. The conditioner "
        f"alone, one seed, ends at {alone_in_text()}.",
        f"On three seeds, on one machine, they end {below('+C,G/r8', 'full/r8')} below slim FEM",
        f"end at [{split:.3f} nats](results/ablate_16m.md) at .004: {short(at_4['-C,G,T,L'] - split, 3)} below "
        f"attention and {short(at_4['+G/r8'] - split, 3)} below the slim outer gate alone",
        f"At .002 the slim outer gate brings {lead('ablate_16m', '+G/r8')} of {lead('ablate_16m', 'full/r8')} nats, "
        f"free energy and temperature gate {lead('ablate_16m', '-C/r8', '+G/r8')}, the conditioner "
        f"{lead('ablate_16m', 'full/r8', '-C/r8')}.",
        "at rate .002, they bring nothing",
        f"(.004) have leads of {sizes} parameters. At .004 slim FEM is at its best with {millions('ablate_16m_rates')}",
        f"at these sizes, {timed['-C,G,T,L']:.3f} against {timed['full/r8']:.3f}, as a step of slim FEM takes "
        f"{slower_step()} times as long; it would be level [at {level_at():.2f} times](results/ablate_16m.md).",
        f"where a step takes {wide_step:.2f} times as long, slim FEM ends [{lead(WIDE, 'full/r32')} below]"
        f"(results/ablate_512_time.md) after 4M tokens and split values {lead(WIDE, '-C/r32/s.5')}, but the gate and "
        f"the conditioner alone {lead(WIDE, '+C,G/r32')}; [with two blocks](results/ablate_512_two.md) slim FEM ends "
        f"{lead('ablate_512_two', 'full/r32')} below, the others were not run.",
        f"[With {millions('ablate_10m')} parameters](results/ablate_10m.md) and 1.8M tokens",
        "The texts: 16.0M and 1.8M tokens are program source, Python's and torch's, and what is held out is code of "
        "the same projects; 3.1M are Python's sources and help topics; 0.3M and 1.0M are speeches.",
        *(plain(figures.table(pages)) for pages in (figures.PAGES, figures.EQUAL_TIME)),
    ]


def sections(text: str, wanted: tuple[str, ...]) -> str:
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return "\n".join(body for title, body in zip(parts[1::2], parts[2::2]) if title in wanted)


def plain(text: str) -> str:
    """One line, without code blocks, formulas and the folders of links to the results."""
    text = re.sub(r"\((?:\.\./)?research/results/", "(results/", text)
    return " ".join(re.sub(r"```.*?```|\$`.*?`\$", "", text, flags=re.DOTALL).split())


def checked(text: str, claims: list[str], others: tuple[str, ...] = ()) -> list[str]:
    """The measured numbers that no claim covers. A claim that the text does not make fails."""
    for claim in [*claims, *others]:
        assert claim in text, f"the page does not say {claim!r}"
        text = text.replace(claim, " ")
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [text[max(0, found.start() - 60) : found.end() + 20] for found in MEASURED.finditer(text)]


def test_every_measured_number_of_the_readme_is_that_of_a_results_page():
    text = plain((ROOT / "README.md").read_text())
    numbers = checked(text, readme(), NOT_MEASURED)
    assert not numbers


def test_every_measured_number_of_the_table_of_all_comparisons_is_that_of_a_results_page():
    text = plain((ROOT / "research" / "results" / "summary.md").read_text())
    assert not checked(text, summary())


def test_every_measured_number_of_the_faq_is_that_of_a_results_page():
    text = plain(sections((ROOT / "docs" / "faq.md").read_text(), FAQ))
    assert not checked(text, faq())


def test_every_measured_number_of_the_page_on_language_models_is_that_of_a_results_page():
    page = (ROOT / "research" / "results" / "ablate_16m.md").read_text()
    assert all(table in page for table in figures.losses_16m().values())
    text = plain((ROOT / "docs" / "language.md").read_text())
    assert not checked(text, language())
