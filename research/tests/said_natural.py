"""What the pages on natural labels say, in the text's order."""

from statistics import mean

from said import recipe, results, span

SETS = ("natural", "natural_more", "natural_points")


def pooled(pool: str, *pages: str, without: str = "") -> tuple[float, float]:
    """Of a pool over attention pooling, averaged over the sets of the pages: the mean and its standard error."""
    sets = [found for page in pages for found in results(page)["natural"].items()]
    over = [rows[f"pool:{pool}"]["over"] for name, rows in sets if name != without]
    return mean(lead["mean"] for lead in over), sum(lead["error"] ** 2 for lead in over) ** 0.5 / len(over)


def natural() -> list[float]:
    sets, all_seven = results("natural")["natural"], ("natural", "natural_more")
    fem, lse, largest = (pooled(pool, "natural") for pool in ("fem", "lse", "max"))
    errors = [row["over"]["error"] for rows in sets.values() for row in rows.values() if row["over"]]
    return [
        *(*fem, *lse, *largest, lse[0] - fem[0]),
        *(mean(sets["ucsb"][f"pool:{pool}"]["accuracy"]) for pool in ("lse", "attention")),
        *span([error for error in errors if error]),  # none where both pools are right about every bag
        *(*pooled("lse", *all_seven), *pooled("fem", *all_seven)),
    ]


def natural_more() -> list[float]:
    return [
        *(x for pool in ("fem", "lse", "max") for x in pooled(pool, "natural_more")),
        *(x for pool in ("fem", "fem/r4", "lse", "max") for x in pooled(pool, "natural", "natural_more")),
        *behind_on_points("fem"),
        *span([row["over"]["error"] for row in results("natural_more")["natural"]["musk2"].values() if row["over"]]),
    ]


def behind_on_points(*pools: str) -> list[float]:
    """How far pools are behind attention pooling on the points of digits, each with its standard error."""
    return [abs(x) for pool in pools for x in pooled(pool, "natural_points")]


def natural_points() -> list[float]:
    return [
        *behind_on_points("lse", "max", "fem/r4", "fem", "mean"),
        *(x for pool in ("fem", "lse", "max") for x in pooled(pool, *SETS)),
        *(x for pool in ("lse", "max") for x in pooled(pool, *SETS, without="ucsb")),
        *results("natural_points_mixed")["natural"]["points"]["pool:attention"]["accuracy"],
        max(float(rate) for rate in recipe("natural_points")["learning_rates"].split(",")),
    ]
