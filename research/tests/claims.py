"""What the README, the FAQ and two overviews say of the results: each number from its JSON, as text."""

import re
from functools import cache
from statistics import mean

import torch
from said import results
from said_language import at_rates, on_three_seeds
from said_tasks import DOUBLE, DOUBLED, MANY, MANY_C, PARTS

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem_research.common.paired import shown

WIDE = "ablate_512_time"
WIDE_RUN = "regimes_peak64_seeds"
BEHIND = "softmax/conv"
TRAINED = "attention+LTG"  # FEM in a model that was trained without it


def score(task: str, mixer: str, page: str = "regimes") -> float:
    return mean(results(page)["regimes"][task][mixer]["test"])


def loss(page: str, row: str) -> float:
    return results(page)["ablate"][row]["loss"]


def losses(page: str) -> dict[str, float]:
    return {row: found["loss"] for row, found in results(page)["ablate"].items()}


def short(x: float, digits: int) -> str:
    """A number below 1 without its leading zero."""
    return f"{x:.{digits}f}".lstrip("0")


def lead(page: str, row: str, over: str = "-C,G,T,L") -> str:
    """Nats by which the loss of a row is below another's, attention's by default."""
    return short(loss(page, over) - loss(page, row), 3)


def millions(page: str) -> str:
    return f"{results(page)['ablate']['-C,G,T,L']['parameters'] / 1e6:.2f}M"


def ratio(part: str, time: int, mixer: str, what: str, page: str | None = None, beside: str = "attention") -> float:
    """Over attention's, at this length."""
    cases = results(page or f"{part}_cpu")["bench"]
    (case,) = (case for case in cases if (case["part"], case["size"]["time"]) == (part, time))
    return case["results"][mixer][what] / case["results"][beside][what]


def span(ratios: list[float], digits: int = 2) -> str:
    return " to ".join(sorted({f"{x:.{digits}f}" for x in (min(ratios), max(ratios))}))


def token(mixer: str, part: str = "decode", page: str = "decode_cpu", digits: int = 2) -> str:
    """A streamed token's time over attention's, after 1k to 16k others."""
    return span([ratio(part, time, mixer, "token_s", page) for time in (1024, 4096, 16384)], digits)


def top1(data: str, mixer: str) -> float:
    return 100 * results(f"vision_{data}")["vision"][mixer]["accuracy"]


def slower(data: str) -> float:
    found = results(f"vision_{data}")["vision"]
    return found["softmax"]["images_per_second"] / found["softmax+CLTG"]["images_per_second"]


def mse(page: str, data: str, model: str, what: str = "mse") -> float:
    (run,) = (run for run in results(page)["forecast"] if (run["data"], run["model"]) == (data, model))
    return run[what]


def after(model: str, mixer: str) -> float:
    return mean(results(f"finetune_{model}")["finetune"][mixer]["after"])


def mad(mixer: str, when: str = "mean", task: str = "average") -> float:
    """Over training, or "final"; attention behind a short convolution has a file of its own."""
    page = "mad_laptop_conv" if mixer == BEHIND else "mad_laptop"
    return 100 * results(page)["mad"]["normal"][mixer][when][task]["mean"]


def recalls(mixer: str) -> str:
    """Steps until 99.9 % of MAD's recall is right."""
    found = results("mad_recall")["mad"]["torch"][mixer]["steps"]
    assert found["to"] == 0.999
    (steps,) = found["by_seed"]["in-context-recall"]
    return f"{steps:,}"


FULL, OWN = "softmax+CLTG", "softmax+LTG"
SLIM, SLIM_C = "softmax+LTG/r4", "softmax+CLTG/r4"


def percent(task: str, mixer: str, page: str = PARTS, digits: int = 0) -> str:
    return f"{100 * score(task, mixer, page):.{digits}f} %"


def share(task: str, mixer: str, page: str = PARTS, digits: int = 2) -> str:
    return f"{score(task, mixer, page):.{digits}f}"


def late(mixer: str) -> str:
    """What is explained of the flights that leave late."""
    return share("flights", mixer, "regimes_flights", 3)


def at_its_best() -> float:
    """Attention's score on peak, over its numbers of heads and with RoPE or without."""
    rows = results("regimes_heads")["regimes"]["peak"] | results(DOUBLED)["regimes"]["peak"]
    return max(mean(found["test"]) for row, found in rows.items() if re.fullmatch(r"softmax(/h\d+)?(/norope)?", row))


def with_double() -> str:
    """The same with values twice as wide."""
    return share("peak", DOUBLE, DOUBLED)


def with_conditioner() -> str:
    """Attention's score with the conditioner and a head for every channel."""
    return share("peak", MANY_C, "regimes_heads_64")


def gla_at_its_best(task: str, page: str = "regimes_heads") -> float:
    """Normalised GLA's score, over its numbers of heads."""
    rows = results(page)["regimes"][task]
    return max(mean(found["test"]) for row, found in rows.items() if row.endswith("/norm"))


def gla_later() -> tuple[str, str]:
    """What GLA, with its best number of heads, and slim FEM on it explain of peak after 2,000 steps."""
    page = "regimes_heads_gla_steps"
    return f"{gla_at_its_best('peak', page):.2f}", share("peak", "gla+LTG/r4", page, 3)


def level_later() -> float:
    """What attention with a head for every channel and slim FEM both explain after 2,000 steps."""
    (found,) = {round(score("peak", row, "regimes_heads_steps"), 2) for row in (MANY, SLIM_C)}
    return found


def with_heads(task: str, row: str) -> str:
    return percent(task, row, "regimes_heads")


@cache
def matched(**fields) -> FreeEnergyMixerConfig:
    return FreeEnergyMixerConfig.matched(n_embd=512, n_head=8, **fields)


@cache
def weights(**fields) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in FreeEnergyMixer(matched(**fields)).parameters())


def cached(**fields) -> int:
    """Bytes of a token in a float32 cache of keys and of what is read."""
    config = matched(**fields)
    return 4 * (config.qk_dim + config.kv_heads * config.read_width)


ATTENTION = {"use_lse": False, "use_temperature": False, "use_outer_gate": False}
PLAIN = {**ATTENTION, "use_conv": False}
SLIM_512 = {"gate_rank": 32}
GATE_AND_C = {"use_lse": False, "use_temperature": False, **SLIM_512}
assert matched(**SLIM_512) == FreeEnergyMixerConfig.slim(n_embd=512, n_head=8)  # what README's first lines build


def step(page: str, row: str) -> str:
    """Over attention's, in a model."""
    timed = results(page)["ablate"]
    return f"{timed[row]['ms a step'] / timed['-C,G,T,L']['ms a step']:.2f}"


def slower_step() -> str:
    return step("ablate_16m_time", "full/r8")


def at_best_rates(row: str) -> str:
    """Nats after 16M tokens, the mean of three seeds."""
    return f"{mean(on_three_seeds(row)):.3f}"


def unsigned(difference: str) -> str:
    """ "+0.047 ± 0.012" as pages write it."""
    return difference.lstrip("+-").replace("0.", ".")


def by_its_best_rate() -> str:
    """Nats that attention gains by .008 over .004, after 16M tokens, on one processor."""
    at = at_rates("ablate_16m_rates", "-C,G,T,L")
    return short(at[0.004] - at[0.008], 3)


def below(row: str, over: str = "-C,G,T,L") -> str:
    """Nats below another row on the same three seeds, with the standard error."""
    return unsigned(shown(on_three_seeds(over), on_three_seeds(row)))


def wide(mixer: str, page: str = WIDE_RUN) -> str:
    return share("peak-64", mixer, page)


def plain(text: str) -> str:
    """One line, without code blocks, formulas and the folders of links to the results."""
    text = re.sub(r"\((?:\.\./)?research/results/", "(results/", text)
    return " ".join(re.sub(r"```.*?```|\$`.*?`\$", "", text, flags=re.DOTALL).split())
