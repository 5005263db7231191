"""Every kind of end of `make chaos`, and some damages: nothing silent, no traceback, nothing lost."""

import random

import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from chaos import DAMAGES, FAULTS, ONE, Chaos, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_what_is_killed_stopped_or_damaged_goes_on_or_says_why(tmp_path):
    chaos = Chaos(tmp_path, seed=1)
    every = cases(chaos.files, chaos.seconds, seed=1)
    first = {(case.kind, case.processes): case for case in reversed(every) if case.kind not in DAMAGES}
    damages = [case for case in every if case.kind in DAMAGES and case.processes == ONE]
    chosen = [*first.values(), *random.Random(1).sample(damages, 4)]
    found = [chaos.run(case, number) for number, case in enumerate(chosen)]
    assert [case for case in found if case["outcome"] in FAULTS] == []
    assert sum(case["outcome"] == "same" for case in found) >= len(found) - 4
