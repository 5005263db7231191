"""Every measured number of the README, and of the FAQ's sections of figures, is drawn here from what the results pages
keep beside them as JSON. A number that no claim below covers fails: add the claim, with the key that holds it."""

import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import mean

import torch

from fem import FreeEnergyMixer, FreeEnergyMixerConfig

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "figures"))

import language as figures  # noqa: E402

MEASURED = re.compile(r"(?<![\w.])(?:\d+)?\.\d+(?!\w*\.\d)|\b\d+ %")
NOT_MEASURED = ("Python 3.10", "Apache-2.0")
FAQ = (
    *("When should I not use FEM?", "Which parts do I need?", "Which prior should I take?"),
    "How large is the state?",
)

TRAINED = "attention+LTG"  # FEM in a model that was trained without it


@cache
def results(name: str) -> dict:
    found = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    return found.get("results", found)


def slim_lead() -> str:
    """Of slim FEM over attention with 16M tokens, on three seeds."""
    paired = results("ablate_16m_seeds")["ablate"]["full/r8"]["below attention, paired"]
    return paired.removeprefix("+").replace("0.", ".")


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


def layer(mixer: str, *pages: str) -> str:
    """A train step and its memory, from the machine where it costs less to the other."""
    cells = ((512, "train_s"), (2048, "train_s"), (2048, "train_extra_bytes"))
    return " | ".join(span([ratio("layer", time, mixer, what, page) for page in pages]) + "x" for time, what in cells)


def span(ratios: list[float], digits: int = 2) -> str:
    return " to ".join(sorted({f"{x:.{digits}f}" for x in (min(ratios), max(ratios))}))


def token(mixer: str, part: str = "decode") -> str:
    return span([ratio(part, time, mixer, "token_s", "decode_cpu") for time in (1024, 4096, 16384)])


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


def gained(model: str, mixer: str) -> float:
    return after(model, "attention") - after(model, mixer)


def mad(mixer: str) -> float:
    return 100 * results("mad_laptop")["mad"]["normal"][mixer]["mean"]["average"]["mean"]


def recalls(mixer: str) -> str:
    """Steps until 99.9 % of MAD's recall is right."""
    found = results("mad_recall")["mad"]["torch"][mixer]["steps"]
    assert found["to"] == 0.999
    (steps,) = found["by_seed"]["in-context-recall"]
    return f"{steps:,}"


def scan(prior: str, length: str) -> float:
    return 1000 * results("scans_cpu")[prior]["train_s"][length]


def state(prior: str) -> float:
    """Kilobytes that a layer of width 256 keeps of a row: for softmax per token."""
    layer = FreeEnergyMixer(FreeEnergyMixerConfig.matched(n_embd=256, n_head=4, prior_type=prior))
    short, long = (layer(torch.zeros(1, tokens, 256), return_state=True)[1].nbytes for tokens in (1, 101))
    return (long - short) / 1e5 if prior == "softmax" else long / 1e3


FULL, OWN, SLIM = "softmax+CLTG", "softmax+LTG", "softmax+LTG/r4"


def regimes_row(task: str, *others: str, page: str = "regimes", percent: bool = False) -> str:
    """Attention's cell, slim FEM's, and the start of what the row says."""
    shown = (lambda x: f"{100 * x:.0f} %") if percent else (lambda x: f"{x:.2f}")
    return f"| {shown(score(task, 'softmax', page))} | {shown(score(task, SLIM, page))} |"


def of(task: str, mixer: str, page: str = "regimes", percent: bool = False) -> str:
    found = score(task, mixer, page)
    return f"{100 * found:.0f} %" if percent else f"{found:.2f}"


def readme() -> list[str]:
    demo, argmax, full = results("demo")["lm"], results("argmax"), "FEM-SM"
    hits = {name: 100 * mean(argmax["argmax"][name]["hits"]) for name in ("softmax", "fem")}
    constant = 100 * argmax["baselines"]["the best constant"]["hits"]
    at_best, on_seeds = losses("ablate_16m_rates"), losses("ablate_16m_seeds")
    timed, at_10m = (results(page)["ablate"] for page in ("ablate_16m_time", "ablate_10m"))
    slower_step = f"{timed['full/r8']['ms a step'] / timed['-C,G,T,L']['ms a step']:.2f} times"
    types = Counter(found["result"] for found in results("clients")["model_types"])
    cases = Counter(found["outcome"] for found in results("chaos")["cases"])
    assert set(cases) == {"same"}
    sizes = [results(f"finetune_{name}")["finetune"] for name in ("gpt2", "llama")]
    extra = [100 * (found[TRAINED]["parameters"] / found["attention"]["parameters"] - 1) for found in sizes]
    return [
        f"({demo['fem']['parameters'] / 1e6:.2f}M parameters)",
        f"FEM ends at a loss of {demo['fem']['val_loss']:.3f} nats",
        f"attention at {demo['softmax']['val_loss']:.3f}.",
        f"{types['right']} model types of transformers",
        f"steps to 99.9 %, one seed | {recalls('softmax')} | {recalls(FULL)} | "
        f"the conditioner; without it {recalls(OWN)} |",
        f"{types['refused']} others are refused by name",
        f"of {cases.total()} small trainings",
        regimes_row("peak")
        + f" the free energy, given width: slim gates {of('peak', SLIM)}, full gates {of('peak', OWN)}, "
        f"outer gate alone {of('peak', 'softmax+G')} |",
        regimes_row("high-water", percent=True)
        + f" the same: slim {of('high-water', SLIM, percent=True)}, full {of('high-water', OWN, percent=True)}, "
        f"outer gate alone {of('high-water', 'softmax+G', percent=True)} |",
        regimes_row("ett-extremes", page="regimes_ett") + f" slim gates {of('ett-extremes', SLIM, 'regimes_ett')}, "
        f"free energy alone {of('ett-extremes', 'softmax+L', 'regimes_ett')}, "
        f"full gates {of('ett-extremes', OWN, 'regimes_ett')}, "
        f"outer gate alone {of('ett-extremes', 'softmax+G', 'regimes_ett')} |",
        regimes_row("snapshot", percent=True) + f" slim gates {of('snapshot', SLIM, percent=True)}, "
        f"free energy alone {of('snapshot', 'softmax+L', percent=True)}, full {of('snapshot', OWN, percent=True)}, "
        f"outer gate alone {of('snapshot', 'softmax+G', percent=True)} |",
        regimes_row("bags", percent=True)
        + f" slim gates {of('bags', SLIM, percent=True)}, full {of('bags', OWN, percent=True)}, "
        f"free energy alone {of('bags', 'softmax+L', percent=True)}, "
        f"outer gate alone {of('bags', 'softmax+G', percent=True)} |",
        f"| {score('statistics', 'softmax'):.3f} | {score('statistics', SLIM):.3f} | none: the mean is right here; the "
        f"free energy alone loses, {score('statistics', 'softmax+L'):.3f} |",
        f"| {hits['softmax']:.1f} % | {hits['fem']:.1f} % | the free energy; a constant hits {constant:.0f} % |",
        f"[language model, {millions('ablate_softmax')}, 0.3M tokens](docs/results/ablate_softmax.md)",
        f"| {loss('ablate_softmax', '-C,G,T,L'):.3f} | {loss('ablate_softmax', 'full'):.3f} | without C "
        f"{loss('ablate_softmax', '-C'):.3f}; outer gate alone {loss('ablate_softmax', '+G'):.3f} |",
        f"[{millions('ablate_10m')} parameters, 1.8M tokens](docs/results/ablate_10m.md), one "
        f"seed | {at_10m['-C,G,T,L']['loss']:.3f} | {at_10m['full']['loss']:.3f} | not taken apart; slim gates "
        f"{at_10m['full/r8']['loss']:.3f} |",
        f"slim ones {lead('ablate_16m', 'full/r8')} nats, of which the outer gate {lead('ablate_16m', '+G/r8')}, the "
        f"free energy {lead('ablate_16m', '-C/r8', '+G/r8')} and the conditioner "
        f"{lead('ablate_16m', 'full/r8', '-C/r8')}.",
        f"[{millions('ablate_16m')} parameters, 16M tokens](docs/results/ablate_16m_seeds.md), 3 seeds, one learning "
        f"rate | {on_seeds['-C,G,T,L']:.3f} | {on_seeds['full/r8']:.3f} | slim gates; [with one seed]"
        f"(docs/results/ablate_16m.md) the slim outer gate alone brings {lead('ablate_16m', '+G/r8')} of "
        f"{lead('ablate_16m', 'full/r8')}, full gates nothing |",
        f"of three, one seed | {at_best['-C,G,T,L']:.3f} | {at_best['full/r8']:.3f} | slim gates |",
        f"[{millions('ablate_16m_3m')} parameters, 16M tokens](docs/results/ablate_16m_3m.md), one seed, one learning "
        f"rate | {loss('ablate_16m_3m', '-C,G,T,L'):.3f} | {loss('ablate_16m_3m', 'full/r8'):.3f} | slim gates |",
        f"[{millions('ablate_16m_time')}, in equal time](docs/results/ablate_16m_time.md)",
        f"on a CPU, one seed | {timed['-C,G,T,L']['loss']:.3f} | {timed['full/r8']['loss']:.3f} | slim gates lose: "
        f"their step takes {slower_step} attention's |",
        f"| {loss('ablate_gla', '-C,G,T,L'):.3f} | {loss('ablate_gla', 'full'):.3f} | "
        "[more than half](docs/results/ablate_gla_norm.md)",
        f"| {mad('softmax'):.1f} % | {mad(FULL):.1f} % | the conditioner alone {mad('softmax+C'):.1f} %;",
        f"| {top1('cifar', 'softmax'):.1f} % | {top1('cifar', FULL):.1f} % |",
        f"| {top1('digits', 'softmax'):.1f} % | {top1('digits', FULL):.1f} % |",
        f"| {mse('forecast_etth1', 'ETTh1', 'softmax'):.3f} | {mse('forecast_etth1', 'ETTh1', FULL):.3f} | a tie; "
        f"without any mixer {mse('forecast_etth1', 'ETTh1', 'none'):.3f} |",
        "| "
        + ", ".join(f"{mse('forecast_ett96', data, 'patchtst'):.3f}" for data in ("ETTm1", "ETTh2"))
        + " (PatchTST) | "
        + ", ".join(f"{mse('forecast_ett96', data, 'femforecaster'):.3f}" for data in ("ETTm1", "ETTh2"))
        + " (`FEMForecaster`) | not taken apart; DLinear "
        + ", ".join(f"{mse('forecast_ett96', data, 'dlinear'):.3f}" for data in ("ETTm1", "ETTh2"))
        + " |",
        f"| {after('gpt2', 'attention'):.3f}, {after('llama', 'attention'):.3f} | {after('gpt2', TRAINED):.3f}, "
        f"{after('llama', TRAINED):.3f} | "
        f"with {min(extra):.0f} to {max(extra):.0f} % more parameters, mostly the gate |",
        *(
            f"| {shown} | {layer(name, 'layer_epyc', 'layer_cpu')} |"
            for shown, name in (
                ("FEM without the conditioner", f"{full} without C"),
                ("FEM", full),
                ("FEM on a GLA prior", "FEM-GLA"),
            )
        ),
        f"| slim gates, without the conditioner (EPYC alone) | {layer(f'{full} slim, without C', 'layer_epyc')} |",
        f"{slower('cifar'):.1f} to {slower('digits'):.1f} times at 65 and 17 tokens of small width",
        f"one at a time: {token(full)} times attention's time, {token(f'{full} without C')} without the conditioner, "
        f"and then {token(f'{full} without C', 'served')} where both are compiled",
        f"with a GLA prior {ratio('decode', 16384, 'FEM-GLA', 'state_bytes'):.3f} times as large at 16k tokens",
    ]


def faq() -> list[str]:
    least, most = (
        pick(ratio("layer", time, "FEM-SM", "train_s", page) for time in (512, 2048))
        for pick, page in ((min, "layer_epyc"), (max, "layer_cpu"))
    )
    memory = max(ratio("layer", time, "FEM-SM", "train_extra_bytes", "layer_epyc") for time in (512, 2048))
    slim, own = "FEM-SM slim, without C", "FEM-SM without C"
    wider = span([ratio("layer", time, slim, "train_s", "layer_epyc", own) for time in (512, 2048)], 1)
    tokens = [ratio("decode", time, "FEM-SM", "token_s") for time in (1024, 4096, 16384)]
    demo, small = results("demo")["lm"], losses("ablate_softmax")
    speed = demo["fem"]["tokens_per_second"] / demo["softmax"]["tokens_per_second"]
    rate, at_3m = results("ablate_long_rate")["ablate"], losses("ablate_3m")
    seconds = [mse("forecast_etth1", "ETTh1", model, "cpu_seconds") for model in ("softmax", FULL)]
    long = [rate["+G"]["loss"] - rate["-C"]["loss"], small["+G"] - small["-C"]]
    at_16m, at_best = losses("ablate_16m"), losses("ablate_16m_rates")
    lost = [short(score("statistics", "softmax") - score("statistics", mixer), 3) for mixer in (SLIM, "softmax+L")]
    pools = [100 * score("bags", f"pool:{pool}", "regimes_pools") for pool in ("fem", "attention")]
    best = ("high-water", "snapshot")
    machines = f"{state('mamba'):.0f}, {state('mamba_interactive'):.0f} kB"
    return [
        f"(MSE {mse('forecast_etth1', 'ETTh1', FULL):.4f} against {mse('forecast_etth1', 'ETTh1', 'softmax'):.4f}, two "
        f"seeds) for {seconds[1] / seconds[0]:.1f} times the training time",
        f"{top1('digits', FULL):.1f} against {top1('digits', 'softmax'):.1f} % lies within the spread",
        f"[{least:.2f}](results/layer_epyc.md) to [{most:.2f} times](results/layer_cpu.md) that of attention, "
        f"and up to {memory:.2f} times its memory",
        f"a streamed token [{min(tokens):.1f} to {max(tokens):.1f} times](results/decode_cpu.md)",
        f"[{wider} times](results/layer_epyc.md) the published split's train step",
        f"at 17 tokens of width 48 it takes {slower('digits'):.1f} times as long",
        f"language model runs at {100 * speed:.0f} % of",
        f"brought {small['-C,G,T,L'] - small['+G']:.3f} of the {small['-C,G,T,L'] - small['-C']:.3f} nats",
        f"it was {at_3m['-C,G,T,L'] - at_3m['+G']:.3f} of {at_3m['-C,G,T,L'] - at_3m['-C']:.3f}, "
        f"and the conditioner brought {at_3m['-C'] - at_3m['full']:.3f} more",
        f"attention ends at {at_16m['-C,G,T,L']:.3f} nats, the outer gate alone at {at_16m['+G']:.3f} and FEM without "
        f"C at {at_16m['-C']:.3f}: the last two are ahead for 1.5M tokens, then attention is. With C it ends at "
        f"{at_16m['full']:.3f}. Slim gates end at {at_16m['full/r8']:.3f}, without C at {at_16m['-C/r8']:.3f}, the "
        f"slim outer gate alone at {at_16m['+G/r8']:.3f}. All have rate .002, at which attention is not at its best; "
        f"[at its best](results/ablate_16m_rates.md) it has {at_best['-C,G,T,L']:.3f}, slim FEM "
        f"{at_best['full/r8']:.3f}.",
        f"{slim_lead()} nats on three seeds, {lead('ablate_16m_rates', 'full/r8')} where [each has its best rate]"
        f"(results/ablate_16m_rates.md), {lead('ablate_16m_3m', 'full/r8')} with [three times the parameters]"
        f"(results/ablate_16m_3m.md); full gates without C lose {lead('ablate_16m', '-C,G,T,L', '-C')}. In equal time "
        f"on a CPU attention is ahead by {lead('ablate_16m_time', '-C,G,T,L', 'full/r8')} |",
        f"{recalls('softmax+C')} steps to 99.9 %, FEM without C {recalls(OWN)}, attention {recalls('softmax')} |",
        f"alone reaches {mad('softmax+C'):.1f} of full FEM's {mad(FULL):.1f} %, attention {mad('softmax'):.1f}.",
        f"[{gained('gpt2', TRAINED):.3f} nats for a GPT-2]",
        f"[{gained('llama', TRAINED):.3f} for a Llama]",
        f"slim FEM explains {of('peak', SLIM, percent=True)} of running maxima and minima, attention "
        f"{100 * score('peak', 'softmax'):.0f})",
        f"{rate['-C']['loss']:.3f} against {rate['-C,G,T,L']['loss']:.3f} nats per token",
        f"({top1('cifar', FULL):.1f} against {top1('cifar', 'softmax'):.1f} %, [half of it]",
        f"{short(score('peak', SLIM), 2)}, {100 * score(best[0], SLIM):.0f} and {100 * score(best[1], SLIM):.0f} %, "
        f"where attention has {short(score('peak', 'softmax'), 2)}, {100 * score(best[0], 'softmax'):.0f} and "
        f"{100 * score(best[1], 'softmax'):.0f} %",
        f"[real sensors](results/regimes_ett.md) {short(score('ett-extremes', SLIM, 'regimes_ett'), 2)} and "
        f"{short(score('ett-extremes', 'softmax', 'regimes_ett'), 2)};",
        f"L and T add {short(min(long), 2)} to {short(max(long), 2)} nats, slim gates lose",
        f"{short(gained('gpt2', 'attention+G'), 3)} to {short(gained('llama', 'attention+G'), 3)} nats |",
        f"plain attention; slim gates lose {lost[0]}, L alone {lost[1]} |",
        f"instead of attention pooling, {pools[0]:.1f} against {pools[1]:.1f} %;",
        f"slim FEM names {of('bags', SLIM, percent=True)}, attention {of('bags', 'softmax', percent=True)} |",
        f"{scan('gla', '8192'):.0f} ms for a train step at 8192 tokens, "
        f"{scan('gla', '8192') / scan('gla', '1024'):.1f} times that of 1024",
        f"{scan('rnn_softmax', '8192'):.0f} and {scan('rnn_decay', '8192'):.0f} ms, and a state of "
        f"{state('rnn_decay'):.0f} kB a layer;",
        f"{scan('mamba', '8192'):.0f} ms; time and state",
        f"of its tokens only | {state('softmax'):.1f} kB a token |",
        f"| `linear`, `gla` | D (2 d/H + 1) | {state('gla'):.0f} kB |",
        f"| `rnn_softmax`, `rnn_decay` | 4 d | {state('rnn_decay'):.1f} kB |",
        f"| `mamba`, `mamba_interactive` | 4 d N, N the rank | {machines} |",
    ]


def language() -> list[str]:
    pages = ("ablate_16m_half", "ablate_16m_rate4", "ablate_16m_3m")
    by_size = ", ".join(f"{lead(page, 'full/r8')} with [{millions(page)}](results/{page}.md)" for page in pages)
    return [
        f"{slim_lead()} nats",
        f"[each at its best of three](results/ablate_16m_rates.md), {lead('ablate_16m_rates', 'full/r8')} remain.",
        f"Of the {lead('ablate_16m', 'full/r8')} nats of the first seed the slim outer gate brings "
        f"{lead('ablate_16m', '+G/r8')}, free energy and temperature gate {lead('ablate_16m', '-C/r8', '+G/r8')}, the "
        f"conditioner {lead('ablate_16m', 'full/r8', '-C/r8')}.",
        f"at rate .004, one seed each, the nats are {by_size} parameters.",
        "1.4 to 1.5 times as long; it would be level [at 1.22 times]",  # as the pages of the three sizes say
        *(plain(figures.table(pages)) for pages in (figures.PAGES, figures.EQUAL_TIME)),
    ]


def sections(text: str, wanted: tuple[str, ...]) -> str:
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return "\n".join(body for title, body in zip(parts[1::2], parts[2::2]) if title in wanted)


def plain(text: str) -> str:
    """One line, without code blocks and formulas."""
    return " ".join(re.sub(r"```.*?```|\$`.*?`\$", "", text, flags=re.DOTALL).split())


def checked(text: str, claims: list[str], others: tuple[str, ...] = ()) -> list[str]:
    """The measured numbers that no claim covers. A claim that the text does not make fails."""
    for claim in [*claims, *others]:
        assert claim in text, f"the page does not say {claim!r}"
        text = text.replace(claim, " ")
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [text[max(0, found.start() - 60) : found.end() + 20] for found in MEASURED.finditer(text)]


def test_every_measured_number_of_the_readme_is_that_of_a_results_page():
    text = plain((ROOT / "README.md").read_text())
    numbers = checked(text, readme(), NOT_MEASURED)
    assert not numbers


def test_every_measured_number_of_the_faq_is_that_of_a_results_page():
    text = plain(sections((ROOT / "docs" / "faq.md").read_text(), FAQ))
    assert not checked(text, faq())


def test_every_measured_number_of_the_page_on_language_models_is_that_of_a_results_page():
    text = plain((ROOT / "docs" / "language.md").read_text())
    assert not checked(text, language())
