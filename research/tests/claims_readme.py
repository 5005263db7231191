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
    gla_later,
    late,
    losses,
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
    with_conditioner,
    with_double,
    with_heads,
)
from said import results
from said_costs import fused_on_h100, recalled
from said_language import BROAD, NO_F_32, SLIM_32, heavier, twice_the_tokens, two_blocks_at_best
from said_natural import SETS, pooled
from said_tasks import MANY, after_8000, heads_step

from fem_research.common.paired import in_words


def recall(mixer: str) -> str:
    """Percent of MAD's three recall tasks at the end of training, the mean of three seeds."""
    return f"{mean(recalled('mad_laptop_conv' if mixer == BEHIND else 'mad_laptop', mixer, 'final')):.1f}"


def readme() -> list[str]:
    """The first screen's sentences, its table row by row, and what stands below."""
    types = Counter(found["result"] for found in results("clients")["model_types"])
    slim, memory, split = (
        [f"{ratio('layer', time, name, what, 'layer_cpu'):.2f}" for time in (512, 2048)]
        for name, what in (("slim with C", "train_s"), ("slim with C", "train_extra_bytes"), ("split", "train_s"))
    )
    card = fused_on_h100()
    lone = [f"{ratio('single', time, 'L alone', 'train_s', 'layer_single'):.2f}" for time in (512, 2048)]
    more = 100 * (weights(**SLIM_512) / weights(**PLAIN) - 1)
    pools = {
        name: percent("bags", f"pool:{name}", "regimes_pools", 1)
        for name in ("attention", "fem", "fem/r4", "max", "lse")
    }
    many, slim_64 = "softmax/h256/norope", "softmax+CLTG/r16"
    plain, alone, whole = (mean(two_blocks_at_best(row)) for row in ("-C,G,T,L", NO_F_32, SLIM_32))
    timed, slower = losses("ablate_16m_split_time"), losses("ablate_16m_time")
    ahead = {row: timed["-C,G,T,L"] - found for row, found in timed.items()}
    twice = [mean(twice_the_tokens(row)) for row in ("-C,G,T,L", BROAD)]
    conditioner = score("peak-64", "softmax+C/h256/norope", "regimes_peak64_parts")
    return [
        f"it explains {100 * score('peak-64', slim_64, WIDE_RUN):.0f} % of the variance. Attention with its best "
        f"number of heads explains {100 * score('peak-64', many, WIDE_RUN):.0f} %, and with the layer's sum over past "
        f"tokens, but without its maximum, {100 * conditioner:.0f} %; after four times as many training steps "
        f"attention alone has {100 * after_8000():.1f} %. Where the extremes are all that is needed, `torch.cummax` "
        f"between two linear maps has {100 * score('peak-64', 'cummax', 'regimes_peak64_cummax'):.0f} %.",
        f"as the whole layer does: at width 128 by {below('+C,G/r8')[:4]} nats per token, the whole layer by "
        f"{below('full/r8')[:4]}, at equal tokens; at width 512, with two blocks and fewer tokens, by "
        f"{short(plain - alone, 3)} and {short(plain - whole, 3)}, in nearly equal time.",
        f"| variance explained by slim FEM: {conditioner:.2f} → {wide(slim_64)} of 64 sensors, {with_conditioner()} → "
        f"{share('peak', SLIM_C)} of [16](results/regimes_heads.md) | {conditioner:.2f} and {with_conditioner()} are "
        f"attention with the conditioner and a head for every channel. Attention alone has {wide(many)} and "
        f"{at_its_best():.2f}, with values twice as wide {with_double()} of 16 sensors, and after four times as many "
        f"steps {after_8000():.3f} and {share('peak', MANY, 'regimes_heads_steps', 3)}. The log-sum-exp alone has "
        f"{wide('softmax+L')} and {share('peak', 'softmax+L')}, `torch.cummax` between two linear maps "
        f"{wide('cummax', 'regimes_peak64_cummax')} and {share('peak', 'cummax', 'regimes_heads')}. [A step]"
        f"(results/heads_cpu.md) of slim FEM takes {heads_step('32', 'slim FEM, 4'):.2f} times that "
        f"of attention with 4 heads at these 32 tokens, of the log-sum-exp alone "
        f"{heads_step('32', 'log-sum-exp alone, 4'):.2f}, of attention with 64 heads "
        f"{heads_step('32', 'attention, 64'):.2f}, with 64 and the conditioner "
        f"{heads_step('32', 'conditioner alone, 64'):.2f} |",
        f"latest {with_heads('snapshot', 'softmax')[:-2]} → {with_heads('snapshot', 'softmax/h16')}, "
        f"largest {with_heads('high-water', 'softmax')[:-2]} → {with_heads('high-water', 'softmax/h16')} | slim FEM "
        f"with 4 heads: {percent('snapshot', SLIM_C)}, {percent('high-water', SLIM_C)}. 16 heads take "
        f"[{heads_step('512', 'attention, 16'):.2f} times]",
        f"attention): {share('peak', 'gla/norm')} with 4 heads, {gla_at_its_best('peak'):.2f} with its best number "
        f"→ {share('peak', 'gla+LTG/r4')}; after four times as many steps {' → '.join(gla_later())} | `torch.cummax` "
        f"between two linear maps, also linear: {share('peak', 'cummax', 'regimes_heads')} |",
        f"accuracy: {pools['attention'][:-2]} → {pools['max']}, {pools['lse']} on bags of digits | FEM pooling "
        f"{pools['fem/r4']}, with slim gates or full ones, at learning rate .003; at .006 full gates, its default, "
        "have "
        f"{pools['fem']}, as some seeds fail. Over",
        f"it ties with attention pooling, a log-sum-exp is {unsigned(in_words(*pooled('lse', *SETS)))} ahead (± over "
        "their bags) |",
        f"| loss: {at_best_rates('-C,G,T,L')} → {at_best_rates('+C,G/r8')} nats per token | source code, 16M tokens, "
        f"width 128; all of slim FEM {at_best_rates('full/r8')}. [Two blocks of width 512](results/ablate_512_two.md), "
        "a wider conditioner, 8M tokens, nearly equal training time, one rate: "
        f"{twice[0]:.3f} → {twice[1]:.3f}. At width 128 in equal time, one seed and one rate each, they are "
        f"{ahead['+C,G/r8']:.3f} ahead, split values level ({ahead['-C/r8/s.5']:.3f}) and slim FEM "
        f"{slower['full/r8'] - slower['-C,G,T,L']:.3f} behind |",
        f"MAD, a synthetic suite: {recall('softmax')} → {recall('softmax+C')} %, with a convolution of four taps "
        f"{recall(BEHIND)} % | after the last step, at one learning rate; all of FEM has {recall(FULL)} %. Fuzzy "
        "recall, one of the three, falls on two seeds of three. At the [benchmark's own size]"
        "(results/mad_recall.md), one seed, attention recalls all too, after "
        f"{recalls('softmax')} steps, where the conditioner needs {recalls('softmax+C')} |",
        f"averages {share('statistics', 'softmax', digits=3)} → {share('statistics', SLIM_C, digits=3)} of the "
        f"variance; log {late('softmax')} → {late(SLIM_C)}; forecast MSE "
        f"{mse('forecast_etth1', 'ETTh1', 'softmax'):.3f} → {mse('forecast_etth1', 'ETTh1', FULL):.3f}; "
        f"trained GPT-2 {after('gpt2', 'attention'):.3f} → "
        f"{after('gpt2', TRAINED):.3f} nats | forecast and GPT-2 at one rate; in the log the free "
        "energy's share is within its errors, and a GRU is best with "
        f"{late('gru')}. The trained GPT-2 has "
        f"{heavier('finetune_gpt2', TRAINED):.0f} % more parameters with FEM",
        f"takes [{slim[0]} times](results/layer_cpu.md) as long at 512 tokens and {slim[1]} times at 2,048, and its "
        f"extra memory peaks at {memory[0]} and {memory[1]} times attention's; the cache holds {cached(**SLIM_512):,} "
        "bytes per token "
        f"instead of {cached(**PLAIN):,}, and there are {more:.0f} % more parameters.",
        f"`FreeEnergyMixerConfig.split`, which has no conditioner, {split[0]} and {split[1]} times, the log-sum-exp "
        f"alone [{lone[0]} and {lone[1]} times](results/layer_single.md), both with a cache no larger",
        f"takes [{card['softmax+LTG']:.2f} times](results/h100_layers.md) attention's step under full gates, "
        f"{card['softmax+LTG/r64/s.5']:.2f} times with split values, and {card['softmax+CLTG/r64']:.2f} times with",
        f"{types['right']} model types of transformers](results/clients.md) in all; {types['refused']} others",
    ]
