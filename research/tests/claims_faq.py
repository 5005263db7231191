"""The FAQ's sections of figures."""

import math
from collections import Counter

import torch
from claims import (
    ATTENTION,
    BEHIND,
    FULL,
    GATE_AND_C,
    OWN,
    PLAIN,
    SLIM,
    SLIM_512,
    SLIM_C,
    TRAINED,
    after,
    at_best_rates,
    at_its_best,
    by_its_best_rate,
    cached,
    gla_at_its_best,
    gla_later,
    lead,
    loss,
    losses,
    mad,
    millions,
    mse,
    percent,
    ratio,
    recalls,
    score,
    share,
    short,
    slower,
    slower_step,
    span,
    step,
    token,
    top1,
    unsigned,
    weights,
    wide,
    with_conditioner,
    with_double,
)
from said import results
from said_costs import CLT, C, fused_on_h100, leads, started
from said_language import NO_F_32, SLIM_32, heavier, two_costs
from said_natural import SETS, pooled
from said_tasks import heads_step

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem_research.common.paired import in_words


def gained(model: str, mixer: str) -> float:
    return after(model, "attention") - after(model, mixer)


def scan(prior: str, length: str) -> float:
    return 1000 * results("scans_cpu")[prior]["train_s"][length]


def state(prior: str) -> float:
    """Kilobytes that a layer of width 256 keeps of a row: for softmax per token."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig.matched(n_embd=256, n_head=4, prior_type=prior))
    short, long = (layer(torch.zeros(1, tokens, 256), return_state=True)[1].nbytes for tokens in (1, 101))
    return (long - short) / 1e5 if prior == "softmax" else long / 1e3


def of_a_test_set(one: float, other: float, pictures: int) -> float:
    """The difference of two accuracies in per cent, in standard errors of two sets of that many pictures."""
    return (one - other) / math.sqrt(sum(x * (100 - x) for x in (one, other)) / pictures)


def faq() -> list[str]:
    least, most = (
        pick(ratio("layer", time, "FEM-SM", "train_s", page) for time in (512, 2048))
        for pick, page in ((min, "layer_epyc"), (max, "layer_cpu"))
    )
    memory = max(ratio("layer", time, "FEM-SM", "train_extra_bytes", "layer_epyc") for time in (512, 2048))
    slim_memory = max(ratio("layer", time, "slim with C", "train_extra_bytes", "layer_cpu") for time in (512, 2048))
    own = "FEM-SM without C"
    wider = span([ratio("layer", time, "slim", "train_s", "layer_cpu", own) for time in (512, 2048)], 1)
    steps = {
        name: span([ratio("layer", time, name, "train_s", "layer_cpu") for time in (512, 2048)])
        for name in ("slim", "slim with C", "FEM-SM")
    }
    tokens, again, slim_tokens = (
        token(name, page=page, digits=1)
        for name, page in (("FEM-SM", "decode_cpu"), ("FEM-SM", "decode_split"), ("slim", "decode_split"))
    )
    demo, small = results("demo")["lm"], losses("ablate_softmax")
    speed = demo["fem"]["tokens_per_second"] / demo["softmax"]["tokens_per_second"]
    at_3m = losses("ablate_3m")
    sixteen = [heads_step(length, "attention, 16") for length in ("512", "2048")]
    two = two_costs("c128")
    pooled_lead = [unsigned(in_words(*pooled(pool, *SETS))) for pool in ("lse", "fem")]
    gates = [heavier(f"finetune_{model}", "attention+G") for model in ("gpt2", "llama")]
    seconds = [mse("forecast_etth1", "ETTh1", model, "cpu_seconds") for model in ("softmax", FULL)]
    at_16m = losses("ablate_16m")
    lost = [short(score("statistics", "softmax") - score("statistics", mixer), 3) for mixer in (SLIM, "softmax+L")]
    pools = [percent("bags", f"pool:{pool}", "regimes_pools", 1) for pool in ("fem/r4", "fem", "attention")]
    assert pools[0] == percent("bags", "pool:fem", "regimes_pools_rate3", 1)
    points, error = leads("mad_laptop", CLT, C)
    machines = f"{state('mamba'):.0f}, {state('mamba_interactive'):.0f} kB"
    cases = Counter(found["outcome"] for found in results("chaos")["cases"])
    assert set(cases) == {"same"}
    bare, cache = weights(**PLAIN), cached(**PLAIN)
    sensors = [share("ett-extremes", row, "regimes_ett_steps") for row in (SLIM, SLIM_C, "softmax/h16")]
    events = "regimes_ett_steps_events"

    def cost(**fields) -> str:
        return f"{weights(**fields) / bare:.2f}, {cached(**fields) / cache:.2f}"

    def single(name: str) -> str:
        steps = [ratio("single", time, name, "train_s", "layer_single") for time in (512, 2048)]
        return f"[{span(steps)}](results/layer_single.md)"

    card = [fused_on_h100()[mixer] for mixer in ("softmax+LTG", "softmax+CLTG/r64")]
    gla = weights(prior_type="gla", use_conv=False, **SLIM_512) / bare
    return [
        f"(MSE {mse('forecast_etth1', 'ETTh1', FULL):.4f} against {mse('forecast_etth1', 'ETTh1', 'softmax'):.4f}, two "
        f"seeds) for {seconds[1] / seconds[0]:.1f} times the training time",
        f"{top1('digits', FULL):.1f} against {top1('digits', 'softmax'):.1f} % lies within the spread",
        f"costs [{steps['slim with C']} times](results/layer_cpu.md) that of attention with slim gates and "
        f"[{least:.2f}](results/layer_epyc.md) to {most:.2f} times with full ones, and adds up to "
        f"{slim_memory:.2f} and {memory:.2f} times the memory",
        f"a streamed token, on two days, [{tokens}](results/decode_cpu.md) and "
        f"[{again} times](results/decode_split.md) with full gates, and {slim_tokens} times with slim ones",
        f"[{wider} times](results/layer_cpu.md) the full gates' train step",
        f"takes [{card[0]:.2f} to {card[1]:.2f} times attention's](results/h100_layers.md) on an H100",
        f"at 17 tokens of width 48 it takes {slower('digits'):.1f} times as long",
        f"language model runs at {100 * speed:.0f} % of",
        f"brought {small['-C,G,T,L'] - small['+G']:.3f} of the {small['-C,G,T,L'] - small['-C']:.3f} nats",
        f"it was {at_3m['-C,G,T,L'] - at_3m['+G']:.3f} of {at_3m['-C,G,T,L'] - at_3m['-C']:.3f}, "
        f"and the conditioner brought {at_3m['-C'] - at_3m['full']:.3f} more",
        f"attention ends at {at_best_rates('-C,G,T,L')} nats and slim FEM at {at_best_rates('full/r8')}; its outer "
        f"gate and conditioner without the free energy end at {at_best_rates('+C,G/r8')}. Full gates with narrow "
        f"values, as in the paper, were run there only at rate .002, at which attention ({at_16m['-C,G,T,L']:.3f}) is "
        f"not at its best: with the conditioner they end at {at_16m['full']:.3f}, without it at {at_16m['-C']:.3f}. "
        "With values as wide as the model, and a narrower MLP in return, they end at "
        f"{loss('ablate_16m_wide', 'full/wide'):.3f} at .004, one seed.",
        f"takes {slower_step()} times attention's in a model of {millions('ablate_16m_time')} parameters",
        f"attention is ahead by {lead('ablate_16m_time', '-C,G,T,L', 'full/r8')} nats, at a rate that suits attention "
        f"least, one seed. The gate and the conditioner alone, at a better rate, are "
        f"{lead('ablate_16m_split_time', '+C,G/r8')} ahead of attention, one seed, and attention "
        f"gains {by_its_best_rate()} by its best rate",
        f"has {at_its_best():.2f} of the variance, with values twice as wide {with_double()}, with "
        f"the conditioner {with_conditioner()}, where slim FEM with 4 heads has {share('peak', SLIM_C)}; after four "
        "times as many steps they are level.",
        f"L and T add {points:.1f} ± {short(error, 1)} points to the conditioner",
        f"nearly as much as the conditioner: {mad(BEHIND):.1f} %, and {mad(BEHIND, 'final'):.1f} against "
        f"{mad(C, 'final'):.1f} % at the end",
        f"of 16 sensors after 500 steps: slim FEM explains {percent('peak', SLIM_C)} of the variance, attention "
        f"{100 * score('peak', 'softmax'):.0f} with 4 heads, {100 * at_its_best():.0f} with 64, with the conditioner "
        f"{with_conditioner()[2:]}; after four times as many steps they are level)",
        f"after 2,000 steps slim FEM is right in {percent('ett-events', SLIM_C, events, 1)}, attention with 16 heads "
        f"in {percent('ett-events', 'softmax/h16', events, 1)}",
        f"in text the gate and the conditioner ([{at_best_rates('+C,G/r8')} against {at_best_rates('-C,G,T,L')} nats]",
        f"{1.95} is the default",
        f"| {1.95}; [8 helped",
        f"| {cost(**SLIM_512)}, {steps['slim with C']} | [heads](results/regimes_heads.md), "
        f"[parts](results/regimes_parts.md): {share('peak', SLIM_C)} of the variance, without C "
        f"{share('peak', SLIM)}, attention {share('peak', 'softmax')} with 4 heads and {at_its_best():.2f} with "
        f"64, with the conditioner {with_conditioner()}; with "
        f"[64 sensors](results/regimes_peak64.md) {wide('softmax+CLTG/r16')} and {wide('softmax+LTG/r16')}, where the "
        "log-sum-exp alone is best |",
        f"| {1.95} | {cost(use_conv=False, **SLIM_512)}, {steps['slim']} |",
        f"computed extremes: {share('ett-extremes', SLIM, 'regimes_ett')}, with the conditioner "
        f"{share('ett-extremes', SLIM_C, 'regimes_ett')}, attention "
        f"{share('ett-extremes', 'softmax', 'regimes_ett')}; after four times as many steps {sensors[0]}, {sensors[1]} "
        f"and, with 16 heads, {sensors[2]} |",
        f"| none | {cost(use_conv=False, use_temperature=False, use_outer_gate=False)}, {single('L alone')} | [parts]"
        f"(results/regimes_parts.md): {share('peak', 'softmax+L')} of the variance; it is best with [64 sensors]"
        f"(results/regimes_peak64.md), {wide('softmax+L')} |",
        f"| {1.95}; [4 helped](results/regimes_starts.md) on one task of five, "
        f"`beta_max_init={math.log(math.expm1(4)):.2f}`, one pass in 40 comparisons, and is not advised | "
        f"{cost()}, {steps['FEM-SM']} | "
        f"{share('peak', FULL)} of the variance;",
        f"| {1.95} | {gla:.2f}, a state of fixed size, {single('FEM-GLA without C, slim')} | [parts]"
        "(results/regimes_parts.md): "
        f"{share('peak', 'gla+LTG/r4')} of the variance, GLA {share('peak', 'gla/norm')}; [GLA with more heads]"
        f"(results/regimes_heads.md) {gla_at_its_best('peak'):.2f}, after four times as many steps "
        f"{', slim FEM on it '.join(gla_later())} |",
        f"the layer then has {weights(conv_hidden=128, **GATE_AND_C) / bare:.2f} times attention's parameters",
        f"| {cost(**GATE_AND_C)}, a step [{step('ablate_16m_split_time', '+C,G/r8')}](results/ablate_16m.md) in a "
        f"model of {millions('ablate_16m_split_time')} parameters, [{two[NO_F_32]:.2f}](results/ablate_512_two.md) "
        f"in one of {millions('ablate_512_two')}, on Xeons; slim FEM {slower_step()}, on an EPYC, and "
        f"{two[SLIM_32]:.2f} |",
        f"{at_best_rates('+C,G/r8')} nats after 16M tokens, slim FEM {at_best_rates('full/r8')}, attention "
        f"{at_best_rates('-C,G,T,L')}, at its best rate",
        f"have {share('peak', f'{FULL}/thirds', 'regimes_thirds')}, one seed |",
        f"Up to 3.1M tokens full gates [led](language.md) at equal tokens; in equal time, [after 0.3M]"
        f"(results/ablate_time.md), they lost by {lead('ablate_time', '-C,G,T,L', 'full')} with the conditioner",
        f"| {cost(**ATTENTION)}, {single('FEM-SM -G,T,L')} | [MAD](results/mad_laptop.md)",
        f"| | 1.00, 1.00, with 16 heads of width 256 [{span(sixteen)}](results/heads_cpu.md) |",
        "| | 1.00, 1.00, 1.00 |",
        "to full ones up to [3.1M tokens](language.md)",
        f"by [{lead('ablate_10m', 'full', 'full/r8')} nats](results/ablate_10m.md)",
        f"{recalls('softmax+C')} steps to 99.9 %, full gates without C {recalls(OWN)}, slim gates without C not in "
        f"1,600, attention {recalls('softmax')}, one seed |",
        f"conditioner reaches {mad('softmax+C'):.1f} %, full FEM {mad(FULL):.1f} %, attention {mad('softmax'):.1f} %.",
        f"[{gained('gpt2', TRAINED):.3f} nats for a GPT-2]",
        f"[{gained('llama', TRAINED):.3f} for a Llama]",
        f"has {top1('cifar', FULL):.1f} against {top1('cifar', 'softmax'):.1f} % of 1,000, one rate, a difference of "
        f"{of_a_test_set(top1('cifar', FULL), top1('cifar', 'softmax'), 1000):.1f} standard errors of the test set",
        f"for {min(gates):.0f} to {max(gates):.0f} % more parameters: after 300 further steps it is "
        f"{short(gained('gpt2', 'attention+G'), 3)} to {short(gained('llama', 'attention+G'), 3)} nats below attention",
        f"attention; slim gates lose {lost[0]}, only L {lost[1]} ",
        f"has {pools[0]} on bags of digits at learning rate .003, with slim gates or full ones; at .006 full ones, its "
        f"default, have {pools[1]}; attention pooling {pools[2]} | {1.95} | | [bags]",
        f"log-sum-exp {pooled_lead[0]} above attention pooling, `FreeEnergyPooling` {pooled_lead[1]}; without "
        f"the smallest set, of 58 bags, log-sum-exp {unsigned(in_words(*pooled('lse', *SETS, without='ucsb')))} |",
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
        f"leads by {started('torch'):.1f} points instead of {started('normal'):.1f}.",
    ]
