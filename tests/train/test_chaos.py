"""A seeded part of `make chaos`: nothing silent, no traceback, nothing lost."""

import random

import pytest

pytest.importorskip("transformers", reason="needs free-energy-mixer[lm]")

from chaos import DAMAGES, FAULTS, ONE, SHARDS, TWO, Chaos, cases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_what_is_killed_stopped_or_damaged_goes_on_or_says_why(tmp_path):
    chaos = Chaos(tmp_path, seed=1)
    every = cases(chaos.files, chaos.seconds, seed=1)
    draw = random.Random(1)
    alone = [case for case in every if case.processes == ONE]
    chosen = draw.sample([case for case in alone if case.kind in DAMAGES], 8)
    chosen += draw.sample([case for case in alone if case.kind not in DAMAGES], 8)
    chosen += [case for case in every if case.processes == TWO and case.kind == "SIGTERM"][:1]
    chosen += [case for case in every if case.processes == SHARDS and case.kind == "SIGKILL"][:1]
    found = [chaos.run(case, number) for number, case in enumerate(chosen)]
    assert [case for case in found if case["outcome"] in FAULTS] == []
    assert sum(case["outcome"] == "same" for case in found) >= len(found) - 4
