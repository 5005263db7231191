"""Our kernels around those of linear attention, in Triton's interpreter."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_cases

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
CASES = Path(__file__).with_name("scan_cases.py")


@needs_triton
def test_linear_attention_is_read_as_the_definition_says():
    run_cases(CASES, "features or (linear and ((definition and 17) or cannot_prove or bfloat16_values))")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_case_in_the_interpreter():
    run_cases(CASES, "test")
