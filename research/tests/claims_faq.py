"""The FAQ's sections of figures."""

import math
from collections import Counter

import torch
from claims import (
    ATTENTION,
    DOUBLE,
    DOUBLED,
    FULL,
    OWN,
    PLAIN,
    SLIM,
    SLIM_512,
    SLIM_C,
    TRAINED,
    after,
    at_best_rates,
    at_its_best,
    cached,
    gla_at_its_best,
    lead,
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
    top1,
    weights,
)
from said import results

from fem import FreeEnergyMixer, FreeEnergyMixerConfig


def gained(model: str, mixer: str) -> float:
    return after(model, "attention") - after(model, mixer)


def scan(prior: str, length: str) -> float:
    return 1000 * results("scans_cpu")[prior]["train_s"][length]


def state(prior: str) -> float:
    """Kilobytes that a layer of width 256 keeps of a row: for softmax per token."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig.matched(n_embd=256, n_head=4, prior_type=prior))
    short, long = (layer(torch.zeros(1, tokens, 256), return_state=True)[1].nbytes for tokens in (1, 101))
    return (long - short) / 1e5 if prior == "softmax" else long / 1e3


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
