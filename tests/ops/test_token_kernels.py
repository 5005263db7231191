"""The kernels of one token on a GPU, in Triton's interpreter: the read over a cache, gates and rotation."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import printed

SCRIPT = Path(__file__).parents[1] / "support" / "token_in_triton.py"
# float32's rounding; that of a score of 1,000 moves its weight; 16 bits keep 8 or 11 binary digits
LOOSE = {"scores of 1,000": 3e-5, "bfloat16": 1e-2, "float16": 1e-3, "rotation in bfloat16": 1e-2}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_one_token_is_computed_as_defined():
    errors = json.loads(printed(str(SCRIPT)))
    assert {"plain", "both gates", "one position"} <= errors.keys()
    far = {name: error for name, error in errors.items() if not error < LOOSE.get(name, 1e-6)}
    assert not far
