"""transformers' own model tests, where `make suite` has brought them."""

import pytest

pytest.importorskip("transformers", reason="the language model needs the extra 'lm'")
from transformers_suite import is_here, run


@pytest.mark.slow
def test_transformers_own_tests_find_no_fault_in_a_softmax_model():
    if not is_here():
        pytest.skip("needs transformers' source distribution, which `make suite` downloads")
    found = run("softmax without C", None)
    assert not found["failures"]
    assert found["passed"] > 50
