from importlib.util import find_spec

import pytest
import torch
from trainings import tiny, write_corpus

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]  # which come with the extra 'lm'


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data") / "made_up.jsonl")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that was never stopped."""
    from fem.train import train

    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("whole") / "run"
    train.run(tiny(data), output)
    return output
