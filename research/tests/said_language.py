"""What the pages on language models say, in the text's order: parts alone, sizes, equal time, fine-tuning."""

from statistics import mean, median

from said import PAGES, level_at, recipe, results, span
from scipy.stats import ttest_rel

from fem_research.common.paired import paired

ATTENTION, GATE, GATE_SLIM, BARE, BARE_SLIM, FULL, SLIM = "-C,G,T,L", "+G", "+G/r8", "-C", "-C/r8", "full", "full/r8"
SLIM_32, NO_F_32, DOUBLE, NARROW = "full/r32", "+C,G/r32", "+C,G/double/r32", "+C,G/c32/double/r32"
BROAD, SLIM_BROAD, SPLIT_BROAD = "+C,G/c128/r32", "full/c128/r32", "full/c128/r32/s.5"
TWO_BLOCKS = {ATTENTION: "", NO_F_32: "_parts", BROAD: "_c128", NARROW: "_double_c32", DOUBLE: "_double"}
TWO_BLOCKS |= {SLIM_32: "_slim", SLIM_BROAD: "_slim_c128"}  # in the names of their files
TWICE = {
    ATTENTION: "ablate_512_two_8m",
    BROAD: "ablate_512_two_c128_8m",
    SLIM_32: "ablate_512_two_slim_8m",
    SPLIT_BROAD: "ablate_512_two_split_8m",
    SLIM_BROAD: "ablate_512_two_slim_c128_8m",
}  # the trainings of 8M tokens
CONV, NO_F_BROAD = "-C,G,T,L/conv", "+C,G/c32/r8"
SPLIT, NO_F, NORM, ALONE = "-C/r8/s.5", "+C,G/r8", "-C,G,T,L/norm", "-G,T,L"
FOURTH = {ALONE: "conditioner_alone", NO_F: "attribution"}  # in the names of the files of their fourth seeds
SIZES = ("ablate_softmax_small", "ablate_softmax_medium", "ablate_softmax")
TRAINED, TRAINED_SLIM = "attention+LTG", "attention+LTG/r4"


def of(page: str, what: str, *rows: str) -> list[float]:
    return [results(page)["ablate"][row][what] for row in rows or results(page)["ablate"]]


def losses(page: str, *rows: str) -> list[float]:
    return of(page, "loss", *rows)


def gap(page: str, ours: str, theirs: str = ATTENTION, beside: str | None = None) -> float:
    """Nats by which the loss of a row is below another's."""
    return losses(beside or page, theirs)[0] - losses(page, ours)[0]


def gaps(page: str, *rows: str) -> list[float]:
    """Below attention's."""
    return [gap(page, row) for row in rows]


def kept(page: str, row: str, under: str = "attention") -> list[float]:
    """The same as `pairs`, as the page's table has it: of losses with all digits."""
    return [float(number) for number in of(page, f"below {under}, paired", row)[0].split(" ± ")]


def seeds(page: str, row: str) -> list[float]:
    """After the last step; of a page without curves as its table has them."""
    curves = results(page).get("curves")
    if curves:
        return [curve[-1]["val_loss"] for curve in curves[row]]
    return [float(number) for number in of(page, "by seed", row)[0].split(",")]


def by_seed(page: str, ours: str, theirs: str) -> list[float]:
    return [their - our for our, their in zip(seeds(page, ours), seeds(page, theirs), strict=True)]


def pairs(page: str, ours: str, theirs: str) -> tuple[float, float]:
    """Nats that ours ends below theirs, seed by seed, and their standard error."""
    return paired(seeds(page, theirs), seeds(page, ours))


def rate(page: str, row: str = ATTENTION) -> float:
    """The best of those tried on the first seed."""
    return float(of(page, "learning rate", row)[0])


def at_rates(page: str, row: str) -> dict[float, float]:
    """Losses of the first seed."""
    return {float(rate): x for rate, x in results(page)["learning_rates"][row].items() if rate not in ("mixer", "row")}


def on_three_seeds(row: str) -> list[float]:
    """Losses after 16M tokens: attention and split values at .008, the others at .004."""
    if row == ALONE:
        return seeds("ablate_16m_conditioner_alone", row) + seeds("ablate_16m_conditioner_alone_seeds", row)
    if row == SPLIT:
        return seeds("ablate_16m_split_rate8", row) + seeds("ablate_16m_split_rate8_seeds", row)
    if row != ATTENTION:
        return seeds("ablate_16m_attribution_seeds", row)
    return [at_rates("ablate_16m_rates", ATTENTION)[0.008], *seeds("ablate_16m_attention_seeds", ATTENTION)]


def on_four_seeds(row: str) -> list[float]:
    """The same of the conditioner alone, or with the gate."""
    return on_three_seeds(row) + seeds(f"ablate_16m_{FOURTH[row]}_seed3", row)


def millions(*pages: str) -> list[float]:
    return [of(page, "parameters", ATTENTION)[0] / 1e6 for page in pages]


def tokens(page: str) -> float:
    """Millions of a training."""
    run = recipe(page)
    return run["steps"] * run["batch"] * run["context"] / 1e6


def after(page: str, row: str, steps: int) -> tuple[float, float]:
    """The loss after so many steps of a longer training, and all its steps over these."""
    (curve,) = results(page)["curves"][row]
    return next(point["val_loss"] for point in curve if point["step"] == steps), curve[-1]["step"] / steps


def tuned(page: str, mixer: str) -> float:
    """Nats by which a mixer ends below attention after further training."""
    rows = results(page)["finetune"]
    return paired(rows["attention"]["after"], rows[mixer]["after"])[0]


def heavier(page: str, mixer: str) -> float:
    rows = results(page)["finetune"]
    return 100 * (rows[mixer]["parameters"] / rows["attention"]["parameters"] - 1)


def ablate_10m() -> list[float]:
    page = "ablate_10m"
    full, slim = after(page, FULL, 750), after(page, SLIM, 675)
    return [
        *(tokens(page), *gaps(page, FULL, SLIM), *losses(page, FULL, SLIM, ATTENTION)),
        *(*millions("ablate_3m", "ablate_16m"), *full, *slim),
    ]


def stopped_at_16(name: str, row: str, page: str) -> list[float]:
    """A rate of .016 that was stopped, the loss then, what `page` has after as many steps, and the rate of that."""
    high = f"ablate_16m_{name}_rate16"
    last = results(high)["curves"][row][0][-1]
    return [float(recipe(high)["learning_rates"]), last["val_loss"], after(page, row, last["step"])[0], rate(page, row)]


def ablate_16m() -> list[float]:
    page = "ablate_16m"
    best, at_4, half, at_3m = (f"{page}_{name}" for name in ("rates", "rate4", "half", "3m"))
    three, own, split, timed = (f"{page}_{name}" for name in ("seeds", "attribution", "split", "time"))
    own_seeds, split_time, sizes = f"{own}_seeds", f"{split}_time", (half, at_4, at_3m)
    attention, slim, step = at_rates(best, ATTENTION), at_rates(best, SLIM), of(timed, "ms a step", SLIM, ATTENTION)
    second = by_seed(f"{page}_conditioner", SLIM, BARE_SLIM)[1]
    alone, taps = f"{page}_conditioner_alone", f"{page}_conv"
    own_8 = f"{own}_rate8"
    slim_apart = losses(at_4, SLIM)[0] - seeds(own_seeds, SLIM)[0]  # one training on the two processors
    apart = slim_apart, losses(split_time, ATTENTION)[0] - losses(at_4, ATTENTION)[0]
    return [
        *(gap(best, SLIM), *losses(best, SLIM, ATTENTION), *millions(page)),
        *(rate(best), attention[0.004] - attention[0.008], rate(at_4)),
        *(*stopped_at_16("attention", ATTENTION, best), rate(best, SLIM)),
        *(*paired(on_three_seeds(ATTENTION), on_three_seeds(SLIM)), mean(on_three_seeds(SLIM))),
        mean(on_three_seeds(ATTENTION)),
        *(rate(three), *by_seed(three, SLIM, ATTENTION)),
        *(attention[0.002] - min(attention.values()), slim[0.002] - min(slim.values())),
        *(*losses(own, NO_F), rate(own, NO_F), rate(own_8, NO_F), gap(own_8, NO_F, ATTENTION, best)),
        *(gap(own_8, NO_F, SLIM, best), *stopped_at_16("attribution", NO_F, own_8)),
        *(rate(own_seeds, NO_F), *paired(on_three_seeds(ATTENTION), on_three_seeds(NO_F))),
        *(rate(f"{page}_attention_seeds"), *apart),
        *(rate(page), gap(page, GATE_SLIM), gap(page, BARE_SLIM, GATE_SLIM), gap(page, SLIM, BARE_SLIM), second),
        rate(alone, ALONE),
        *(x for n in (8, 2) for x in (rate(f"{alone}_rate{n}", ALONE), -gap(f"{alone}_rate{n}", ALONE, ALONE, alone))),
        mean(on_three_seeds(ALONE)),
        *paired(on_three_seeds(ATTENTION), on_three_seeds(ALONE)),
        *(rate(f"{page}_attention_seeds"), *paired(on_four_seeds(ALONE), on_four_seeds(NO_F))),
        *paired(on_three_seeds(ALONE), on_three_seeds(NO_F)),
        ttest_rel(on_four_seeds(ALONE), on_four_seeds(NO_F)).pvalue,
        *pairs(own_seeds, NO_F, SLIM),
        *(*losses(taps, CONV), rate(taps, CONV), attention[0.008] - losses(taps, CONV)[0], 0.008),
        *(losses(taps, CONV)[0] - losses(alone, ALONE)[0], 0.012),  # by the rule
        *(
            *losses(f"{page}_c32", NO_F_BROAD),
            rate(f"{page}_c32", NO_F_BROAD),
            gap(f"{page}_c32", NO_F_BROAD, NO_F, own),
        ),
        *(*losses(split, SPLIT), rate(split, SPLIT), gap(split, SPLIT, ATTENTION, at_4)),
        *(gap(split, SPLIT, GATE_SLIM, at_4), *apart, gap(split, SPLIT, ATTENTION, split_time)),
        *(rate(f"{split}_rate8", SPLIT), mean(on_three_seeds(SPLIT)), *on_three_seeds(SPLIT)),
        *paired(on_three_seeds(ATTENTION), on_three_seeds(SPLIT)),
        *paired(on_three_seeds(SPLIT), on_three_seeds(NO_F)),
        *(on_three_seeds(ATTENTION)[0] - on_three_seeds(SPLIT)[0], *stopped_at_16("split", SPLIT, f"{split}_rate8")),
        *(*losses(split_time, SPLIT, ATTENTION), gap(split_time, SPLIT)),
        gap(split, SPLIT, ATTENTION, split_time),
        *(rate(split_time, NO_F), *losses(split_time, NO_F), gap(split_time, NO_F)),
        *(rate(page), *losses(page, GATE, BARE, FULL, ATTENTION)),
        *(*losses(f"{page}_wide", "full/wide"), rate(f"{page}_wide", "full/wide")),
        *(rate(at_4), *(gap(size, SLIM) for size in sizes), *millions(*sizes), *millions(at_4)),
        *(*losses(timed, SLIM, ATTENTION), rate(timed), step[0] / step[1], level_at()),
        tokens("ablate_3m"),
    ]


def ablate_512_time() -> list[float]:
    page, split, slim, no_f = "ablate_512_time", "-C/r32/s.5", "full/r32", "+C,G/r32"
    steps = of(page, "ms a step", split, slim, no_f, ATTENTION)
    asked, tried, slow = 0.012, (0.001, 0.002, 0.004), f"{page}_rate1"  # by the rule; in the pilot; trained to the end
    return [
        *(*losses(page, ATTENTION), *gaps(page, split, slim, no_f), asked),
        *(gap(page, no_f, slim), gap(page, no_f, split)),
        *(*(step / steps[-1] for step in steps[:-1]), tokens(page), rate(page), *tried),
        *(rate(slow), *losses(slow, ATTENTION), losses(page, ATTENTION)[0] - losses(slow, ATTENTION)[0]),
    ]


def ablate_512_two() -> list[float]:
    page, one, asked = "ablate_512_two", "ablate_512_time", 0.012
    least, low, high = rate(f"{page}_rate05"), rate(f"{page}_rate1"), rate(page)
    ours, theirs, wide = (two_blocks(row, high) for row in (SLIM_32, NO_F_32, DOUBLE))
    leads, of_wide = ([their - own for own, their in zip(found, theirs)] for found in (ours, wide))
    (bare,), at_low = two_blocks(ATTENTION, high), {row: two_blocks(row, low) for row in TWO_BLOCKS}
    plain, alone, broad, narrow, double, whole, whole_broad = (at_low[row][0] for row in TWO_BLOCKS)
    (costs, xeon), (slower, fastest) = map(two_costs, ("c128", "")), of(page, "ms a step", SLIM_32, ATTENTION)
    timed = NO_F_32, SLIM_32, SLIM_BROAD, DOUBLE, NARROW
    late, late_broad, (late_slim,), late_split, (late_slim_broad,) = map(twice_the_tokens, TWICE)
    c_alone, gate = on_both_seeds(f"{page}_conditioner_rate1", ALONE), on_both_seeds(f"{page}_gate_rate1", "+G/r32")
    (taps,), second = losses(f"{page}_conv_rate1", CONV), at_low[ATTENTION][1]
    (slow,), (slow_broad,) = losses(f"{page}_rate05", ATTENTION), losses(f"{page}_c128_rate05", BROAD)
    return [
        *(x for row in (NO_F_32, SLIM_32) for x in paired(two_blocks_at_best(ATTENTION), two_blocks_at_best(row))),
        *(mean(two_blocks_at_best(row)) for row in (NO_F_32, SLIM_32, ATTENTION)),
        *(alone - whole, at_low[SLIM_32][1] - at_low[NO_F_32][1], asked),
        *(*at_low[BROAD], *widened(NO_F_32), whole_broad, broad - whole_broad, whole - whole_broad),
        *(more_time(SLIM_BROAD, BROAD), at_low[SLIM_BROAD][1], at_low[BROAD][1] - at_low[SLIM_BROAD][1]),
        low,
        *(*late, *late_broad, *(their - our for our, their in zip(late_broad, late)), *widened(ATTENTION)),
        *(100 * (took_longer(seed) - 1) for seed in ("", "_seed1")),
        *(0.2, late_slim, late[0] - late_slim, late_slim - late_broad[0], plain - whole),  # .2 by the rule
        *(late_slim_broad, late_slim - late_slim_broad, late_slim_broad - late_broad[0]),
        *(*late_split, *(their - our for our, their in zip(late_broad, late_split))),
        two_costs("split")[SPLIT_BROAD] / two_costs("split")[BROAD],
        *(low, c_alone[0], plain - c_alone[0], plain - alone, taps, plain - taps, gate[0], plain - gate[0]),
        *(gate[1], second - gate[1], c_alone[1], second - c_alone[1], second - at_low[NO_F_32][1]),
        *(narrow, alone - narrow, double),
        *(high, *leads, gap(page, SLIM_32), low, bare - plain, theirs[0] - alone, ours[0] - whole, least),
        *(slow, slow - plain, low, slow_broad, slow_broad - broad, low, 0.004, low),
        *(high, *wide, *of_wide),
        *(gap(one, NO_F_32, SLIM_32), gap("ablate_16m_c32", NO_F_BROAD, NO_F, "ablate_16m_attribution")),
        *(costs[row] for row in (SLIM_32, NO_F_32, SLIM_BROAD, BROAD, DOUBLE, NARROW)),
        *(high, slower / fastest, *(more_time(row) for row in timed)),
        *(xeon[row] for row in (SLIM_32, NO_F_32)),
        *(low, low, high, high),
        *(*at_low[ATTENTION], bare),
        *(*at_low[NO_F_32], *theirs, *c_alone, *gate, taps, *at_low[BROAD], narrow, double, *wide),
        *(*at_low[SLIM_32], *ours, *at_low[SLIM_BROAD]),
        *(low, least, low, high),
    ]


def twice_the_tokens(row: str) -> list[float]:
    """Losses after 8M tokens with two blocks of width 512, seed by seed."""
    return on_both_seeds(TWICE[row], row)


def took_longer(seed: str) -> float:
    """The time of the wider conditioner's training with 8M tokens over that of attention beside it."""
    plain, broad = (
        recipe(f"{TWICE[row]}{seed}")["steps"] / of(f"{TWICE[row]}{seed}", "tokens/s", row)[0]
        for row in (ATTENTION, BROAD)
    )
    return broad / plain


def two_blocks(row: str, rate: float) -> list[float]:
    """Losses of a row with two blocks of width 512, seed by seed."""
    own = "" if rate == 0.002 and row == SLIM_32 else TWO_BLOCKS[row]  # the page's own
    page = f"ablate_512_two{own}" + ("_rate1" if rate == 0.001 else "")
    return on_both_seeds(page, row)


def on_both_seeds(page: str, row: str) -> list[float]:
    """Losses of a row on the first seed and, where it was run, on the second."""
    kept = [name for name in (page, f"{page}_seed1") if (PAGES / f"{name}.json").exists()]
    return [loss for name in kept if row in results(name)["ablate"] for loss in losses(name, row)]


def two_blocks_at_best(row: str) -> list[float]:
    """Its losses at the better of two rates, chosen on the first seed."""
    return min((two_blocks(row, rate) for rate in (0.001, 0.002)), key=lambda seeds: seeds[0])


def widened(over: str) -> list[float]:
    """Nats by which the gate and a conditioner of 128 channels are below another row, seed by seed, at .001."""
    return [other - own for other, own in zip(two_blocks(over, 0.001), two_blocks(BROAD, 0.001), strict=True)]


def more_time(row: str, over: str = ATTENTION) -> float:
    """Percent that a training at .001 with two blocks of width 512 takes longer than another's, by a Xeon's costs."""
    step = two_costs("c128")
    ours, theirs = (step[of] * recipe(f"ablate_512_two{TWO_BLOCKS[of]}_rate1")["steps"] for of in (row, over))
    return 100 * (ours / theirs - 1)


def two_costs(measured: str) -> dict[str, float]:
    """Times of a step over attention's with two blocks of width 512, by row."""
    found = results("_".join(filter(None, ("ablate_512_two", measured, "costs"))))["seconds"]
    return {row: seconds / found[ATTENTION] for row, seconds in found.items()}


def ablate_3m() -> list[float]:
    page, long = "ablate_3m", "ablate_long_rate"
    others = {"attention": (GATE, BARE, BARE_SLIM), "attention+G": (ATTENTION, BARE, BARE_SLIM)}
    errors = [kept(long, row, under)[1] for under, rows in others.items() for row in rows]
    return [
        *(*millions(long), *span(errors), *losses(page, FULL, BARE, GATE, ATTENTION, BARE_SLIM)),
        *(*millions(long), *gaps(page, GATE, BARE), gap(page, FULL, BARE)),
    ]


def ablate_gla() -> list[float]:
    page = "ablate_gla"
    both = losses(page, FULL, "-G", BARE, "-C,G")  # L and T
    without = losses(page, ATTENTION, GATE, "-G,T,L", "+C,G")
    return [
        *(*losses(page, FULL, BARE, ATTENTION), *span(both), *losses(page, "-C,G,T"), *span(without)),
        *(*losses(page, GATE), gap(page, GATE), gap(page, BARE, GATE), gap(page, "-C,G")),
        *(*losses("ablate_gla_norm", NORM), gap(page, BARE, NORM, "ablate_gla_norm")),
    ]


def ablate_gla_norm() -> list[float]:
    page = "ablate_gla_norm"
    return [
        *(gap(page, BARE), *kept(page, NORM, "GLA"), *pairs(page, BARE, NORM)),
        *(*of(page, "sd", GATE), rate(page, GATE), rate(page, BARE), rate(page)),
    ]


def ablate_long() -> list[float]:
    page, at_2 = "ablate_long", "ablate_long_rate"
    third = [seeds(page, row)[2] - seeds(at_2, row)[2] for row in (ATTENTION, BARE)]
    return [
        *(*losses(page, BARE), rate(page, BARE), *losses(at_2, BARE), rate(at_2), *kept(at_2, BARE), rate(at_2)),
        *(*losses(page, GATE), *kept(at_2, BARE, "attention+G"), *kept(page, BARE, "attention+G")),
        *(rate(page), *third, rate(at_2), *losses(at_2, ATTENTION), *losses(page, ATTENTION)),
        *at_rates(page, BARE_SLIM).values(),
    ]


def ablate_long_rate() -> list[float]:
    page = "ablate_long_rate"
    return [
        *(rate(page), *losses(page, ATTENTION, GATE, BARE, BARE_SLIM)),
        *(*kept(page, BARE), *kept(page, BARE, "attention+G")),
    ]


def ablate_softmax() -> list[float]:
    page, spreads = "ablate_softmax", of("ablate_softmax", "sd")
    tried = at_rates(page, ATTENTION)
    return [
        *(*span(spreads), median(spreads), *losses(page, BARE, ATTENTION), gap(page, BARE)),
        *(*losses(page, GATE), *kept(page, BARE, "attention+G"), *by_seed(page, BARE, GATE), gap(page, "-C,G")),
        *(*losses(page, "-C,G,T", ATTENTION, FULL, BARE), *kept(page, FULL, "attention+G")),
        *(*pairs(page, FULL, "+C,G"), *span(tried)),
    ]


def ablate_softmax_medium() -> list[float]:
    cells = [(row, what) for row in (FULL, GATE, ATTENTION) for what in ("loss", "sd")]
    return [
        *millions(*SIZES),
        *(number for size in SIZES for number in (*millions(size), *(of(size, what, row)[0] for row, what in cells))),
        *(gap(size, FULL, row) for row in (ATTENTION, GATE) for size in SIZES),
        *(*millions(SIZES[1]), *losses(SIZES[2], BARE), *millions(SIZES[2])),
    ]


ablate_softmax_small = ablate_softmax_medium  # which have the same text


def ablate_time() -> list[float]:
    page, rows = "ablate_time", (GATE, BARE, FULL)
    (steps, *fewer) = of(page, "steps", ATTENTION, *rows)
    return [
        *(number for row in rows for number in kept(page, row)),
        *(*gaps("ablate_softmax", *rows), *(steps / less for less in fewer)),
    ]


def finetune_gpt2() -> list[float]:
    page = "finetune_gpt2"
    return [
        *(tuned(page, TRAINED), tuned(page, "attention+G"), heavier(page, TRAINED)),
        *(heavier(page, TRAINED_SLIM), tuned(page, TRAINED_SLIM)),
    ]


def finetune_llama() -> list[float]:
    page = "finetune_llama"
    full = tuned(page, TRAINED)
    return [full, tuned(page, "attention+G"), full, heavier(page, TRAINED), heavier(page, TRAINED_SLIM)]
