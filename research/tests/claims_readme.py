"""The README's first screen and what stands below."""

from collections import Counter
from statistics import mean

from claims import (
    BEHIND,
    FULL,
    PLAIN,
    SLIM_512,
    SLIM_C,
    TRAINED,
    WIDE_RUN,
    after,
    at_best_rates,
    at_its_best,
    below,
    cached,
    gla_at_its_best,
    late,
    level_later,
    losses,
    mad,
    mse,
    percent,
    ratio,
    recalls,
    score,
    share,
    short,
    unsigned,
    weights,
    wide,
    with_double,
    with_heads,
)
from said import results
from said_costs import FUZZY
from said_language import NO_F_32, SLIM_32, heavier, twice_the_tokens, two_blocks_at_best
from said_tasks import SETS, heads_step, pooled

from fem_research.common.paired import in_words

UNGATED = "softmax+CLT"


def readme() -> list[str]:
    """The first screen's sentences, its table row by row, and what stands below."""
    types = Counter(found["result"] for found in results("clients")["model_types"])
    slim, memory, split = (
        [f"{ratio('layer', time, name, what, 'layer_cpu'):.2f}" for time in (512, 2048)]
        for name, what in (("slim with C", "train_s"), ("slim with C", "train_extra_bytes"), ("split", "train_s"))
    )
    more = 100 * (weights(**SLIM_512) / weights(**PLAIN) - 1)
    pools = {
        name: percent("bags", f"pool:{name}", "regimes_pools", 1)
        for name in ("attention", "fem", "fem/r4", "max", "lse")
    }
    many, slim_64 = "softmax/h256/norope", "softmax+CLTG/r16"
    plain, alone, whole = (mean(two_blocks_at_best(row)) for row in ("-C,G,T,L", NO_F_32, SLIM_32))
    timed, slower = losses("ablate_16m_split_time"), losses("ablate_16m_time")
    twice = twice_the_tokens()
    later = score("peak-64", many, "regimes_peak64_8000")
    return [
        f"it explains {100 * score('peak-64', slim_64, WIDE_RUN):.0f} % of the variance, and attention with its best "
        f"number of heads {100 * score('peak-64', many, WIDE_RUN):.0f} % ({100 * later:.0f} % after four times",
        f"at width 128 they lower the loss by {below('+C,G/r8')[:4]} nats per token, the whole layer by "
        f"{below('full/r8')[:4]}, at equal tokens; at width 512, with two blocks and fewer tokens, by "
        f"{short(plain - alone, 3)} and {short(plain - whole, 3)}, in nearly equal time.",
        f"| variance explained: {wide(many)} → {wide(slim_64)} of 64 sensors, {share('peak', 'softmax')} → "
        f"{share('peak', SLIM_C)} of [16](results/regimes_heads.md) | `torch.cummax` between two linear maps: "
        f"{wide('cummax', 'regimes_peak64')}, {share('peak', 'cummax', 'regimes_heads_peak')}; the log-sum-exp alone, "
        f"without the other three parts: {wide('softmax+L')}, {share('peak', 'softmax+L')}. 64 sensors: 2,000 steps, "
        f"attention with 256 heads, its best number; after 8,000 steps it has {later:.2f}, and with "
        f"values twice as wide {wide('softmax/double/h256/norope', 'regimes_peak64_double')}, one seed each. 16 "
        f"sensors: 500 steps, 4 heads each; attention with 64 heads {at_its_best('peak'):.2f}, with 64 heads and "
        f"values twice as wide {with_double()}, after 2,000 steps {level_later():.2f}. Steps are equal, not time: at "
        f"these 32 tokens a slim FEM step [takes {heads_step('32', 'slim FEM, 4'):.2f} times](results/heads_cpu.md) "
        f"that of attention with 4 heads, 64 heads {heads_step('32', 'attention, 64'):.2f} |",
        f"latest {percent('snapshot', 'softmax', 'regimes_split')[:-2]} → {with_heads('snapshot', 'softmax/h16')}, "
        f"largest {percent('high-water', 'softmax')[:-2]} → {with_heads('high-water', 'softmax/h16')} | slim FEM with "
        f"4 heads: {percent('snapshot', SLIM_C)}, {percent('high-water', SLIM_C)}. 16 heads take "
        f"[{heads_step('512', 'attention, 16'):.2f} times]",
        f"explained: {share('peak', 'gla/norm')} → {share('peak', 'gla+LTG/r4')} of 16 sensors, over GLA (gated linear "
        f"attention) with 4 heads | GLA with its best number of heads: {gla_at_its_best('peak'):.2f}, one seed; more "
        "steps were not tried. `torch.cummax` between two linear maps, also linear: "
        f"{share('peak', 'cummax', 'regimes_heads_peak')} |",
        f"accuracy: {pools['attention'][:-2]} → {pools['max']}, {pools['lse']} on bags of digits | FEM pooling "
        f"with slim gates {pools['fem/r4']}, with full ones, its default, {pools['fem']}, at the next lower learning "
        f"rate {percent('bags', 'pool:fem', 'regimes_pools_rate3', 1)}; over",
        f"it ties with attention pooling, a log-sum-exp is {unsigned(in_words(*pooled('lse', *SETS)))} ahead |",
        f"| loss: {at_best_rates('-C,G,T,L')} → {at_best_rates('+C,G/r8')} nats per token | source code, 16M tokens, "
        f"width 128; all of slim FEM {at_best_rates('full/r8')}. [Two blocks of width 512](results/ablate_512_two.md), "
        f"4M tokens, nearly equal training time: {plain:.3f} → {alone:.3f}, all of slim FEM "
        f"{whole:.3f}; 8M tokens, one seed, a wider conditioner: {twice[0]:.3f} → {twice[1]:.3f}. "
        f"In equal time at width 128, one seed each, the gate and the conditioner are "
        f"{timed['-C,G,T,L'] - timed['+C,G/r8']:.3f} ahead of attention, slim FEM, at a lower rate, "
        f"{slower['full/r8'] - slower['-C,G,T,L']:.3f} behind |",
        f"MAD, a synthetic suite: {mad('softmax'):.1f} → {mad('softmax+C'):.1f} % over the training, "
        f"{mad('softmax', 'final'):.1f} → {mad('softmax+C', 'final'):.1f} % at its end | one of its three recall tasks "
        f"is lost, {mad('softmax', task=FUZZY):.1f} → {mad('softmax+C', task=FUZZY):.1f} %. All of "
        f"FEM {mad(FULL):.1f} %, without its outer gate {mad(UNGATED):.1f} %, a short convolution {mad(BEHIND):.1f} %; "
        f"at the end {mad(FULL, 'final'):.1f} %, {mad(UNGATED, 'final'):.1f} % and {mad(BEHIND, 'final'):.1f} %. One "
        f"learning rate and one initialisation; at the [benchmark's own size](results/mad_recall.md) attention recalls "
        f"all too, after {recalls('softmax')} steps for {recalls('softmax+C')} |",
        f"averages {share('statistics', 'softmax', digits=3)} → {share('statistics', SLIM_C, digits=3)} of the "
        f"variance; log {late('softmax')} → {late(SLIM_C)}; forecast MSE "
        f"{mse('forecast_etth1', 'ETTh1', 'softmax'):.3f} → {mse('forecast_etth1', 'ETTh1', FULL):.3f}; "
        f"trained GPT-2 {after('gpt2', 'attention'):.3f} → "
        f"{after('gpt2', TRAINED):.3f} nats | in the log the free energy's share is within its errors, and a GRU "
        "is best with "
        f"{late('gru')}. The trained GPT-2 has "
        f"{heavier('finetune_gpt2', TRAINED):.0f} % more parameters with FEM",
        f"takes [{slim[0]} times](results/layer_cpu.md) as long at 512 tokens and {slim[1]} times at 2,048, and adds "
        f"{memory[0]} and {memory[1]} times the memory; the cache holds {cached(**SLIM_512):,} bytes per token "
        f"instead of {cached(**PLAIN):,}, and there are {more:.0f} % more parameters.",
        f"`FreeEnergyMixerConfig.split`, which has no conditioner, {split[0]} and {split[1]} times, with a cache no "
        "larger",
        f"{types['right']} model types of transformers](results/clients.md) in all; {types['refused']} others",
    ]
