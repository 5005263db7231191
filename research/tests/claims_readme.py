"""The README's first screen and what stands below."""

from collections import Counter

from claims import (
    DOUBLE,
    DOUBLED,
    FULL,
    PLAIN,
    SLIM_512,
    SLIM_C,
    TRAINED,
    after,
    at_best_rates,
    at_its_best,
    below,
    cached,
    extra_weights,
    gla_at_its_best,
    lead,
    mad,
    mse,
    percent,
    ratio,
    share,
    span,
    top1,
    weights,
    wide,
    with_heads,
)
from said import results


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
