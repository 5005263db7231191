"""What the pages on sets say, in the text's order: bags of digits, pools and the words of a speaker."""

from said import results, span
from said_tasks import (
    ALONE,
    ATTENTION,
    DOUBLE,
    FULL_C,
    GATE,
    GLA,
    GLA_SLIM,
    SLIM,
    SLIM_C,
    C,
    leads,
    percents,
    rate,
    rates,
    seeds,
)


def regimes_bags() -> list[float]:
    page, task, heads, slim_16 = "regimes_bags", ("bags",), "softmax/h16", ("softmax+LTG/h16/r4", "softmax+CLTG/h16/r4")
    best, once = "softmax+C/h32/norope", f"{page}_screen"
    single = [row for row in results(once)["regimes"]["bags"] if row not in results(page)["regimes"]["bags"]]
    failed = sorted(seeds(page, "bags", SLIM_C))[:2]
    return [
        *(*percents(page, "bags", SLIM, ATTENTION), *leads(page, task, ATTENTION), *percents(page, "bags", heads)),
        *(*leads(page, task, heads), *percents(page, "bags", DOUBLE), *leads(page, task, DOUBLE)),
        *(*percents(page, "bags", best), *leads(page, task, best)),
        *percents(page, "bags", f"{FULL_C}/h32/norope/r4", f"{FULL_C}/h8/r4"),
        *(x for mixer in slim_16 for x in leads(page, task, mixer, heads)),
        *percents(page, "bags", ALONE, FULL_C, f"{SLIM}/s1", f"{SLIM}/s.5", C, GATE, f"{GATE}/h16/r4"),
        *leads(page, task, "softmax+LTG/b8/r4"),
        *(*percents(page, "bags", GLA, GLA_SLIM), *leads(page, task, GLA_SLIM, GLA)),
        *(*percents(page, "bags", "gla/h16/norm"), *leads(page, task, "gla/h16/norm", GLA_SLIM)),
        *percents(page, "bags", *(f"gla+LTG/h{number}/r4" for number in (8, 16, 32))),
        *(*percents(page, "bags", "cummax", "gru"), rate(page, "bags", SLIM_C), 100 * failed[1]),
        *percents(page, "bags", "softmax/h32", "softmax/h32/norope"),
        *percents("regimes_pools", "bags", "pool:fem/r4", "pool:mean"),
        *(0.012, 0.024, 0.003, 0.006),  # rates of the pages that gave way, and those of this one
        rate(page, "bags", "cummax"),
        *(*rates(once), *span(percents(once, "bags", *single))),
    ]


def regimes_pools() -> list[float]:
    page, safe = "regimes_pools", "regimes_pools_rate3"
    slim, full, lse, largest, attention, average = (
        f"pool:{pool}" for pool in ("fem/r4", "fem", "lse", "max", "attention", "mean")
    )
    return [
        *percents(page, "bags", slim, lse, largest, attention),
        *(x for pool in (slim, lse, largest) for x in leads(page, ("bags",), pool, attention)),
        *percents(page, "bags", average),
        *(rate(page, "bags", full), *percents(page, "bags", full), rate(safe, "bags", full)),
        *percents(safe, "bags", full),
        *(
            *percents("regimes_pools_mixed", "bags", lse, largest, full, attention, average, slim),
            rate("regimes_pools_mixed", "bags", slim),
        ),
    ]


def regimes_speakers() -> list[float]:
    page, pools = "regimes_speakers", ("fem/r4", "attention", "lse", "fem", "max", "mean")
    return [
        *(
            *percents(page, "speakers", *(f"pool:{pool}" for pool in pools)),
            100 * results(page)["constants"]["speakers"],
        ),
        *leads(page, ("speakers",), "pool:mean", "pool:attention"),
    ]
