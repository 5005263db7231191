"""The page of all comparisons, line by line."""

from collections.abc import Iterable
from statistics import mean

from claims import (
    BEHIND,
    FULL,
    OWN,
    PLAIN,
    SLIM,
    SLIM_C,
    TRAINED,
    WIDE,
    after,
    at_best_rates,
    at_its_best,
    cached,
    gla_at_its_best,
    gla_later,
    late,
    lead,
    level_later,
    loss,
    losses,
    mad,
    millions,
    mse,
    percent,
    ratio,
    recalls,
    share,
    slower,
    slower_step,
    span,
    token,
    top1,
    unsigned,
    weights,
    wide,
    with_conditioner,
    with_double,
    with_heads,
)
from said import results
from said_language import (
    BROAD,
    NO_F_32,
    SLIM_32,
    SLIM_BROAD,
    SPLIT_BROAD,
    heavier,
    twice_the_tokens,
    two_blocks,
    two_blocks_at_best,
)
from said_natural import pooled
from said_tasks import after_8000, heads_step

from fem_research.common.paired import shown


def layer(mixer: str, *pages: str, part: str = "layer") -> str:
    """A train step and its memory, from the machine where it costs less to the other."""
    cells = ((512, "train_s"), (2048, "train_s"), (2048, "train_extra_bytes"))
    return " | ".join(span([ratio(part, time, mixer, what, page) for page in pages]) + "x" for time, what in cells)


def of_bags(mixer: str) -> str:
    return percent("bags", mixer, "regimes_bags", 1)


def paired_mad(mixer: str, other: str) -> str:
    """How many percent a row is ahead of another in the mean over training, seed by seed."""
    rows = results("mad_laptop")["mad"]["normal"]
    return shown(*(rows[row]["mean"]["average"]["seeds"] for row in (mixer, other)), 100, 1)


def the_three(row: str) -> str:
    return f"{share('peak', row)}, {percent('snapshot', row)}, {percent('high-water', row)}"


def of_nats(page: str, row: str = "full/r8") -> str:
    return f"{loss(page, '-C,G,T,L'):.3f} | {loss(page, row):.3f}"


def listed(ratios: Iterable[float]) -> str:
    *first, last = (f"{ratio:.2f}" for ratio in ratios)
    return f"{', '.join(first)} and {last}"


def natural(pool):
    """Per cent of right answers, averaged over the sets with natural labels."""
    return 100 * mean(mean(rows[f"pool:{pool}"]["right"]) for rows in results("natural")["natural"].values())


SNAPSHOT_64 = "regimes_snapshot64_2000"


def points(pool):
    return f"{100 * results('natural_points')['natural']['points'][f'pool:{pool}']['accuracy'][0]:.1f} %"


def lead_on_natural(pool):
    """What `natural` is ahead of attention pooling by, with the standard error of the difference, paired by bag."""
    lead, error = (100 * x for x in pooled(pool, "natural"))
    return f"{lead:.1f} ± {error:.1f}".replace("0.", ".")


def summary() -> list[str]:
    argmax = results("argmax")
    hits = {name: 100 * mean(argmax["argmax"][name]["hits"]) for name in ("softmax", "fem")}
    (with_32,) = {round(100 * mean(found["hits"]), 1) for found in results("argmax_heads32")["argmax"].values()}
    constant = 100 * argmax["baselines"]["its mean and the best constant"]["hits"]
    full = "FEM-SM"
    at_10m = losses("ablate_10m")
    extra = [heavier(f"finetune_{model}", TRAINED) for model in ("gpt2", "llama")]
    ett, sensors, longer = ("ett-extremes", "ett-events"), "regimes_ett", "regimes_ett_steps"
    events_later = f"{longer}_events"
    gla, gla_slim, gla_full = "gla/norm", "gla+LTG/r4", "gla+LTG"
    sizes = {
        model: mse("forecast_ett96", "ETTm1", model, "parameters")
        for model in ("patchtst", "itransformer", "femforecaster", "dlinear")
    }
    mses = {
        model: ", ".join(f"{mse('forecast_ett96', data, model):.3f}" for data in ("ETTm1", "ETTh2")) for model in sizes
    }
    timed = losses("ablate_16m_split_time")
    gained_lt = paired_mad("softmax+CLT", "softmax+C")
    plain, alone, whole = (mean(two_blocks_at_best(row)) for row in ("-C,G,T,L", NO_F_32, SLIM_32))
    broad = mean(two_blocks(BROAD, 0.001))
    late_plain, late_broad, late_slim, late_wider, late_split = (
        ", ".join(f"{nats:.3f}" for nats in twice_the_tokens(row))
        for row in ("-C,G,T,L", BROAD, SLIM_32, SLIM_BROAD, SPLIT_BROAD)
    )
    lost = results("ablate_time")["ablate"]["full"]["below attention, paired"]
    lengths = ("32", "512", "2048")
    with_4 = {
        name: listed(heads_step(tokens, f"{name}, 4") for tokens in lengths)
        for name in ("log-sum-exp alone", "slim FEM without C", "slim FEM")
    }
    return [
        f"3 seeds | {share('peak', 'softmax')} | {share('peak', SLIM_C)} | the free energy, given width: slim "
        f"{share('peak', SLIM_C)}, without C {share('peak', SLIM)}; full gates {share('peak', FULL)}, without C "
        f"{share('peak', OWN)}; outer gate alone {share('peak', 'softmax+G')}. [Attention with a head for every "
        f"channel](regimes_heads.md): {at_its_best():.2f}, with values twice as wide "
        f"{with_double()}, with the conditioner {with_conditioner()}, after 2,000 steps {level_later():.2f} |",
        f"| {percent('snapshot', 'softmax', 'regimes_split')}, [at a lower rate](regimes_split.md) than the page's "
        f"{percent('snapshot', 'softmax')} | {percent('snapshot', SLIM_C)} | slim {percent('snapshot', SLIM_C)}, "
        f"without C {percent('snapshot', SLIM)}, the conditioner alone {percent('snapshot', 'softmax+C')}, L alone "
        f"{percent('snapshot', 'softmax+L')}, full {percent('snapshot', FULL)}. Heads do it as well: "
        f"[attention with 8](regimes_heads.md) {with_heads('snapshot', 'softmax/h8')} |",
        f"| {percent('high-water', 'softmax')} | {percent('high-water', SLIM_C)} | slim "
        f"{percent('high-water', SLIM_C)}, without C {percent('high-water', SLIM)}, L alone "
        f"{percent('high-water', 'softmax+L')}, full {percent('high-water', FULL)}. Heads do it as well: "
        f"[attention with 16](regimes_heads.md) {with_heads('high-water', 'softmax/h16')} |",
        f"| {the_three(gla)} | {the_three(gla_slim)} | slim without C; full without C {the_three(gla_full)}. [GLA "
        f"with more heads](regimes_heads.md): {gla_at_its_best('peak'):.2f}, "
        f"{100 * gla_at_its_best('snapshot'):.0f} %, {100 * gla_at_its_best('high-water'):.0f} % at its best; "
        f"on the first, after 2,000 steps, {' and '.join(gla_later())} |",
        f"3 seeds | {share(ett[0], 'softmax', sensors)} | {share(ett[0], SLIM_C, sensors)} | slim "
        f"{share(ett[0], SLIM_C, sensors)}, without C {share(ett[0], SLIM, sensors)}, L alone "
        f"{share(ett[0], 'softmax+L', sensors)}, split values {share(ett[0], f'{SLIM}/s.5', sensors)}, full without C "
        f"{share(ett[0], OWN, sensors)}; the conditioner alone {share(ett[0], 'softmax+C/h16', 'regimes_ett_rivals')} "
        f"with 16 heads, the outer gate alone {share(ett[0], 'softmax+G/h8/r4', sensors)} with 8. After 2,000 steps "
        f"attention {share(ett[0], 'softmax/h16', longer)} with 16 heads, with the conditioner "
        f"{share(ett[0], 'softmax+C/h16', longer)}, slim {share(ett[0], SLIM_C, longer)} |",
        f"| {percent(ett[1], 'softmax', sensors, 1)} | {percent(ett[1], SLIM_C, sensors, 1)} | slim "
        f"{percent(ett[1], SLIM_C, sensors, 1)}, without C {percent(ett[1], SLIM, sensors, 1)}, L alone "
        f'{percent(ett[1], "softmax+L", sensors, 1)}; always "no" '
        f"{100 * results(sensors)['constants'][ett[1]]:.1f} %. After 2,000 steps attention "
        f"{percent(ett[1], 'softmax/h16', events_later, 1)} with 16 heads, slim "
        f"{percent(ett[1], SLIM_C, events_later, 1)} |",
        f"one seed, one rate | {percent('snapshot-64', 'softmax/h64', SNAPSHOT_64)} with 64 heads | "
        f"{percent('snapshot-64', 'softmax+LTG/r16', SNAPSHOT_64)} | loses, slim without C;",
        f"| {of_bags('softmax+C/h32/norope')} with the conditioner, 32 heads and no position code, "
        f"{of_bags('softmax/h16')} with 16 heads alone | "
        f"{of_bags(SLIM)} with 4 heads | heads do it as well: attention with 4 has {of_bags('softmax')}. Slim without "
        f"C; with it {of_bags(SLIM_C)}, full {of_bags(FULL)}, L alone {of_bags('softmax+L')} |",
        f"3 seeds | {late('softmax')} | {late(SLIM_C)} | not the free energy: slim FEM without C {late(SLIM)}, L alone "
        f"{late('softmax+L')}, the conditioner alone {late('softmax+C')}, a short convolution {late(BEHIND)}; "
        f"a GRU {late('gru')} |",
        f"3 seeds | {wide('softmax/h256/norope')} | {wide('softmax+LTG/r16')} | slim without C "
        f"{wide('softmax+LTG/r16')}, with it {wide('softmax+CLTG/r16')}, L alone {wide('softmax+L')};",
        f"which has {wide('softmax+C/h256/norope', 'regimes_peak64_parts')} with the conditioner, and without it "
        f"{after_8000():.3f} after 8,000 steps |",
        f"the conditioner alone {top1('cifar_slim', 'softmax+C'):.1f} %, slim FEM "
        f"{top1('cifar_slim', f'{FULL}/r6'):.1f} %, split values {top1('cifar_slim', f'{FULL}/r6/s.5'):.1f} % |",
        f"| {percent('bags', 'pool:attention', 'regimes_pools', 1)} | "
        f"{percent('bags', 'pool:fem/r4', 'regimes_pools', 1)} | slim, and full gates at the same rate (.003) "
        f"{percent('bags', 'pool:fem', 'regimes_pools_rate3', 1)}; at .006 they have "
        f"{percent('bags', 'pool:fem', 'regimes_pools', 1)}; maximum "
        f"{percent('bags', 'pool:max', 'regimes_pools', 1)}, log-sum-exp "
        f"{percent('bags', 'pool:lse', 'regimes_pools', 1)} |",
        f"| {natural('attention'):.1f} % | {natural('fem'):.1f} % | level (+{lead_on_natural('fem')}); "
        f"maximum {natural('max'):.1f} %, log-sum-exp {natural('lse'):.1f} % |",
        f"one repeat | {points('attention')} | {points('fem')} | loses, slim {points('fem/r4')}; log-sum-exp "
        f"{points('lse')}, maximum "
        f"{points('max')}, mean {points('mean')} |",
        f"| {share('statistics', 'softmax', digits=3)} | {share('statistics', SLIM, digits=3)} | none: the mean is "
        f"right here; L alone loses, {share('statistics', 'softmax+L', digits=3)} |",
        f"| {hits['softmax']:.1f} % with 4 heads | {hits['fem']:.1f} % with 4 heads | heads do it as well: with one "
        f"for each of 32 channels both hit {with_32:.1f} %, one seed; attention's mean plus the best constant hits "
        f"{constant:.0f} % |",
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
        f"{of_nats('ablate_16m_time')} | slim gates lose: their step takes {slower_step()} times attention's; at "
        f".004 the slim outer gate and the conditioner alone have {timed['+C,G/r8']:.3f}, split values "
        f"{timed['-C/r8/s.5']:.3f}, attention {timed['-C,G,T,L']:.3f} |",
        f"[{millions(WIDE)}, in equal time](ablate_512_time.md), one block of width 512, 4M tokens, one seed, one "
        f"rate | {of_nats(WIDE, 'full/r32')} | not the free energy: the slim outer gate and the conditioner alone have "
        f"{loss(WIDE, '+C,G/r32'):.3f}; split values {loss(WIDE, '-C/r32/s.5'):.3f} |",
        f"[{millions('ablate_512_two')}, in nearly equal time](ablate_512_two.md), two blocks of width 512, 4M "
        f"tokens, 2 seeds, two rates | {plain:.3f} | {whole:.3f} | not the free energy: the slim outer gate and the "
        f"conditioner alone have {alone:.3f}; with a wider conditioner {broad:.3f} |",
        f"[on GLA, 0.3M tokens](ablate_gla.md), 3 seeds | {of_nats('ablate_gla', 'full')} | ",
        f"| {after('gpt2', 'attention'):.3f}, {after('llama', 'attention'):.3f} | {after('gpt2', TRAINED):.3f}, "
        f"{after('llama', TRAINED):.3f} | with {min(extra):.0f} to {max(extra):.0f} % more parameters",
        f"| {mad('softmax'):.1f} % | {mad(FULL):.1f} % | the conditioner alone {mad('softmax+C'):.1f} %, a short "
        f"convolution {mad(BEHIND):.1f} %; L and T bring "
        f"it {gained_lt}, the outer gate",
        f"steps to 99.9 %, one seed | {recalls('softmax')} | {recalls(FULL)} | the conditioner; full gates "
        f"without it {recalls(OWN)}, slim ones not in 1,600 |",
        f"| {top1('cifar', 'softmax'):.1f} % | {top1('cifar', FULL):.1f} % |",
        f"| {top1('digits', 'softmax'):.1f} % | {top1('digits', FULL):.1f} % |",
        f"| {mse('forecast_etth1', 'ETTh1', 'softmax'):.3f} | {mse('forecast_etth1', 'ETTh1', FULL):.3f} | a tie; "
        f"without any mixer {mse('forecast_etth1', 'ETTh1', 'none'):.3f} |",
        f"| {mses['patchtst']} (PatchTST, {sizes['patchtst']:,} parameters); {mses['itransformer']} (iTransformer, "
        f"{sizes['itransformer']:,}) | {mses['femforecaster']} (`FEMForecaster`, {sizes['femforecaster']:,}) | not at "
        "equal parameters, not taken apart; level on ETTm1 with iTransformer and DLinear; DLinear "
        f"({sizes['dlinear']:,}) {mses['dlinear']} |",
        f"2 seeds, one rate | {late_plain} | {late_wider}, first seed | slim with a wider conditioner, {late_slim} "
        f"without; the slim outer gate and the wider conditioner alone have {late_broad}, split values with it "
        f"{late_split} |",
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
        *(
            f"{shown} (Xeon alone) | {layer(name, 'layer_single', part='single')} |"
            for shown, name in (
                ("| [the log-sum-exp alone](layer_single.md), without gates", "L alone"),
                ("| [the conditioner alone](layer_single.md)", "FEM-SM -G,T,L"),
                ("| [the slim outer gate and the conditioner](layer_single.md)", "C and G, slim"),
                (
                    "| [slim gates of rank 32 on a GLA prior](layer_single.md), without the conditioner",
                    "FEM-GLA without C, slim",
                ),
            )
        ),
        f"{slower('cifar'):.1f} to {slower('digits'):.1f} times at 65 and 17 tokens of small width",
        *(listed(heads_step(tokens, f"attention, {heads}") for heads in (16, 64, 128)) for tokens in lengths),
        f"with 4 heads the log-sum-exp alone {with_4['log-sum-exp alone']} times, slim FEM "
        f"{with_4['slim FEM without C']} times without the conditioner, {with_4['slim FEM']} with it.",
        "1.8M, 4M and 16M tokens are program source",
        "equal time [after 0.3M tokens](ablate_time.md)",
        "[3.1M tokens](ablate_3m.md)",
        f"loses {unsigned(lost)} nats to attention",
        f"one at a time, with full gates: {token(full)} times attention's time, {token(f'{full} without C')} without "
        f"the conditioner, and then {token(f'{full} without C', 'served')} where both are compiled; on "
        f"[another day](decode_split.md) {token(full, page='decode_split')} and "
        f"{token(f'{full} without C', page='decode_split')}. Slim gates without the conditioner: "
        f"{token('slim', page='decode_split')}, split values {token('split', page='decode_split')}.",
        f"with a GLA prior {ratio('decode', 16384, 'FEM-GLA', 'state_bytes'):.3f} times as large at 16k tokens",
    ]
