"""The names of mixers in tables and pictures can be typed; no two mixers of a picture share a name or a colour."""

from itertools import product

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib", reason="needs free-energy-mixer[cli]")

from matplotlib.colors import to_rgb

from fem.priors import PRIORS
from fem_research.common.blocks import PUBLISHED
from fem_research.common.mixers import canonical, mixer_config
from fem_research.common.names import FULL_COLOURS, GREYS, OTHER_GREY, OWN_COLOURS, PART_COLOURS, colour, display

PARTS = ["", "G", "L", "LG", "LT", "LTG", "C", "CG", "CL", "CLG", "CLT", "CLTG"]
ALL = sorted(
    {
        canonical(prior + (f"+{parts}" if parts else "") + norm + options)
        for prior, parts, norm, options in product(
            PRIORS,
            PARTS,
            ("", "-norm", "/norm"),
            ("", "/r4", "/b8/l6", "/wide", "/double", "/thirds", "/paper", "/lambda"),
        )
        if not (prior == "softmax" and norm == "-norm")
        and not ("r" in options and not {"T", "G"} & set(parts))
        and not ("b8" in options and "T" not in parts)
        and not ("lambda" in options and ("T" in parts or "L" not in parts))
    }
)


def test_what_is_shown_can_be_typed():
    assert len(ALL) > 200
    for name in ALL:
        assert canonical(display(name)) == name, display(name)


def test_no_two_mixers_share_a_name():
    shown = [display(name) for name in [*ALL, *PUBLISHED]]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize(
    "name, canonical_name, config",
    [
        ("FEM-Mamba/paper", "mamba+CLTG/paper", {"prior_type": "mamba", "fem_dim": 64}),
        ("mamba/paper", "mamba-norm/paper", {"prior_type": "mamba", "fem_dim": 128, "normalize": False}),
        ("AFT/paper", "rnn_softmax/paper", {"prior_type": "rnn_softmax", "fem_dim": 128}),
        ("FEM-GLA/paper", "gla+CLTG", {"prior_type": "gla", "fem_dim": 64}),
        ("attention+CL/lambda", "softmax+CL/lambda", {"keep_lambda": True, "use_temperature": False, "qk_dim": 128}),
    ],
)
def test_the_rows_of_the_paper_have_names(name, canonical_name, config):
    assert canonical(name) == canonical_name
    assert {field: getattr(mixer_config(name, 128, 16), field) for field in config} == config


@pytest.mark.parametrize("name", ["softmax/lambda", "softmax+LT/lambda", "softmax+L/lambda/s.5"])
def test_lambda_is_kept_only_where_l_stands_without_t(name):
    with pytest.raises(ValueError, match=r"^/lambda keeps lambda where L stands without T and without /s, got"):
        canonical(name)


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


def in_the_dark(rgb: np.ndarray) -> np.ndarray:
    """The colour that invert(.87) hue-rotate(180deg) of docs/site.css makes of a picture's in the dark."""
    half_turn = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
    return half_turn @ (0.87 - 0.74 * rgb)


@pytest.mark.parametrize("seen", [lambda rgb: rgb, in_the_dark], ids=["light", "dark"])
def test_every_colour_is_seen_on_the_site_s_light_and_dark_ground(seen):
    colours = {*GREYS.values(), OTHER_GREY, *FULL_COLOURS.values(), *PART_COLOURS.values(), *OWN_COLOURS.values()}
    ground = luminance(seen(np.ones(3)))
    for shade in colours:
        dark, bright = sorted((luminance(seen(np.array(to_rgb(shade)))), ground))
        assert (bright + 0.05) / (dark + 0.05) > 2.75, shade


def luminance(rgb: np.ndarray) -> float:
    """Of WCAG 2, in which 3 is asked of the parts of a picture."""
    rgb = np.clip(rgb, 0, 1)
    return float(np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])
