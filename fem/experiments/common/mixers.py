"""The mixers that MAD compares, by names such as "softmax+CL": a prior, and the parts that are switched on.

"fla:DeltaNet" is what flash-linear-attention publishes under that name.
"""

from __future__ import annotations

from fem.experiments.common.baselines import PEERS
from fem.priors import PRIORS

PARTS = {"C": "use_conv", "L": "use_lse", "T": "use_temperature", "G": "use_outer_gate"}
ALIASES = {
    "sm": "softmax",
    "aft": "rnn_softmax",
    "laser": "softmax+L",
    **{f"fem-{prior}": f"{prior}+CLTG" for prior in PRIORS},
    "fem-sm": "softmax+CLTG",
    "fem-aft": "rnn_softmax+CLTG",
}
UNNORMALISED = "-norm"
PUBLISHED_UNNORMALISED = ("gla", "mamba")
PUBLISHED = {f"fla:{peer.layer}": name for name, peer in PEERS.items() if peer.module == "fla.layers"}


def known(name: str) -> str:
    """`canonical`, or the name of a published mixer as it is. Raises ValueError on a name that means nothing."""
    if not name.startswith("fla:"):
        return canonical(name)
    if name not in PUBLISHED:
        raise ValueError(f"mixer must be one of {', '.join(PUBLISHED)} where it is fla's; got {name!r}.")
    return name


def canonical(name: str) -> str:
    """The one name of a mixer: prior, "+" and its parts in the order C, L, T, G, "-norm" if the score stays as it is.

    Without L, gla and mamba are the published mixers, whose scores have no normaliser (Table 1 marks it from +L on).
    Raises ValueError on a name that means nothing.
    """
    plain = name.removesuffix(UNNORMALISED)
    head, plus, tail = plain.partition("+")
    prior, _, parts = ALIASES.get(head, head).partition("+")
    parts += tail
    if (
        prior not in PRIORS
        or not set(parts) <= PARTS.keys()
        or ("T" in parts and "L" not in parts)
        or (plus and not tail)
    ):
        raise ValueError(
            f"mixer must be a prior ({', '.join(PRIORS)}), alone or with '+' and some of the letters {''.join(PARTS)} "
            f"(T needs L), or one of {', '.join(ALIASES)}; got {name!r}."
        )
    raw = plain != name or (prior in PUBLISHED_UNNORMALISED and "L" not in parts)
    if raw and prior == "softmax":
        raise ValueError(f"the softmax prior is normalised by definition; leave out {UNNORMALISED!r}, got {name!r}.")
    shown = "".join(letter for letter in PARTS if letter in parts)
    return prior + (f"+{shown}" if shown else "") + (UNNORMALISED if raw else "")


def fields_of(name: str) -> dict:
    """The fields of `FreeEnergyMixerConfig` that make the mixer with this canonical name."""
    named, raw = name.removesuffix(UNNORMALISED), name.endswith(UNNORMALISED)
    prior, _, parts = named.partition("+")
    switches = {field: letter in parts for letter, field in PARTS.items()}
    return {"prior_type": prior, **switches} | ({"normalize": False} if raw else {})
