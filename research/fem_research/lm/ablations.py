"""The rows of an ablation: which of the parts C, L, T and G a mixer has, by the paper's names, and two controls."""

from __future__ import annotations

from typing import NamedTuple

from fem_research.common.mixers import canonical, fields_of, taken_apart


class Row(NamedTuple):
    """The parts that a row has, and what it is, in words."""

    parts: str
    remark: str


ROWS = {
    "full": Row("CLTG", "the Free Energy Mixer"),
    "-G": Row("CLT", "no outer gate"),
    "-G,T": Row("CL", "no outer gate, log-sum-exp at beta 1"),
    "-G,T,L": Row("C", "the conditioner alone"),
    "-C": Row("LTG", "the Free Energy Mixer without its conditioner"),
    "-C,G": Row("LT", "free energy and temperature gate alone"),
    "-C,G,T": Row("L", "LASER: log-sum-exp alone, at beta 1"),
    "-C,G,T,L": Row("", "the prior alone"),
    "+G": Row("G", "control: the outer gate alone, no free energy"),
    "+C,G": Row("CG", "control: all but the free energy"),
}
OPTIONS = {"r": "gates of rank {}", "b": "beta starting at {}", "l": "lambda's bias at {}", "h": "{} heads"}
NAMED_OPTIONS = {"norm": "normalised", "wide": "values as wide as the model", "norope": "no position code"}


def row_fields(row: str, prior: str) -> dict:
    """The fields of `FreeEnergyMixerConfig` that make this row of this prior. Raises ValueError as `mixer_name`."""
    return fields_of(mixer_name(row, prior))


def mixer_name(row: str, prior: str) -> str:
    """The mixer of a row, such as "softmax+LTG"; "-C/r8": with gates of rank 8, and other options of `canonical`.

    Without L, gla and mamba are unnormalised, as they were published (Table 1). Raises ValueError on an unknown row or
    prior.
    """
    name, slash, options = row.partition("/")
    if name not in ROWS:
        raise ValueError(f"mixers must be rows from {'; '.join(ROWS)}, with options such as /r8, got {row!r}.")
    parts = ROWS[name].parts
    return canonical((f"{prior}+{parts}" if parts else prior) + slash + options)


def row_of(mixer: str, prior: str) -> str:
    """The row of a mixer, such as "-C/r8" of "attention+LTG/r8". Raises ValueError on a mixer of another prior and on
    parts that are no row.
    """
    own, parts, _, options = taken_apart(canonical(mixer))
    row = next((row for row, found in ROWS.items() if found.parts == parts), None)
    if own != prior or row is None:
        known = ", ".join(prior + (f"+{row.parts}" if row.parts else "") for row in ROWS.values())
        raise ValueError(f"mixers must be from {known}, with options such as /r8, got {mixer!r}; see --prior.")
    return "/".join([row, *options])


def remark(row: str) -> str:
    """What the row is, in words."""
    name, *options = row.split("/")
    said = [NAMED_OPTIONS.get(option) or OPTIONS[option[0]].format(option[1:]) for option in options]
    return ", ".join([ROWS[name].remark, *said])
