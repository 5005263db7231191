"""What the pages on costs, forecasts, MAD and images say, in the text's order."""

from statistics import mean

from said import recipe, results, span

from fem_research.bench.cases import TABLE5, TABLE7
from fem_research.common.paired import paired, spread
from fem_research.mad.experiment import COLUMNS, TABLE1

BASELINE, BARE, FULL = "attention", "FEM-SM without C", "FEM-SM"
TRAIN, MEMORY, TOKEN, STATE = "train_s", "train_extra_bytes", "token_s", "state_bytes"
ATTENTION, ALL = "softmax", "softmax+CLTG"
SLIM, SPLIT, BEHIND = f"{ALL}/r8", f"{ALL}/r8/s.5", "softmax/conv"
THIRDS = f"{ALL}/thirds"
C, G, L, LT, LTG, CG, CLT = (f"{ATTENTION}+{parts}" for parts in ("C", "G", "L", "LT", "LTG", "CG", "CLT"))
GLA, _, AFT = RECURRENT = "gla-norm", "mamba-norm", "rnn_softmax"
ALL_GLA, _, ALL_AFT = ALL_RECURRENT = "gla+CLTG", "mamba+CLTG", "rnn_softmax+CLTG"
COMPRESSION, FUZZY, COPYING = "compression", "fuzzy-in-context-recall", "selective-copying"
RECALL = ("in-context-recall", "noisy-in-context-recall", FUZZY)
START = 0.02  # N(0, 0.02), the start "normal" of fem_research.common.blocks


def costs(page: str, time: int, what: str, part: str | None = None, dtype: str = "float32") -> dict[str, float]:
    """Of every mixer at this length."""
    wanted = (time, part or page.partition("_")[0], dtype)
    cases = results(page)["bench"]
    (found,) = (case["results"] for case in cases if (case["size"]["time"], case["part"], case["dtype"]) == wanted)
    return {mixer: cost[what] for mixer, cost in found.items()}


def ratios(page: str, time: int, what: str, *mixers: str, over: str = BASELINE, **which: str) -> list[float]:
    found = costs(page, time, what, **which)
    return [found[mixer] / found[over] for mixer in mixers]


def by_length(page: str, what: str, *mixers: str, part: str | None = None) -> list[float]:
    """Of one mixer after the other the ratios at every length, from the shortest."""
    part = part or page.partition("_")[0]
    times = sorted({case["size"]["time"] for case in results(page)["bench"] if case["part"] == part})
    return [ratio for mixer in mixers for time in times for ratio in ratios(page, time, what, mixer, part=part)]


def published(table: dict, mixer: str, what: str, over: str = BASELINE) -> float:
    """The paper's own ratio."""
    return getattr(table[mixer], what) / getattr(table[over], what)


def forecast(page: str, what: str, data: str, *models: str) -> list:
    runs = {run["model"]: run for run in results(page)["forecast"] if run["data"] == data}
    return [runs[model][what] for model in models]


def seeds(page: str, row: str, when: str = "mean", task: str = "average", start: str = "normal") -> list[float]:
    """Percent that MAD's row gets right; when: "mean" over training or "final", after it."""
    return [100 * score for score in results(page)["mad"][start][row][when][task]["seeds"]]


def scores(page: str, *rows: str, when: str = "mean", task: str = "average", start: str = "normal") -> list[float]:
    return [mean(seeds(page, row, when, task, start)) for row in rows]


def leads(page: str, ours: str, theirs: str, when: str = "mean", beside: str | None = None) -> tuple[float, float]:
    return paired(seeds(page, ours, when), seeds(beside or page, theirs, when))


def top1(page: str, mixer: str) -> list[float]:
    return [100 * share for share in results(page)["vision"][mixer]["accuracies"]]


def of_a_test_set(page: str) -> float:
    """The standard error, in points, that the number of held-out pictures alone gives attention's accuracy."""
    data = recipe(page)["data"]
    share, pictures = mean(top1(page, ATTENTION)) / 100, int(data.removesuffix(".zip").rpartition("_")[2])
    return 100 * (share * (1 - share) / pictures) ** 0.5


def context_cpu() -> list[float]:
    times, memory = by_length("context_cpu", TRAIN, FULL), by_length("context_cpu", MEMORY, FULL)
    faster = ratios("context_cpu", 8192, TRAIN, "FEM-GLA", "FEM-AFT")
    return [*span(times), *span(memory), *(1 / ratio for ratio in faster)]


def decode_cpu() -> list[float]:
    served = by_length("decode_cpu", TOKEN, BARE, part="served")
    slow, fast = (1000 * costs(page, 4096, TOKEN)[BASELINE] for page in ("decode_cpu", "decode_split"))
    return [*by_length("decode_cpu", TOKEN, BARE), *served, slow, fast]


def decode_split() -> list[float]:
    page, taken = "decode_split", [costs("decode_split", time, TOKEN) for time in (1024, 4096, 16384)]
    added = [1000 * (found["split"] - found[BASELINE]) for found in taken]
    return [
        *(*by_length(page, TOKEN, "split"), *ratios(page, 4096, STATE, "split")),
        *(*by_length(page, TOKEN, "slim"), *ratios(page, 4096, STATE, "slim")),
        *(mean(added[:2]), added[2], *by_length(page, TOKEN, BARE), *by_length("decode_cpu", TOKEN, BARE)),
    ]


def gpt2_cpu() -> list[float]:
    page = "gpt2_cpu"
    return [
        *(*ratios(page, 512, TRAIN, FULL), published(TABLE7, FULL, "train")),
        *(*ratios(page, 512, MEMORY, FULL), published(TABLE7, FULL, "train_gb")),
        *(*ratios(page, 512, TRAIN, "FEM-GLA"), published(TABLE7, "FEM-GLA", "train")),
    ]


def layer_cpu() -> list[float]:
    return [
        *by_length("layer_cpu", TRAIN, "split", BARE, FULL, "slim", "slim with C", "FEM-GLA"),
        *ratios("layer_cpu", 2048, MEMORY, "split", BARE, FULL, "slim"),
        *by_length("layer_epyc", TRAIN, FULL),
    ]


def layer_epyc() -> list[float]:
    page, slim = "layer_epyc", "FEM-SM slim, without C"
    return [
        *(*by_length(page, TRAIN, FULL)[::-1], *by_length(page, TRAIN, BARE)[::-1]),
        *(*ratios(page, 2048, TRAIN, "FEM-GLA"), *by_length(page, TRAIN, slim)[::-1]),
        *ratios(page, 2048, MEMORY, FULL, BARE, slim),
    ]


def layer_single() -> list[float]:
    page, alone = "layer_single", "L alone"
    others = ("FEM-SM -G,T,L", "G alone, slim", "C and G, slim", "FEM-GLA without C, slim")
    return [
        *(*by_length(page, TRAIN, alone, part="single"), *ratios(page, 2048, MEMORY, alone, part="single")),
        *by_length(page, TRAIN, *others, part="single"),
    ]


def read_cpu() -> list[float]:
    lengths = [ratio for time in (2048, 512) for ratio in ratios("read_cpu", time, TRAIN, "FEM")]
    return [*lengths, *ratios("read_cpu", 2048, TRAIN, "FEM", dtype="bfloat16")]


def table5_cpu() -> list[float]:
    none = "FEM-SM -G,T,L,C"
    return [*ratios("table5_cpu", 1024, TRAIN, FULL, over=none), published(TABLE5, FULL, "train", none)]


def forecast_ett96() -> list[float]:
    page, ours = "forecast_ett96", "femforecaster"
    return [
        *(*forecast(page, "mse", "ETTm1", ours, "dlinear"), *map(spread, forecast(page, "mses", "ETTm1", ours))),
        *forecast(page, "mse", "ETTm1", "itransformer", "patchtst"),
        *forecast(page, "mse", "ETTh2", "patchtst", ours, "dlinear"),
    ]


def forecast_etth1() -> list[float]:
    page, data = "forecast_etth1", "ETTh1"
    fem, none = forecast(page, "mse", data, ALL, "none")
    by_seed, over = forecast(page, "mses", data, ALL, ATTENTION)
    seconds, fewer = forecast(page, "cpu_seconds", data, ALL, ATTENTION)
    slim = forecast("forecast_etth1_slim", "mse", data, f"{ALL}/r4", f"{ALL}/r4/s.5", ATTENTION)
    absolute = forecast(page, "mae", data, ALL, "none", ATTENTION)
    return [none - fem, *by_seed, none, *over, seconds / fewer, *absolute, *slim]


def compression(page: str, *rows: str) -> list[float]:
    """Of one row after the other the mean over training and the accuracy after it."""
    return [mean(seeds(page, row, when, COMPRESSION)) for row in rows for when in ("mean", "final")]


def mad_compression_rates() -> list[float]:
    usual, page = "mad_laptop", "mad_compression_rates"
    return [
        *(*compression(usual, ALL), *compression(page, ALL), *compression(usual, ATTENTION)),
        *(*compression(usual, ALL_GLA), *compression(page, ALL_GLA), *compression(usual, GLA, ALL_AFT, AFT)),
    ]


def recalled(page: str, row: str, when: str = "final") -> list[float]:
    """Seed by seed the mean of the three recall tasks."""
    return [mean(tasks) for tasks in zip(*(seeds(page, row, when, task) for task in RECALL))]


def mad_laptop() -> list[float]:
    page, final = "mad_laptop", "final"
    slim, conv, thirds = (f"{page}_{name}" for name in ("slim", "conv", "thirds"))
    slower, *jumped = sorted(seeds(page, ATTENTION, final, FUZZY))
    fall = paired(*(seeds(page, row, task=FUZZY) for row in (ATTENTION, C)))
    return [
        *(leads(page, ALL, ATTENTION)[0], *scores(page, ALL, ATTENTION)),
        *(spread(seeds(page, row)) for row in (ALL, ATTENTION)),
        *(leads(page, ours, theirs)[0] for ours, theirs in zip(ALL_RECURRENT, RECURRENT)),
        *(*scores(page, C, L, LT, LTG, G), *scores(page, ATTENTION, C, task=FUZZY), *fall),
        *(*leads(page, L, ATTENTION, final), *leads(page, LTG, G, final)),
        *(*leads(page, CLT, C), *leads(page, ALL, CG), *leads(page, ALL, CG, final), *leads(page, CLT, ALL, final)),
        *(*scores(page, CLT, ALL, when=final), *scores(slim, SLIM, SPLIT)),
        *(x for row in (SLIM, SPLIT) for x in leads(slim, row, ALL, beside=page)),
        *(*scores(conv, BEHIND), *(x for row in (ATTENTION, C) for x in leads(conv, BEHIND, row, beside=page))),
        *(*scores(conv, BEHIND, when=final), *scores(page, C, when=final)),
        *(*scores(conv, BEHIND, when="mad"), *scores(page, C, when="mad")),
        *(mean(recalled(conv, BEHIND)), mean(recalled(page, C)), *paired(recalled(conv, BEHIND), recalled(page, C))),
        *(*scores(thirds, THIRDS), *leads(thirds, THIRDS, ALL, beside=page)),
        *scores(page, ALL, ATTENTION, ALL_GLA, GLA, task=COMPRESSION),
        *scores("mad_compression_rates", ALL, ALL_GLA, task=COMPRESSION),
        *(*scores(page, ALL, ATTENTION, task=FUZZY), *jumped, slower, max(seeds(page, ALL, final, FUZZY))),
        *(*scores("mad_laptop_init", ALL, ATTENTION, task=FUZZY, start="torch"), started("torch")),
        max(scores(page, *RECURRENT, *ALL_RECURRENT, when=final, task=COPYING)),
    ]


def mad_laptop_init() -> list[float]:
    return [started("normal"), START, started("torch"), START]


def started(start: str) -> float:
    """FEM's lead over attention from this initialisation."""
    ours, theirs = scores("mad_laptop_init", ALL, ATTENTION, start=start)
    return ours - theirs


def mad_recall() -> list[float]:
    return [dict(TABLE1)[ATTENTION][list(COLUMNS).index("in-context-recall")]]


def vision_cifar() -> list[float]:
    page = "vision_cifar"
    ours, theirs = (results(page)["vision"][mixer] for mixer in (ALL, ATTENTION))
    return [
        *(*span(top1(page, ALL)), *span(top1(page, ATTENTION)), theirs["loss"] - ours["loss"]),
        *(100 * ours["images_per_second"] / theirs["images_per_second"], of_a_test_set(page)),
    ]


def vision_cifar_parts() -> list[float]:
    page = "vision_cifar_parts"
    gate, bare, both, full = (
        paired(top1(page, row), top1(page, ATTENTION)) for row in ("softmax+G", "softmax+LTG", "softmax+CG", ALL)
    )
    later = [mean(top1("vision_cifar_slim", row)) for row in ("softmax+C", f"{ALL}/r6", f"{ALL}/r6/s.5")]
    conditioner, convolved = top1("vision_cifar_slim", "softmax+C"), top1("vision_cifar_conv", "softmax/conv")
    below = (mean(convolved), *paired(convolved, conditioner))
    return [*gate, *bare, *both, *full, full[0] - both[0], of_a_test_set(page), *later, *below]


def vision_digits() -> list[float]:
    return [*paired(top1("vision_digits", ALL), top1("vision_digits", ATTENTION))]


def fused_on_h100() -> dict[str, float]:
    """Train steps of layers read by the fused kernels, replayed from a CUDA graph, over attention's so read."""
    cells = results("h100_layers")["cells"]
    first = {}
    for cell in cells:
        if cell["mode"] == "captured" and cell["time"] == 2048:
            first.setdefault(cell["mixer"], cell["train"]["seconds"])
    return {mixer: seconds / first["softmax"] for mixer, seconds in first.items() if mixer != "softmax"}


def on_h100(what: str = TRAIN, part: str = "layer") -> dict[str, float]:
    """Over attention's, of every other mixer, without a compiler."""
    found = {row["mixer"]: row[what] for row in results("h100")["times"] if row["part"] == part}
    return {mixer: cost / found[BASELINE] for mixer, cost in found.items() if mixer != BASELINE}


def h100() -> list[float]:
    found = results("h100")
    layers = ("attention+LTG", "attention+LTG/r32", "attention+LTG/r32/s.5", "FEM/r32")
    checks = {row["check"]: row["result"] for row in found["models"]}
    largest = lambda kind: max(result for check, result in checks.items() if check.endswith(kind))  # noqa: E731
    gradients = {check.split()[0]: of["worst gradient off by"] for check, of in checks.items() if "gradients" in check}
    (mask,) = {row["result"] for row in found["reads_before"] if row["check"] == "softmax mask"}
    before, after = found["training_before"][0], found["training_after"][0]
    return [
        *(on_h100(what)[mixer] for what in (TRAIN, MEMORY) for mixer in layers),
        on_h100(part="read")["FEM"],
        largest("padded, fp32") * 1e7,
        largest("autocast") * 100,
        max(gradients[prior] for prior in ("softmax", "mamba", "mamba_interactive")) * 1e6,
        max(gradients[prior] for prior in ("linear", "gla")) * 100,
        float(mask.split()[6]) * 100,
        before["last"],
        after["first"],
        after["last"],
    ]
