"""The kernels of one token on a GPU, in Triton's interpreter: the read over a cache, scans, gates and rotation."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import printed

SUPPORT = Path(__file__).parents[1] / "support"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
# float32's rounding; that of a score of 1,000 moves its weight; 16 bits keep 8 or 11 binary digits
LOOSE = {
    "scores of 1,000": 3e-5,
    "spans about a quarter of a nat": 2e-6,
    "bfloat16": 1e-2,
    "float16": 1e-3,
    "rotation in bfloat16": 1e-2,
    "weights of 60 nats": 5e-6,
}


def too_far(script: str, *arguments: str) -> dict[str, float]:
    errors = json.loads(printed(str(SUPPORT / script), *arguments))
    assert len(errors) > 8
    return {name: error for name, error in errors.items() if not error < LOOSE.get(name.rpartition(": ")[2], 1e-6)}


@needs_triton
def test_one_token_is_computed_as_defined():
    assert not too_far("token_in_triton.py")


@needs_triton
@pytest.mark.parametrize("cases", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_one_token_of_a_scan_is_computed_as_defined(cases):
    assert not too_far("scan_token_in_triton.py", cases)
