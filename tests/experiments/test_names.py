"""The names of mixers in tables and pictures can be typed; no two mixers of a picture share a name or a colour."""

from itertools import product

import pytest

pytest.importorskip("torch")

from fem.experiments.common.baselines import PUBLISHED
from fem.experiments.common.mixers import canonical
from fem.experiments.common.names import colour, display
from fem.priors import PRIORS

PARTS = ["", "G", "L", "LG", "LT", "LTG", "C", "CG", "CL", "CLG", "CLT", "CLTG"]
ALL = sorted(
    {
        canonical(prior + (f"+{parts}" if parts else "") + norm + options)
        for prior, parts, norm, options in product(
            PRIORS, PARTS, ("", "-norm", "/norm"), ("", "/r4", "/b8/l6", "/wide")
        )
        if not (prior == "softmax" and norm == "-norm")
        and not ("r" in options and not {"T", "G"} & set(parts))
        and not ("b8" in options and "T" not in parts)
    }
)


def test_what_is_shown_can_be_typed():
    assert len(ALL) > 200
    for name in ALL:
        assert canonical(display(name)) == name, display(name)


def test_no_two_mixers_share_a_name():
    shown = [display(name) for name in [*ALL, *PUBLISHED]]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("prior", PRIORS)
def test_the_parts_of_a_prior_have_a_colour_each_and_priors_alone_are_grey(prior):
    colours = [colour(prior + (f"+{parts}" if parts else "")) for parts in PARTS]
    assert len(set(colours)) == len(PARTS)
    red, green, blue = (int(colours[0][index : index + 2], 16) for index in (1, 3, 5))
    assert max(red, green, blue) - min(red, green, blue) <= 32


def test_names_that_are_none_of_a_mixer_stay_as_they_are():
    assert display("a made-up mixer") == "a made-up mixer"
    assert [display(name) for name in ("pool:attention", "pool:fem/r4")] == ["attention pooling", "FEM pooling/r4"]
    assert display("fla:DeltaNet") == "DeltaNet (fla)"
    assert [display(name) for name in ("softmax", "fem-sm", "gla", "gla+CLTG", "mamba+CLTG-norm")] == [
        "attention",
        "FEM",
        "GLA",
        "FEM-GLA",
        "FEM-Mamba-norm",
    ]
