"""Rows behind a short convolution, the control of the conditioner."""

import pytest
import torch
from layers import stirred

from fem import FreeEnergyMixer
from fem.models import FEMForImageClassification, FEMImageConfig
from fem.train.model import build_model
from fem_research.common.blocks import ShortConvolution, build_mixer, convolve
from fem_research.lm.settings import row_fields
from fem_research.lm.small import LanguageRecipe, model_config


def randomised(model):
    return stirred(model, 0.1).double().eval()


@pytest.mark.parametrize(("causal", "offsets"), [(True, (-3, -2, -1, 0)), (False, (-1, 0, 1))])
def test_it_adds_a_weighted_sum_of_near_tokens_in_every_channel(causal, offsets):
    layer, x = randomised(ShortConvolution(3, causal)), torch.randn(2, 7, 3, dtype=torch.float64)
    wanted = x.clone()
    for t in range(7):
        for at, offset in enumerate(offsets):
            if 0 <= t + offset < 7:
                wanted[:, t] += layer.weight[:, 0, at] * x[:, t + offset]
    torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-12)


def language(row):
    recipe = LanguageRecipe(layers=2, width=16, heads=2, mlp_width=44, vocabulary=40, context=9)
    return convolve(build_model(model_config(recipe, row_fields(row, "softmax"), 40), seed=0), row)


def image(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = FEMImageConfig(image_size=6, patch_size=2, num_channels=1, **sizes)
    return convolve(FEMForImageClassification(config), name)


@pytest.mark.parametrize(
    ("build", "x"), [(language, torch.arange(18).reshape(2, 9)), (image, torch.linspace(-1, 1, 72).reshape(2, 1, 6, 6))]
)
def test_a_model_starts_as_without_it_and_has_one_in_every_block(build, x):
    plain, convolved = build("full").eval(), build("full/conv").eval()
    assert sum(isinstance(layer, ShortConvolution) for layer in convolved.modules()) == 2
    assert not any(isinstance(layer, ShortConvolution) for layer in plain.modules())
    torch.testing.assert_close(convolved(x).logits, plain(x).logits)


def test_a_language_model_with_it_sees_no_later_token():
    model, ids = randomised(language("+G/conv")), torch.arange(18).reshape(2, 9)
    changed = ids.clone()
    changed[:, 5] += 1
    same = (model(ids).logits == model(changed).logits).all(-1)
    assert same[:, :5].all()
    assert not same[:, 5:].any()


def test_in_the_other_experiments_it_stands_before_the_mixer():
    assert [type(layer) for layer in build_mixer("softmax+G/conv", 8, 2)] == [ShortConvolution, FreeEnergyMixer]
    assert isinstance(build_mixer("softmax+G", 8, 2), FreeEnergyMixer)
