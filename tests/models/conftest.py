from importlib.util import find_spec

import pytest

from fem import PRIORS

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]  # which come with the extra 'lm'


@pytest.fixture(params=[*PRIORS, "plain_attention", "hybrid"])
def model(request):
    from small_models import MODELS, small_model

    return small_model(**(MODELS | {"untied": {"tie_word_embeddings": False}})[request.param])


@pytest.fixture
def softmax_model():
    from small_models import small_model

    return small_model()
