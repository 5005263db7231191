"""The mixers that experiments compare, by names such as "softmax+LTG/r4": prior, parts of FEM, options."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from fem.config import CONDITIONERS, FreeEnergyMixerConfig, build_config, paper_fields
from fem.recipes import TOO_LARGE, listed

INITIALISATIONS = ("normal", "torch")  # of the linear maps, see `blocks.initialise`
PARTS = {"C": "use_conv", "L": "use_lse", "T": "use_temperature", "G": "use_outer_gate"}
SHOWN = {"softmax": "attention", "gla": "GLA", "rnn_softmax": "AFT", "mamba": "Mamba", "mamba_interactive": "Mamba-i"}
UNNORMALISED = "-norm"
NUMBERED = {  # the field that an option with a number sets, by its letter
    "h": ("n_head", int),
    "c": ("conv_hidden", int),
    "r": ("gate_rank", int),
    "s": ("free_share", float),
    "b": ("beta_max_init", lambda text: math.log(math.expm1(float(text)))),
    "l": ("lambda_init", float),
}
OPTION = re.compile(
    r"r\d+|s0?\.\d+|s1|b\d+(\.\d+)?|l-?\d+(\.\d+)?|[hc][1-9]\d*|wide|double|thirds|paper|lambda|norm|norope|conv|cpaper|cauthors"
)
FORMS = tuple(f"c{form}" for form in CONDITIONERS if form != "scaled")  # of the conditioner
WIDTHS = {"wide": (1.0, 2.0), "double": (2.0, 1.0), "thirds": (2 / 3, 2.0)}  # fem_ratio and p_t_to_fem_ratio
PUBLISHED_UNNORMALISED = ("gla", "mamba")
LARGEST_BETA = 700.0  # that softplus can be inverted at
POOLS = ("pool:mean", "pool:max", "pool:lse", "pool:attention", "pool:gated", "pool:fem", "pool:fem/r4")
KNOWN_ANSWERS = ("cummax", "gru")  # layers that take a prior's place: a running maximum of values, and a GRU
OTHERS = ("DiffTrans", "Hyena")  # other papers' mixers, in no library: `diff_attention`, `hyena`
UNTYPED = (*POOLS, *KNOWN_ANSWERS)  # rows that are no prior with parts


class Baseline(NamedTuple):
    module: str
    layer: str
    arguments: Callable[[int, int], dict]  # from width and heads


def _by_heads(width: int, heads: int) -> dict:
    return {"hidden_size": width, "num_heads": heads}


FIRST_LAYER = {"layer_idx": 0, "num_hidden_layers": 2}  # of RWKV7, which needs no output of an earlier one
BASELINES = {
    "RWKV6": Baseline("fla.layers", "RWKV6Attention", _by_heads),
    "RWKV7": Baseline("fla.layers", "RWKV7Attention", lambda d, h: {"hidden_size": d, "head_dim": 64} | FIRST_LAYER),
    "LinAttn": Baseline("fla.layers", "LinearAttention", _by_heads),
    "HGRN2": Baseline("fla.layers", "HGRN2Attention", lambda d, h: {"hidden_size": d, "expand_ratio": d // h}),
    "PaTHAttention": Baseline("fla.layers", "PaTHAttention", _by_heads),
    "GatedSlotAttention": Baseline("fla.layers", "GatedSlotAttention", _by_heads),
    "DeltaNet": Baseline("fla.layers", "DeltaNet", _by_heads),
    "GatedDeltaNet": Baseline(
        "fla.layers", "GatedDeltaNet", lambda d, h: _by_heads(d, h) | {"head_dim": d // h, "expand_v": 1}
    ),
    "Mamba2": Baseline("fla.layers", "Mamba2", lambda d, h: {"hidden_size": d, "num_heads": d // 32, "head_dim": 64}),
    "Mamba (fla)": Baseline("fla.layers", "Mamba", lambda d, h: {"hidden_size": d, "intermediate_size": 2 * d}),
    "GLA (fla)": Baseline("fla.layers", "GatedLinearAttention", _by_heads),
    "Mamba (mamba-ssm)": Baseline("mamba_ssm", "Mamba", lambda d, h: {"d_model": d}),
}
PUBLISHED = {f"fla:{baseline.layer}": name for name, baseline in BASELINES.items() if baseline.module == "fla.layers"}


def available(name: str, device) -> bool:
    """True if a baseline can run here: its library is installed and the device is a GPU."""
    module = BASELINES[name].module
    parts = (module.partition(".")[0], module)  # fla-core has the package fla, and no fla.layers
    return device.type == "cuda" and all(find_spec(part) is not None for part in parts)


def priors() -> Collection[str]:
    """The names of the priors. They are imported when first asked for: a command's help starts without torch."""
    from fem.priors import PRIORS

    return PRIORS


@cache
def aliases() -> dict[str, str]:
    """Other names of mixers, in small letters."""
    named = {prior: prior for prior in priors()} | {shown.lower(): prior for prior, shown in SHOWN.items()}
    full = {f"fem-{name}": f"{prior}+CLTG" for name, prior in named.items()}
    return named | full | {"sm": "softmax", "laser": "softmax+L", "fem": "softmax+CLTG", "fem-sm": "softmax+CLTG"}


def known(name: str) -> str:
    """`canonical`, or the name of a published mixer as it is. Raises ValueError on an unknown name."""
    if name in OTHERS:
        return name
    if not name.startswith("fla:"):
        return canonical(name)
    if name not in PUBLISHED:
        raise ValueError(f"mixer must be one of {', '.join(PUBLISHED)} where it is fla's; got {name!r}.")
    return name


def canonical(name: str) -> str:
    """The canonical name of a mixer: prior, "+" and its parts in the order C, L, T, G, then its options after slashes.

    "-norm": the score is not normalised. "/norm": it is; gla and mamba without L are unnormalised otherwise, as they
    were published (Table 1 normalises them from +L on). "/r4": gates of rank 4. "/s.5": split values, half of a head's
    channels read F and the others the mean. "/wide", "/double": values 1 and 2 times as wide as the layer; "/thirds":
    2/3, keys too. "/b8", "/l6": starts of beta and of lambda's bias. "/h16": 16 heads. "/norope": no position code.
    "/paper": the authors' widths, where `matched` has others. "/lambda": L without T keeps lambda, at beta 1.
    "/c32": a conditioner of 32 channels; "/cpaper", "/cauthors": its form in the paper and in the authors' file.
    "/conv": a short convolution, `blocks.ShortConvolution`, before the mixer.
    """
    whole, *options = name.split("/")
    plain = whole.removesuffix(UNNORMALISED)
    head, plus, tail = plain.partition("+")
    prior, _, parts = aliases().get(head.lower(), head).partition("+")
    parts += tail
    if (
        prior not in priors()
        or not set(parts) <= PARTS.keys()
        or ("T" in parts and "L" not in parts)
        or (plus and not tail)
        or any(not OPTION.fullmatch(option) for option in options)
        or len({option in (*WIDTHS, "paper") or option.rstrip("-.0123456789") for option in options}) < len(options)
    ):
        raise ValueError(
            f"mixer must be a prior ({', '.join(priors())}), alone or with '+' and some of the letters "
            f"{''.join(PARTS)} (T needs L), or a name such as attention, FEM, FEM-GLA, AFT, then options such as /r4, "
            f"/s.5, /wide, /double, /thirds, /paper, /lambda, /b8, /l6, /h16, /c32, /cpaper, "
            f"/cauthors, /norope, /conv, /norm; got {name!r}."
        )
    if prior == "softmax" and plain != whole:
        raise ValueError(f"the softmax prior is normalised by definition; leave out {UNNORMALISED!r}, got {name!r}.")
    if "lambda" in options and ("L" not in parts or "T" in parts or any(option[0] == "s" for option in options)):
        raise ValueError(f"/lambda keeps lambda where L stands without T and without /s, got {name!r}.")
    gated = {*parts, *(["lambda"] if "lambda" in options else [])}
    needs = {"r": ("T", "G", "lambda"), "s": ("L",), "b": ("T",), "l": ("T", "lambda"), "c": ("C",)}
    needs |= dict.fromkeys(FORMS, ("C",))
    for option, needed in needs.items():
        if any(o.rstrip("-.0123456789") == option for o in options) and not gated & {*needed}:
            raise ValueError(f"/{option} sets a part that {whole!r} lacks ({' or '.join(needed)}), got {name!r}.")
    if plain != whole and "norm" in options:
        raise ValueError(f"{UNNORMALISED!r} and '/norm' contradict each other; leave one out, got {name!r}.")
    if any(option[0] == "b" and not 0 < float(option[1:]) <= LARGEST_BETA for option in options):
        raise ValueError(f"beta must start above 0 and at most at {LARGEST_BETA:g}, got {name!r}.")
    published_raw = prior in PUBLISHED_UNNORMALISED and "L" not in parts
    raw = plain != whole or (published_raw and "norm" not in options)
    options = [option for option in options if option != "norm" or (published_raw and not raw)]
    options = [option for option in options if option != "paper" or paper_fields(prior, {})]
    shown = "".join(letter for letter in PARTS if letter in parts)
    return "/".join([prior + (f"+{shown}" if shown else "") + (UNNORMALISED if raw else ""), *sorted(options)])


def taken_apart(name: str) -> tuple[str, str, bool, list[str]]:
    """Prior, parts, whether the score is left unnormalised by "-norm", and options of a canonical name."""
    mixer, *options = name.split("/")
    prior, _, parts = mixer.removesuffix(UNNORMALISED).partition("+")
    return prior, parts, mixer.endswith(UNNORMALISED), options


def fields_of(name: str) -> dict:
    """The fields of `FreeEnergyMixerConfig` that make the mixer with this canonical name."""
    prior, parts, raw, options = taken_apart(name)
    fields: dict = {"prior_type": prior} | {field: letter in parts for letter, field in PARTS.items()}
    if raw:
        fields["normalize"] = False
    named = {"norm": {}, "conv": {}, "paper": {}, "norope": {"use_rope": False}, "lambda": {"keep_lambda": True}}
    named |= {name: {"conv_form": name.removeprefix("c")} for name in FORMS}
    named |= {name: {"fem_ratio": width, "p_t_to_fem_ratio": keys} for name, (width, keys) in WIDTHS.items()}
    for option in options:
        field, read = NUMBERED.get(option[0], ("", str))
        fields |= named[option] if option in named else {field: read(option[1:])}
    return paper_fields(prior, fields) if "paper" in options else fields


def mixer_config(name: str, width: int, heads: int, **fields) -> FreeEnergyMixerConfig:
    """The mixer with this name, its linear weights 4 D^2 in number; with "/wide" and the like, as its widths need."""
    return build_config(n_embd=width, **{"n_head": heads} | fields | fields_of(canonical(name)))


def numbers(name: str, text: str) -> tuple[float, ...]:
    """The numbers in a list, each once. Raises ValueError, naming the field, where there is none, and where one is
    negative, too large or no number."""
    try:
        values = tuple(dict.fromkeys(float(value) for value in listed(text)))
    except ValueError:
        values = ()
    if not (values and all(0 <= number < TOO_LARGE for number in values)):
        wanted = f"numbers of 0 or more, below {TOO_LARGE:g}, with commas between them"
        raise ValueError(f"{name} must be {wanted}, got {text!r}.")
    return values


def above_zero(name: str, text: str) -> tuple[float, ...]:
    """`numbers` above 0, at which something is learnt."""
    values = numbers(name, text)
    if 0 in values:
        raise ValueError(f"{name} must be above 0, got {text!r}: nothing would be learnt.")
    return values
