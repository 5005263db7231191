"""The page on language models, its tables too."""

import sys
from pathlib import Path

from claims import (
    GATE_AND_C,
    PLAIN,
    WIDE,
    at_best_rates,
    below,
    lead,
    loss,
    losses,
    millions,
    plain,
    short,
    slower_step,
    step,
    unsigned,
    weights,
)
from said import level_at, results
from said_language import (
    ALONE,
    ATTENTION,
    BROAD,
    CONV,
    NO_F_32,
    SLIM_32,
    SLIM_BROAD,
    SPLIT_BROAD,
    at_rates,
    more_time,
    on_both_seeds,
    twice_the_tokens,
    two_blocks_at_best,
    widened,
)

from fem_research.common.paired import shown

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "figures"))

import language as figures


def slim_lead() -> str:
    """Of slim FEM over attention with 16M tokens, on three seeds."""
    return unsigned(results("ablate_16m_seeds")["ablate"]["full/r8"]["below attention, paired"])


def without_f(over: str = "-C,G,T,L") -> str:
    """Nats by which attention with the slim outer gate and the conditioner is below a row, each at its best rate."""
    return short(loss("ablate_16m_rates", over) - loss("ablate_16m_attribution_rate8", "+C,G/r8"), 3)


def two_lead(row: str) -> str:
    """Nats below attention with two blocks of width 512."""
    return unsigned(shown(two_blocks_at_best(ATTENTION), two_blocks_at_best(row)))


def language() -> list[str]:
    sizes = ", ".join(
        f"{lead(page, 'full/r8')} {'nats ' if page == 'ablate_16m_3m' else ''}with [{millions(page)}]"
        "(results/ablate_16m.md)"
        for page in ("ablate_16m_half", "ablate_16m_rate4", "ablate_16m_3m")
    )
    timed = losses("ablate_16m_time")
    at_4, split = losses("ablate_16m_rate4"), loss("ablate_16m_split", "-C/r8/s.5")
    timed_split = losses("ablate_16m_split_time")
    two = on_both_seeds("ablate_512_two_rate1", ATTENTION)
    at_512 = {"conditioner": ALONE, "conv": CONV, "gate": "+G/r32", "parts": NO_F_32}
    at_512 = {name: on_both_seeds(f"ablate_512_two_{name}_rate1", row) for name, row in at_512.items()}
    apart = {
        name: " and ".join(short(plain - own, 3) for plain, own in zip(two, ended)) for name, ended in at_512.items()
    }
    late, late_broad = map(twice_the_tokens, (ATTENTION, BROAD))
    later = " and ".join(short(their - our, 3) for our, their in zip(late_broad, late))
    behind = {
        row: " and ".join(short(own - our, 3) for our, own in zip(late_broad, twice_the_tokens(row)))
        for row in (SLIM_BROAD, SPLIT_BROAD)
    }
    earlier, lower = (" and ".join(short(nats, 3) for nats in widened(over)) for over in (ATTENTION, NO_F_32))
    layers = [weights(**GATE_AND_C, **wide) for wide in ({}, {"conv_hidden": 128})]
    return [
        f"slim FEM ends {below('full/r8')} nats below attention**, {at_best_rates('full/r8')} against "
        f"{at_best_rates('-C,G,T,L')}: {millions('ablate_16m_rates')} parameters, three seeds",
        f"the gate and the conditioner alone end at {timed_split['+C,G/r8']:.3f}, ahead. All three are at .004, one "
        f"seed; attention at .008, its best rate, has {at_rates('ablate_16m_rates', ATTENTION)[0.008]:.3f} on",
        f"they end at {timed_split['-C/r8/s.5']:.3f} and attention at {timed_split['-C,G,T,L']:.3f}: "
        f"{lead('ablate_16m_split_time', '-C/r8/s.5')} below",
        f"At rate .002, which suits attention least, it is [{slim_lead()} on three seeds](results/ablate_16m.md)",
        "[Each at its best rate](results/ablate_16m.md), one seed, attention with",
        f"but without the free energy, ends {without_f()} nats below attention and {without_f('full/r8')} below slim "
        f"FEM; on three seeds, at rate .004, {below('+C,G/r8')} below attention, and the "
        f"conditioner alone {below('-G,T,L')}. A [short convolution](results/ablate_16m.md) in place of the "
        "conditioner ends "
        f"{short(loss('ablate_16m_conv', CONV) - loss('ablate_16m_conditioner_alone', ALONE), 3)} above it, one",
        f"On three seeds, on one machine, they end {below('+C,G/r8', 'full/r8')} below slim FEM",
        f"in a step of {step('ablate_16m_split_time', '-C/r8/s.5')} times attention's, end at "
        f"[{at_best_rates('-C/r8/s.5')} nats](results/ablate_16m.md) over three seeds at .008, "
        f"{below('-C/r8/s.5')} below attention: less than two",
        f"At .004, one seed, they are {short(at_4['+G/r8'] - split, 3)} below the slim outer gate alone",
        f"At .002 the slim outer gate brings {lead('ablate_16m', '+G/r8')} of {lead('ablate_16m', 'full/r8')} nats, "
        f"free energy and temperature gate {lead('ablate_16m', '-C/r8', '+G/r8')}, the conditioner "
        f"{lead('ablate_16m', 'full/r8', '-C/r8')}.",
        "at rate .002, they bring nothing",
        f"(.004) have leads of {sizes} parameters. At .004 slim FEM is at its best with {millions('ablate_16m_rates')}",
        f"with {millions('ablate_16m_time')} parameters, {timed['-C,G,T,L']:.3f} against {timed['full/r8']:.3f} at the "
        f"rate .002, one seed, as a step of slim FEM takes {slower_step()} times as long;",
        f"It would be level [at {level_at():.2f} times](results/ablate_16m.md).",
        f"[With {millions('ablate_10m')} parameters](results/ablate_10m.md) and 1.8M tokens",
        f"of slim FEM, whose step takes {step(WIDE, 'full/r32')} times as long, ends {lead(WIDE, 'full/r32')} below "
        f"attention and split values {lead(WIDE, '-C/r32/s.5')}, but the gate and the conditioner alone "
        f"{lead(WIDE, '+C,G/r32')}. [Two blocks](results/ablate_512_two.md) of slim FEM end "
        f"{two_lead(SLIM_32)} below and the gate and the conditioner alone {two_lead(NO_F_32)}, each at the "
        f"better of two rates, two seeds, with {more_time(SLIM_32):.0f} and {more_time(NO_F_32):.0f} % more time.",
        f"[The conditioner alone](results/ablate_512_two.md) brings {apart['conditioner']} of the {apart['parts']} "
        f"nats that it brings with the gate on two seeds, the slim gate alone {apart['gate']}; a short convolution in "
        f"its place brings {apart['conv']}, one seed.",
        f"two blocks with the gate and the conditioner alone end another {lower} lower",
        f"they end {later} below attention, after 4M {earlier} on two seeds. In as long a training slim FEM with 128 "
        f"channels ends {behind[SLIM_BROAD]} above them, one seed, and split values {behind[SPLIT_BROAD]}.",
        f"grows from {layers[0] / weights(**PLAIN):.2f} to {layers[1] / weights(**PLAIN):.2f} times attention's.",
        "The texts: 16.0M and 1.8M tokens are program source, Python's and torch's, and what is held out is code of "
        "the same projects; 3.1M are Python's sources and help topics; 0.3M and 1.0M are speeches.",
        *(plain(figures.table(pages)) for pages in (figures.PAGES, figures.EQUAL_TIME)),
    ]
