"""What the pages on tasks say, in the text's order: the regimes and the argmax task."""

import sys
from collections.abc import Sequence
from statistics import mean

from said import MEASURED, PAGES, recipe, results, span

from fem_research.common.paired import paired, spread

ATTENTION, GATE, ALONE, FULL, SLIM = "softmax", "softmax+G", "softmax+L", "softmax+LTG", "softmax+LTG/r4"
C, CG, FULL_C, SLIM_C = "softmax+C", "softmax+CG", "softmax+CLTG", "softmax+CLTG/r4"
MANY, DOUBLE, MANY_C = "softmax/h64/norope", "softmax/double/h64/norope", "softmax+C/h64/norope"
PARTS, DOUBLED = "regimes_parts", "regimes_double_peak"
GLA, GLA_FULL, GLA_SLIM = "gla/norm", "gla+LTG", "gla+LTG/r4"
EXTREMES, FIELDS = ("peak", "high-water"), ("snapshot", "high-water")
OF_FEM = ("log-sum-exp alone, 4", "slim FEM without C, 4", "slim FEM, 4")
LAYERS = ("attention, 64", "attention, 128", *OF_FEM)  # of the page on what heads cost
PAPER = (100, 2)  # Appendix P, T = 128, D = 512: per cent of winners that FEM and, at most, softmax find


def seeds(page: str, task: str, mixer: str) -> list[float]:
    return results(page)["regimes"][task][mixer]["test"]


def scores(page: str, task: str, *mixers: str) -> list[float]:
    return [mean(seeds(page, task, mixer)) for mixer in mixers]


def percents(page: str, task: str, *mixers: str) -> list[float]:
    return [100 * score for score in scores(page, task, *mixers)]


def named(page: str, part: str) -> tuple[str, ...]:
    """The mixers of a page with this part of a name."""
    return tuple(mixer for mixer in next(iter(results(page)["regimes"].values())) if part in mixer)


def on_each(page: str, mixers: tuple[str, ...], tasks: tuple[str, ...] = EXTREMES) -> list[float]:
    """The scores of one mixer after the other, each on all tasks."""
    return [score for mixer in mixers for task in tasks for score in scores(page, task, mixer)]


def share_and_percent(page: str, *mixers: str) -> list[float]:
    """Of peak the explained variance, of high-water the per cent that are right."""
    return [x for mixer in mixers for x in (*scores(page, "peak", mixer), *percents(page, "high-water", mixer))]


def leads(page: str, tasks: tuple[str, ...], ours: str, theirs: str = SLIM, beside: str | None = None) -> list[float]:
    """Of every task the mean and the standard error of ours - theirs, seed by seed."""
    return [x for task in tasks for x in paired(seeds(page, task, ours), seeds(beside or page, task, theirs))]


def spreads(page: str, task: str, *mixers: str) -> tuple[float, float]:
    return span([spread(seeds(page, task, mixer)) for mixer in mixers])


def rates(page: str) -> list[float]:
    """Those that every row of the page tried."""
    rows = [row for task in results(page)["regimes"].values() for row in task.values()]
    (tried,) = {tuple(row["validation_by_rate"]) for row in rows}
    return [float(rate) for rate in tried]


def rate(page: str, task: str, mixer: str) -> float:
    return float(results(page)["regimes"][task][mixer]["learning_rate"])


def by_twice_the_rate(page: str, beside: str, task: str) -> list[float]:
    """What the validation of every row of `beside` gains at the rate .096, over its .048 on `page`."""
    at_48, at_96 = (results(run)["regimes"][task] for run in (page, beside))
    return [at_96[row]["validation_by_rate"]["0.096"] - at_48[row]["validation_by_rate"]["0.048"] for row in at_96]


def heads_step(length: str, layer: str) -> float:
    """A train step over that of attention with 4 heads, in a layer of width 256."""
    steps = results("heads_cpu")["train_s"][length]
    return steps[f"{layer} heads"] / steps["attention, 4 heads"]


def hits(page: str, mixer: str) -> float:
    return 100 * mean(results(page)["argmax"][mixer]["hits"])


def regimes() -> list[float]:
    page = "regimes"
    with_mean = [mixer for mixer in results(page)["regimes"]["statistics"] if mixer != ALONE]
    slim, attention, best = scores(page, "statistics", SLIM, ATTENTION, CG)
    return [
        *share_and_percent(page, ATTENTION),
        *leads(PARTS, EXTREMES, C, ATTENTION)[::2],
        *share_and_percent(page, FULL, SLIM),
        *(*percents(page, "snapshot", SLIM, ALONE), *span(seeds(page, "snapshot", ALONE))),
        *(*percents(page, "snapshot", CG, FULL, ATTENTION), *percents("regimes_split", "snapshot", ATTENTION)),
        *(min(scores(page, "statistics", *with_mean)), *scores(page, "statistics", ALONE), attention - slim),
        *(*scores(DOUBLED, "peak", MANY, DOUBLE), *scores("regimes_heads_64", "peak", MANY_C)),
        *(attention - slim, best - slim, *rates(page), max(rates(page))),
    ]


def regimes_ett() -> list[float]:
    page, asked, events, gate, many = "regimes_ett", ("ett-extremes",), "ett-events", "softmax+G/h8/r4", "softmax+C/h16"
    rivals, once, higher, longer = (f"{page}_{run}" for run in ("rivals", "screen", "rate96", "steps"))
    without_code, more, gla = named(once, "/norope"), ("/h8", "/h16"), "gla/h16/norm"
    narrow = [row for row in named(once, "softmax") if "/h32" in row and row not in without_code]
    free = [row for row in named(page, "L") if row.startswith("softmax") and any(heads in row for heads in more)]
    gains = [100 * gain for gain in by_twice_the_rate(higher, higher, events)]
    edge = f"{higher}_extremes"
    *_, second, first = sorted(by_twice_the_rate(edge, edge, *asked))
    lost = [-gain for gain in by_twice_the_rate(longer, f"{longer}_rate96", *asked)]
    later = f"{longer}_events"
    moved = [100 * gain for gain in by_twice_the_rate(later, f"{later}_rate96", events)]

    def shown(*mixers: str) -> list[float]:
        """Of extremes the explained variance, of events the per cent that are right."""
        return [x for m in mixers for x in (*scores(page, *asked, m), *percents(page, events, m))]

    def over(rows: Sequence[str]) -> list[float]:
        """The ends of the scores of rows with one run, of extremes and of events."""
        return [*span(scores(once, *asked, *rows)), *span(percents(once, events, *rows))]

    return [
        *scores(page, *asked, SLIM_C, SLIM, f"{SLIM}/s.5", ALONE, ATTENTION, "softmax/h32"),
        *scores(page, *asked, gate, f"{GATE}/r4", f"{GATE}/h16/r4", many, C, f"{C}/h8"),
        *scores(rivals, *asked, "softmax+CG/r4", "softmax+CG/h8/r4"),
        *(x for mixer in (ATTENTION, gate, many) for x in leads(page, asked, SLIM_C, mixer)),
        *scores(page, *asked, FULL),
        *(*leads(longer, asked, SLIM_C, many), *scores(longer, *asked, ATTENTION, "softmax/h16", many, SLIM_C, SLIM)),
        *(x for mixer in ("softmax/h16", many) for x in leads(longer, asked, SLIM_C, mixer)),
        *(0.05, rate(longer, *asked, many), *span(rates(longer)), *rates(f"{longer}_rate96"), *span(lost)),
        *percents(page, events, SLIM_C, SLIM, ALONE, ATTENTION),
        *(100 * x for x in leads(page, (events,), SLIM_C, ATTENTION)),
        *(*percents(page, events, gate), 100 * results(page)["constants"][events]),
        *percents(later, events, SLIM_C, SLIM, ATTENTION, "softmax/h16", many, gate),
        *(100 * x for mixer in ("softmax/h16", many, gate) for x in leads(later, (events,), SLIM_C, mixer)),
        *(rate(later, events, SLIM), *span(rates(later)), *rates(f"{later}_rate96")),
        *(*span([-gain for gain in moved if gain < 0]), *span([gain for gain in moved if gain > 0])),
        *percents(f"{later}_rate96_slim", events, SLIM),
        *(100 * x for row in ("softmax/h16", gate) for x in leads(f"{later}_rate96_slim", (events,), SLIM, row, later)),
        *shown(GLA_SLIM, "gla+LTG/h8/r4", "gla+LTG/h16/r4", gla),
        *leads(page, asked, GLA_SLIM, gla),
        *(100 * x for x in leads(page, (events,), GLA_SLIM, gla)),
        *(*shown("cummax", "gru"), *scores(page, *asked, f"{ALONE}/h8")),
        *shown("softmax/norope", "softmax/h8/norope", "softmax/h16/norope"),
        *shown(f"{GATE}/norope/r4", f"{GATE}/h16/norope/r4"),
        *(*span(scores(page, *asked, *free)), *span(percents(page, events, *free))),
        *(rate(once, events, narrow[0]), *over(without_code), *over(narrow), *over(("gla+LTG/h32/r4",))[::2]),
        *(*span(rates(page)), max(rates(higher)), *span([gain for gain in gains if gain > 0])),
        *(max(rates(edge)), first, *scores(f"{higher}_gla", *asked, "gla+LTG/h8/r4")),
        *(rate(page, *asked, "gla+LTG/h8/r4"), second),
    ]


def tables_of_heads() -> list[float]:
    """The numbers of the tables that docs/figures/heads.py prints from the JSON."""
    sys.path.insert(0, str(PAGES.parents[1] / "docs" / "figures"))
    from heads import TASKS, at_their_best, grid

    return [float(number) for number in MEASURED.findall("\n".join([at_their_best(), *map(grid, TASKS)]))]


def regimes_heads() -> list[float]:
    page, long, many = (f"regimes_heads{more}" for more in ("", "_steps", "_64"))
    means, recalled = f"{page}_statistics", f"{page}_recall"
    log_sum_exps = [row for row in results(means)["regimes"]["statistics"] if row.split("/")[0] == ALONE]
    without_code = [row for row in named(page, "/norope") if not row.startswith("softmax+C")]
    split = named(page, "/s.5")
    of_kind = [
        [row for row in named(page, kind) if row.split("/")[0] == kind and row not in split]
        for kind in (ALONE, FULL_C, FULL)
    ]
    gate, conditioner, attention = "softmax+G/h32/norope/r4", "softmax+C/h32/norope", "softmax/h32/norope"
    lost = "gla+LTG/h32/r4"
    gate_64, both_64 = "softmax+G/h64/norope/r4", "softmax+CG/h64/norope/r4"
    over_double = leads(DOUBLED, ("peak",), SLIM, DOUBLE)
    sixteen = [row for row in named(page, "softmax") if "/h16" in row and "norope" not in row]
    soft = [row for row in results(recalled)["regimes"]["recall"] if row.startswith("softmax")]
    narrow = [row for row in soft if "/h32" in row and "norope" not in row]
    on_gla = [f"gla{row}" for row in ("/norm", "/h8/norm", "/h16/norm", "+LTG/r4", "+LTG/h8/r4", "+LTG/h16/r4")]
    return [
        *span(rates(page)),
        *percents(page, "snapshot", "softmax/h8", ATTENTION, SLIM_C),
        max(percents(page, "snapshot", *without_code)),
        *percents(page, "high-water", "softmax/h16", "softmax/h8/norope", ATTENTION, SLIM_C),
        *scores(page, "peak", attention, gate, conditioner, SLIM_C, f"{FULL_C}/h32/norope/r4"),
        *scores(many, "peak", MANY_C, both_64, gate_64),
        *scores(DOUBLED, "peak", MANY, DOUBLE),
        *paired(seeds(page, "peak", SLIM_C), seeds(many, "peak", MANY_C)),
        *scores(page, "peak", ALONE),
        *(*scores(long, "peak", MANY, SLIM_C, attention), rate(long, "peak", MANY)),
        *(end for rows in (*of_kind, split) for end in span(scores(page, "peak", *rows))),
        100 * min(on_each(page, sixteen, FIELDS)),
        *(*scores(DOUBLED, "peak", SLIM), *over_double),
        *scores("regimes_double", "peak", "softmax/double", ATTENTION),
        *(x for task in FIELDS for x in percents(page, task, "softmax/conv", C)),
        *scores(page, "peak", "softmax/conv", C),
        *(*scores(page, "peak", "cummax"), *percents(page, "high-water", "cummax")),
        *(*percents(page, "snapshot", "cummax", "gru"), *percents(page, "high-water", "gru")),
        *scores(page, "peak", "gru"),
        *(*percents(page, "snapshot", "gla/h8/norm"), *percents(page, "high-water", "gla/h16/norm")),
        *percents(page, "high-water", "gla+LTG/h16/r4"),
        *(x for run in (page, f"{page}_gla_steps") for x in scores(run, "peak", "gla/h16/norm", "gla+LTG/h8/r4")),
        *(*scores(page, "peak", "gla/h32/norm"), *percents(page, "high-water", "gla/h32/norm")),
        *percents(page, "snapshot", "gla/h32/norm"),
        *(*scores(page, "peak", lost), *(x for task in FIELDS[::-1] for x in percents(page, task, lost))),
        *(*span(rates(means)), *scores(means, "statistics", ATTENTION, "softmax/h16", SLIM_C, f"{C}/h8")),
        *(*leads(means, ("statistics",), f"{C}/h8", ATTENTION), max(scores(means, "statistics", *log_sum_exps))),
        *scores(means, "statistics", "softmax/h32", "gla/h32/norm"),
        min(percents(recalled, "recall", *(row for row in soft if row not in narrow))),
        *span(percents(recalled, "recall", *narrow)),
        *percents(recalled, "recall", *on_gla),
        *(100 * score for score in on_each(page, ("softmax/h32",), ("high-water", "snapshot"))),
        *(heads_step("32", layer) for layer in ("log-sum-exp alone, 4", "slim FEM, 4")),
        *(heads_step("32", layer) for layer in ("attention, 64", "conditioner alone, 64")),
        *tables_of_heads(),
    ]


def regimes_layers() -> list[float]:
    page = "regimes_layers"
    return [
        *(*on_each(page, (ATTENTION,)), *on_each("regimes", (ATTENTION,)), *on_each(page, (ALONE, SLIM, FULL))),
        *rates(page),
    ]


def regimes_parts() -> list[float]:
    page = PARTS
    low, best = span(scores(page, "statistics", *results(page)["regimes"]["statistics"]))
    alone, full, attention, slim = scores(page, "statistics", ALONE, FULL_C, ATTENTION, SLIM_C)
    return [
        *scores(page, "peak", ATTENTION, ALONE, "softmax+LT", FULL, SLIM, SLIM_C),
        *scores(page, "high-water", ATTENTION, ALONE, "softmax+LT", FULL, SLIM),
        *(end for task in EXTREMES for end in span(scores(page, task, C, GATE, CG))),
        *(*on_each(page, (GLA, GLA_FULL, GLA_SLIM)), *scores(page, "snapshot", SLIM_C, SLIM, GLA_SLIM, C)),
        *(*span(scores(page, "snapshot", FULL, FULL_C, GLA_FULL, "gla+CLTG")), *scores(page, "snapshot", ATTENTION)),
        *(best - low, alone, full, attention, attention - slim),
        *(*scores(page, "peak", SLIM_C, SLIM), *leads(page, ("peak",), SLIM_C)),
        *(*scores(page, "snapshot", SLIM_C, SLIM), *leads(page, ("snapshot", "high-water"), SLIM_C)),
        *leads("regimes_peak64_seeds", ("peak-64",), "softmax+CLTG/r16", "softmax+LTG/r16"),
        *on_each(page, (GLA_SLIM, GLA), (*EXTREMES, "snapshot")),
        *(leads(page, ("statistics",), GLA_SLIM, GLA_FULL)[0], attention - slim, best - slim),
    ]


def after_8000() -> float:
    """What attention with 256 heads explains of 64 sensors then, on three seeds in two files."""
    pages = ("regimes_peak64_8000", "regimes_peak64_8000_seeds")
    return mean(seed for page in pages for seed in seeds(page, "peak-64", "softmax/h256/norope"))


def regimes_peak64() -> list[float]:
    page, task, fields = "regimes_peak64", "peak-64", "regimes_snapshot64"
    three, early, slim, slim_c, best = (
        f"{page}_seeds",
        f"{page}_500",
        "softmax+LTG/r16",
        "softmax+CLTG/r16",
        "softmax/h256/norope",
    )
    conditioner = "softmax+C/h256/norope"
    by_heads = (*(f"softmax/h{heads}/norope" for heads in (16, 64, 128)), best)
    attention = [mixer for mixer in results(early)["regimes"][task] if "+" not in mixer]
    return [
        *scores(three, task, slim, slim_c, "softmax+L", best),
        *scores(f"{page}_parts", task, conditioner, "softmax+G/h256/norope/r16"),
        *paired(seeds(three, task, slim), seeds(f"{page}_parts", task, conditioner)),
        *(*leads(three, (task,), slim, best), *leads(three, (task,), "softmax+L", slim_c)),
        *(*leads(three, (task,), "softmax+L", slim), *span(rates(f"{page}_parts"))),
        *(*scores(f"{page}_double", task, "softmax/double/h256/norope"), *scores(page, task, best)),
        *rates(f"{page}_double"),
        *(after_8000(), *scores(page, task, *by_heads)),
        *(heads_step(length, layer) for length in ("32", "512") for layer in LAYERS),
        *(
            *scores(page, task, "softmax+CG/r16", "softmax+LTG/r16/s.5", "gru"),
            *scores(f"{page}_cummax", task, "cummax"),
        ),
        *(*span(scores(early, task, *attention)), *scores(early, task, slim_c)),
        *percents(fields, "snapshot-64", "softmax/h16", "softmax/h64", slim),
        *(*percents(f"{fields}_2000", "snapshot-64", "softmax/h64", slim), *rates(f"{fields}_2000")),
        *scores("regimes_peak128", "peak-128", slim_c, slim, best, "softmax+L", "cummax"),
        *(*rates("regimes_peak128"), *scores("regimes_peak128_8000", "peak-128", slim, best)),
        *(*rates(page), max(rates(three)), rate(three, task, slim), rate(f"{page}_parts", task, conditioner)),
        rate(page, task, "softmax+CG/r16"),
    ]


def regimes_flights() -> list[float]:
    page, task = "regimes_flights", ("flights",)
    gru, narrow, blind, both = "gru", "softmax/h8", "softmax/norope", "softmax+CG/r4"
    every = [results(page)["regimes"]["flights"][row]["test"] for row in results(page)["regimes"]["flights"]]
    return [
        *(*scores(page, "flights", ATTENTION), *leads(page, task, ALONE, ATTENTION)),
        *(*leads(page, task, SLIM, ATTENTION), *leads(page, task, SLIM_C, both)),
        *(*leads(page, task, C, ATTENTION), 4.3, *leads(page, task, both, ATTENTION)),  # 4.3 of Student's t
        *(*scores(page, "flights", gru), *leads(page, task, gru, SLIM_C), *leads(page, task, blind, ATTENTION)),
        *(*leads(page, task, narrow, ATTENTION), *scores(page, "flights", "cummax", GLA, GLA_SLIM)),
        *(*rates(page), rates(page)[0], max(max(of) - min(of) for of in every)),
    ]


def regimes_thirds() -> list[float]:
    page, parts = "regimes_thirds", PARTS
    full, bare = f"{FULL_C}/thirds", f"{FULL}/thirds"
    first = {
        (task, mixer): seeds(parts, task, mixer)[0]
        for task in results(page)["regimes"]
        for mixer in (FULL_C, FULL, SLIM_C)
    }
    both = [(seeds(page, task, full)[0], first[task, FULL_C]) for task in ("high-water", "snapshot")]
    better = max(seeds(page, "statistics", full)) - first["statistics", FULL_C]
    return [
        *(
            *scores(page, "peak", full),
            first["peak", FULL_C],
            *(100 * score for pair in both for score in pair),
            better,
        ),
        *(
            *scores(page, "peak", bare),
            first["peak", FULL],
            *percents(page, "snapshot", bare),
            100 * first["snapshot", FULL],
        ),
        *(first["peak", SLIM_C], *(100 * first[task, SLIM_C] for task in ("high-water", "snapshot"))),
        min(rates(page)),
    ]


def regimes_recall_1() -> list[float]:
    return rates("regimes_recall_1")


def regimes_recall_2() -> list[float]:
    return rates("regimes_recall_2")


def regimes_split() -> list[float]:
    page, parts, heads = "regimes_split", "regimes_split_parts", "regimes_heads"
    half, sixteen = f"{SLIM}/s.5", ("softmax/h16", "softmax+LTG/h16/r4")
    return [
        *leads(page, ("peak", "statistics", "snapshot", "high-water"), half),
        *leads(page, ("peak", "snapshot", "high-water", "statistics"), f"{SLIM}/s1"),
        *leads(page, ("peak", "snapshot", "high-water"), half, FULL, parts),
        *leads(page, ("peak", "statistics", "high-water"), half, ALONE, parts)[:-1],
        *(*span(rates(heads)), *scores(heads, "peak", *sixteen)),
        min(on_each(heads, sixteen, FIELDS)),
    ]


def regimes_starts() -> list[float]:
    page, slim = "regimes_starts", f"{FULL}/b8/r4"
    gained = leads(page, ("high-water",), f"{FULL}/b4", FULL)
    return [
        *(*gained, leads(page, ("statistics",), f"{FULL}/b8/l2", FULL)[0]),
        *leads(page, ("high-water", "snapshot", "statistics"), slim)[::2],
        *(gained[0], leads(page, ("high-water",), SLIM, FULL)[0]),
    ]


def regimes_wide() -> list[float]:
    return share_and_percent("regimes_wide", f"{FULL}/wide", ATTENTION)


def argmax() -> list[float]:
    page, readers = "argmax_heads", ("softmax", "fem")
    (all_32,), slow = {round(hits(f"{page}32", reader), 1) for reader in readers}, f"{page}32_rate6"
    assert {round(hits(f"{page}64", reader), 1) for reader in readers} == {all_32}
    return [
        *(hits("argmax", "softmax"), 100 * results("argmax")["baselines"]["the best constant"]["hits"]),
        *(*(hits(f"{page}16", reader) for reader in readers), all_32, recipe(slow)["learning_rate"]),
        *(hits(slow, reader) for reader in readers),
    ]


def argmax_paper() -> list[float]:
    constant = results("argmax_paper")["baselines"]["the best constant"]["mse"]
    return [constant, hits("argmax_paper", "fem"), hits("argmax_paper", "softmax"), *PAPER]
