import gc
import signal
from pathlib import Path

import jaxtyping
import pytest
import shape_checks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

with torch.device("meta"):
    torch.empty(0)  # torch keeps a list of what makes tensors: of its own functions, not of those that a test put there

POISONED = [Path(__file__).parent / "tests" / name for name in ("ops", "layer")]


def pytest_configure():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore


def pytest_collection_finish():
    gc.freeze()  # what was imported stays: searching it for garbage took a tenth of the tests' time


def pytest_unconfigure():
    gc.unfreeze()  # or nanobind says at the end that its objects were lost


@pytest.fixture(autouse=True)
def seeded():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape_checks.begin()


@pytest.fixture
def as_users_run():
    """Without the shape checks of the tests, which would speak before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def poisoned(request, monkeypatch):
    """Fresh buffers hold NaN, integers 113, in tests of reads and layers: what nobody wrote shows."""
    if not any(folder in request.path.parents for folder in POISONED):
        return

    def filled(make):
        def fresh(*sizes, **options):
            tensor = make(*sizes, **options)
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 113)
            return tensor

        return fresh

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A process group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
