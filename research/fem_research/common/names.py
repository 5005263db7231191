"""The name and the colour of a mixer in tables and pictures; `canonical(display(name)) == name`, but for pools."""

from __future__ import annotations

from fem_research.common.mixers import OTHERS, PARTS, PUBLISHED_UNNORMALISED, SHOWN, UNNORMALISED, known, taken_apart

FULL = "".join(PARTS)
KEY = (
    "C: conditioner, L: free energy, T: temperature gate (lambda), G: outer gate; FEM has all four. attention: softmax "
    "attention."
)
GREYS = {"softmax": "#4b5563", "linear": "#868e9c", "gla": "#7c8594", "rnn_softmax": "#8f8983", "rnn_decay": "#949aa5"}
GREYS |= {"mamba": "#6b7280", "mamba_interactive": "#8d8379"}
OTHER_GREY = "#868e9c"
FULL_COLOURS = {"softmax": "#1f5fbf", "linear": "#0f9488", "gla": "#0b6b4f", "rnn_softmax": "#6f4e00"}
FULL_COLOURS |= {"rnn_decay": "#a16207", "mamba": "#7d1d5c", "mamba_interactive": "#d1495b"}
PART_COLOURS = {"G": "#e07b39", "L": "#3a9d6b", "LG": "#5f8d2f", "LT": "#2aa5b8", "LTG": "#8b5fbf"}
PART_COLOURS |= {"C": "#b8972f", "CG": "#a0522d", "CL": "#7da33a", "CLG": "#c08497", "CLT": "#c2477f"}
PART_COLOURS |= {"CLTG": "#1f5fbf"}
NEURAL = {"itransformer": "iTransformer", "patchtst": "PatchTST", "dlinear": "DLinear"}  # with settings of their own
NEURAL |= {"femforecaster": "FEMForecaster"}
FORECASTERS = NEURAL | {"none": "no mixer"}
OWN_COLOURS = {"itransformer": "#64748b", "patchtst": "#857c74", "dlinear": "#a08c74", "none": "#111827"}
OWN_COLOURS |= {"femforecaster": FULL_COLOURS["softmax"]}
POOL_COLOURS = {"pool:fem": FULL_COLOURS["softmax"], "pool:lse": PART_COLOURS["L"]}


def display(name: str) -> str:
    """The mixer as a reader sees it: "attention+LT", "FEM", "FEM-GLA/r8", "DeltaNet (fla)", "FEM pooling/r4".

    Without L, gla and mamba are shown as they were published, unnormalised, and "/norm" says where they are not.
    """
    if name.startswith("pool:"):
        kind, *options = name.removeprefix("pool:").split("/")
        return "/".join([f"{'FEM' if kind == 'fem' else kind} pooling", *options])
    try:
        name = known(name)
    except ValueError:
        return name
    if name in OTHERS:
        return name
    if name.startswith("fla:"):
        return f"{name.removeprefix('fla:')} (fla)"
    prior, parts, raw, options = taken_apart(name)
    title = SHOWN.get(prior, prior)
    if parts == FULL:
        shown = "FEM" if prior == "softmax" else f"FEM-{title}"
    else:
        shown = title + (f"+{parts}" if parts else "")
    as_published = prior in PUBLISHED_UNNORMALISED and "L" not in parts
    return "/".join([shown + (UNNORMALISED if raw and not as_published else ""), *options])


def sizes(mlp: str, part: str) -> str:
    """A phrase for pages: models with other mixers have in common "narrowed" parameters, or the "kept" part."""
    if mlp == "kept":
        return f"the same {part}, as in the paper, and as many parameters as their mixers bring"
    return f"the same number of parameters (a mixer that has more gets narrower {part})"


def as_shown(mixers: str) -> str:
    """Mixers with commas, by the names of tables and pictures, but for pools, whose names cannot be typed."""
    return ",".join(name if name.startswith("pool:") else display(name) for name in mixers.split(","))


def colour(name: str) -> str:
    """The mixer's colour: greys for what has no part of FEM."""
    if name.startswith("pool:"):
        return POOL_COLOURS.get(name.split("/")[0], OTHER_GREY)
    if name in OWN_COLOURS:
        return OWN_COLOURS[name]
    try:
        prior, parts, *_ = taken_apart(known(name))
    except ValueError:
        return OTHER_GREY
    if not parts:
        return GREYS.get(prior, OTHER_GREY)
    return FULL_COLOURS.get(prior, PART_COLOURS[FULL]) if parts == FULL else PART_COLOURS[parts]
