"""One case of every kind of end of `make chaos`: nothing silent, no traceback, nothing lost."""

import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from chaos import Chaos, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_what_is_killed_or_stopped_goes_on_to_the_same_weights(tmp_path):
    chaos = Chaos(tmp_path, seed=1)
    one_each = {case.kind: case for case in cases(seed=1)}
    found = [chaos.run(number, case) for number, case in enumerate(one_each.values())]
    assert [case for case in found if case["outcome"] != "same"] == []
