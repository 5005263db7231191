"""The stream of departures against a loop over flights: what is known when a flight is asked about, and the answer."""

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Generator

from fem_research.regimes.flights import DAYS, TOKENS, LateFlights, streams

EACH = 90  # flights of an airport and day


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Two airports on one day of every split; one flight in nine is cancelled, some leave early, some by hours late."""
    generator = np.random.default_rng(0)
    place = pd.MultiIndex.from_product([["EWR", "JFK"], [3, 21, 28], range(EACH)], names=["origin", "day", "number"])
    table = place.to_frame(index=False).assign(month=5)
    table["hour"], table["minute"] = generator.integers(5, 24, len(table)), generator.integers(0, 60, len(table))
    table["dep_delay"] = generator.integers(-43, 300, len(table)).astype(float)
    table.loc[::9, "dep_delay"] = math.nan
    table["flight"] = table.number
    table["carrier"], table["dest"] = (generator.choice(list(names), len(table)) for names in ("AB", "XYZ"))
    path = tmp_path_factory.mktemp("flights") / "flights.csv"
    table.sample(frac=1, random_state=0).to_csv(path, index=False)
    return str(path), table


def by_loop(flights) -> list[tuple]:
    """(minute, is it a question, airline, destination, minute by schedule, delay or None, late), first things first."""
    events = []
    for flight in flights.itertuples():
        schedule = 60 * flight.hour + flight.minute
        cancelled = math.isnan(flight.dep_delay)
        late = cancelled or flight.dep_delay >= 15
        events.append((schedule - 60, True, flight.carrier, flight.dest, schedule, None, late))
        if not cancelled:
            delay = int(flight.dep_delay)
            events.append((schedule + delay, False, flight.carrier, flight.dest, schedule, delay, late))
    return sorted(events, key=lambda event: event[:2])


@pytest.mark.parametrize("split", DAYS)
def test_events_come_in_their_order_and_only_departures_tell_a_delay(log, split):
    path, table = log
    (day,) = (day for day in table.day.unique() if DAYS[split][0] <= day <= DAYS[split][1])
    for (x, answers), airport in zip(streams(path)[split], ("EWR", "JFK"), strict=True):
        wanted = by_loop(table[(table.origin == airport) & (table.day == day)])
        assert len(x) == len(answers) == len(wanted)
        found = []
        for row, answer in zip(x.tolist(), answers.tolist()):
            airline, destination = "AB"[row[:2].index(1)], "XYZ"[row[2:5].index(1)]
            question, now, schedule, delay, late = row[5:]
            said = (round(now * 1440), bool(question), airline, destination, round(schedule * 1440))
            if question:
                assert (delay, late) == (0, 0)
                found.append((*said, None, bool(answer)))
            else:
                assert math.isnan(answer)
                found.append((*said, round(10 * math.sinh(delay)), bool(late)))
        assert [event[:2] for event in found] == [event[:2] for event in wanted]
        assert Counter(found) == Counter(wanted)  # in one minute in any order, of which the next test speaks


def test_the_order_of_the_file_tells_nothing(log, tmp_path):
    """The real file has those first that left first; flights of one minute of the schedule would keep that order."""
    _, table = log
    table = table.assign(minute=table.minute // 20 * 20, carrier="A", dest="X")  # many questions in one minute
    found = []
    for name, rows in (("as_left", table.sort_values("dep_delay")), ("mixed", table.sample(frac=1, random_state=1))):
        rows = pd.concat([rows, log[1].assign(flight=-1, month=6)])  # every airline and destination occurs
        rows.to_csv(tmp_path / name, index=False)
        found.append(streams(str(tmp_path / name)))
    for split in DAYS:
        for (x, answers), (other, theirs) in zip(*(part[split] for part in found), strict=True):
            assert torch.equal(x, other)
            assert torch.equal(answers.nan_to_num(2), theirs.nan_to_num(2))


def test_examples_are_successive_events_of_their_split(log):
    task = LateFlights(log[0])
    x, targets = task.draw(Generator().manual_seed(0), 20, "test")
    assert (x.shape, targets.shape) == ((20, TOKENS, task.channels), (20, TOKENS, 1))
    whole = [(day.unfold(0, TOKENS, 1).transpose(1, 2), of.unfold(0, TOKENS, 1)) for day, of in streams(log[0])["test"]]
    for example, answers in zip(x, targets[..., 0]):
        assert any(
            (windows == example).all((1, 2)).logical_and((of.nan_to_num(2) == answers.nan_to_num(2)).all(1)).any()
            for windows, of in whole
        )
    assert torch.equal(targets[..., 0].isnan(), x[..., 5] == 0)


def test_certainty_scores_1_and_the_usual_share_0(log):
    task = LateFlights(log[0])
    _, targets = task.draw(Generator().manual_seed(0), 50, "test")
    share = targets.nanmean()
    assert task.score(1e3 * (targets.nan_to_num() - 0.5), targets) == pytest.approx(1)
    assert task.score(torch.full_like(targets, share.logit()), targets) == pytest.approx(
        task.constant(targets), abs=1e-6
    )
    assert task.loss(1e3 * (targets.nan_to_num() - 0.5), targets) == pytest.approx(0)
    assert task.loss(torch.zeros_like(targets), targets) == pytest.approx(math.log(2))


def test_another_table_and_a_short_log_are_refused(log, tmp_path):
    _, table = log
    for name, rows, words in (
        ("planes.csv", table.drop(columns=["dest", "hour"]), r"planes.csv' has no column dest, hour\.$"),
        ("short.csv", table[table.day < 20], rf"days of {TOKENS} events in every part of a month"),
    ):
        rows.to_csv(tmp_path / name, index=False)
        with pytest.raises(ValueError, match=words):
            streams(str(tmp_path / name))
    for name, content in (("flights.csv.zip", b"no archive"), ("flights.csv", b"\xff\xfe"), ("empty.csv", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^flights must be the table .*{name}' is no table: "):
            streams(str(tmp_path / name))
