import jaxtyping
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def as_users_run():
    """Without the shape checks of the tests, which would speak before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
