"""The tasks: what a model is given, what it has to answer at every token, and how answers are scored."""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

NOT_ASKED = -100
Example = tuple[Float[Tensor, "b t c"], Tensor]


class Task(ABC):
    """Inputs (B, T, channels) -> answers (B, T, outputs), new ones at every call of `draw`.

    loss(answers, targets) is minimised in training. score(answers, targets) is 1 where all answers are right, and
    `constant(targets)` for the best answer that does not depend on the inputs.
    """

    about: ClassVar[str]
    measure: ClassVar[str]
    asks_for: ClassVar[str] = "one average"  # what the task asks for: "extremes", "one average", "one token"
    channels: int
    outputs: int

    @abstractmethod
    def draw(self, generator: Generator, size: int, split: str = "train") -> Example: ...

    @abstractmethod
    def loss(self, answers: Tensor, targets: Tensor) -> Tensor: ...

    @abstractmethod
    def score(self, answers: Tensor, targets: Tensor) -> float: ...

    @abstractmethod
    def constant(self, targets: Tensor) -> float: ...


class Numbers(Task):
    """Answers are numbers; NaN where none is asked for. Score: the share of their variance that is explained,

    1 - sum (answer - target)^2 / sum (target - mean at that token and output)^2
    """

    measure = "explained variance"

    def loss(self, answers, targets):
        asked = ~targets.isnan()
        return F.mse_loss(answers[asked], targets[asked])

    def score(self, answers, targets):
        spread = (targets - targets.mean(0)).square()
        asked = ~targets.isnan()
        return 1 - ((answers - targets).square()[asked].sum() / spread[asked].sum()).item()

    def constant(self, targets):
        return 0.0


class Classes(Task):
    """Answers are one of `classes` for each of several questions; NOT_ASKED where a question does not arise.

    Score: accuracy. The constant answer is the most frequent class of each token and question.
    """

    measure = "accuracy"
    classes: int
    questions: int
    outputs = property(lambda self: self.questions * self.classes)

    def loss(self, answers, targets):
        logits = answers.unflatten(-1, (-1, self.classes))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=NOT_ASKED)

    def score(self, answers, targets):
        said = answers.unflatten(-1, (-1, self.classes)).argmax(-1)
        asked = targets != NOT_ASKED
        return (said == targets)[asked].float().mean().item()

    def constant(self, targets):
        counts = F.one_hot(targets.clamp_min(0), self.classes) * (targets != NOT_ASKED)[..., None]
        counts = counts.sum(0)
        return (counts.amax(-1).sum() / counts.sum()).item()


@dataclass(frozen=True)
class PeakHold(Numbers):
    """Running maximum and minimum of every sensor: x ~ N(0, 1), y_t = [max_{i<=t} x_i, min_{i<=t} x_i]."""

    sensors: int = 16
    tokens: int = 32
    about = property(lambda self: f"running maximum and minimum of {self.sensors} sensors")
    asks_for = "extremes"
    channels = property(lambda self: self.sensors)
    outputs = property(lambda self: 2 * self.sensors)

    def draw(self, generator, size, split="train"):
        x = torch.randn(size, self.tokens, self.sensors, generator=generator)
        return x, torch.cat([x.cummax(1).values, x.cummin(1).values], -1)


@dataclass(frozen=True)
class EventStream(Classes):
    """Tokens (field, value); after each of them a question about every field seen so far."""

    fields: int = 8
    values: int = 16
    tokens: int = 32
    channels = property(lambda self: self.fields + self.values)
    classes = property(lambda self: self.values)
    questions = property(lambda self: self.fields)

    def draw(self, generator, size, split="train"):
        field = torch.randint(self.fields, (size, self.tokens), generator=generator)
        value = torch.randint(self.values, (size, self.tokens), generator=generator)
        events = torch.full((size, self.tokens, self.fields), -1).scatter_(2, field[..., None], value[..., None])
        x = torch.cat([F.one_hot(field, self.fields), F.one_hot(value, self.values)], -1).float()
        answers = self.answers(events)
        return x, answers.where(answers >= 0, NOT_ASKED)

    @abstractmethod
    def answers(self, events: Int[Tensor, "b t f"]) -> Int[Tensor, "b t f"]:
        """The answers, -1 before the first event of a field. events: values by token and field, -1 for other fields."""


class HighWater(EventStream):
    """The largest value of every field so far."""

    about = property(lambda self: f"largest value so far of each of {self.fields} fields")
    asks_for = "extremes"

    def answers(self, events):
        return events.cummax(1).values


class Snapshot(EventStream):
    """The latest value of every field."""

    about = property(lambda self: f"latest value of each of {self.fields} fields")
    asks_for = "one token per channel"

    def answers(self, events):
        at = torch.arange(self.tokens)[None, :, None].where(events >= 0, -1).cummax(1).values
        return events.gather(1, at.clamp_min(0)).where(at >= 0, -1)


@dataclass(frozen=True)
class SetStatistics(Numbers):
    """Means of 8 normal channels and counts of 8 kinds of events so far, asked in the second half; token 0 is flagged.

    Scaled to about unit variance: sqrt(T) mean, and count / sqrt(p (1 - p) T) with p = .2.
    """

    each: int = 8
    tokens: int = 32
    rate: float = 0.2
    about = "means of 8 channels, counts of 8 kinds of events"
    channels = property(lambda self: 2 * self.each + 1)
    outputs = property(lambda self: 2 * self.each)

    def draw(self, generator, size, split="train"):
        x = torch.randn(size, self.tokens, self.each, generator=generator)
        events = (torch.rand(size, self.tokens, self.each, generator=generator) < self.rate).float()
        first = (torch.arange(self.tokens) == 0).float()[None, :, None].expand(size, -1, 1)
        seen = torch.arange(1, self.tokens + 1)[:, None]
        mean = x.cumsum(1) / seen * math.sqrt(self.tokens)
        count = events.cumsum(1) / math.sqrt(self.rate * (1 - self.rate) * self.tokens)
        asked = (seen > self.tokens // 2)[None]
        return torch.cat([x, events, first], -1), torch.cat([mean, count], -1).where(asked, math.nan)


@dataclass(frozen=True)
class Recall(Classes):
    """Sixteen tokens (key, value), then only keys: answer with the value of each."""

    pairs: int = 16
    keys: int = 32
    values: int = 16
    queries: int = 32
    about = "the value that a key was shown with, 16 pairs"
    asks_for = "one token"
    questions = 1
    channels = property(lambda self: self.keys + self.values)
    classes = property(lambda self: self.values)

    def draw(self, generator, size, split="train"):
        key = torch.rand(size, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        value = torch.randint(self.values, (size, self.pairs), generator=generator)
        asked = torch.randint(self.pairs, (size, self.queries), generator=generator)
        keys = torch.cat([key, key.gather(1, asked)], 1)
        values = torch.cat([F.one_hot(value, self.values), torch.zeros(size, self.queries, self.values)], 1)
        targets = torch.cat([torch.full((size, self.pairs), NOT_ASKED), value.gather(1, asked)], 1)
        return torch.cat([F.one_hot(keys, self.keys).float(), values], -1), targets[..., None]


HELD_OUT = {"train": slice(0, 1200), "validation": slice(1200, 1400), "test": slice(1400, None)}
WINDOW = 96  # rows of ETTm1 in a day
WORDS = 32


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Float[Tensor, "n 64"], Int[Tensor, " n"]]:
    """1,797 pictures of 8 x 8 in [0, 1] and their digits, in the file's order, where a writer's come together."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pictures / 16).float(), torch.from_numpy(labels).long()


@dataclass(frozen=True)
class DigitBags(Classes):
    """Bags of 7 pictures, and an empty last token that is asked 12 questions: is digit 0, ... 9 in the bag, which is
    the largest, how many different ones are there. No picture and no writer, but for one at a boundary, of
    the test is seen in training.
    """

    pictures: int = 7
    about = "bags of 7 real digits: which are in it, the largest, how many different"
    asks_for = "extremes"
    channels, classes, questions = 65, 10, 12

    def draw(self, generator, size, split="train"):
        pictures, labels = (tensor[HELD_OUT[split]] for tensor in digits())
        chosen = torch.randint(len(labels), (size, self.pictures), generator=generator)
        x = torch.zeros(size, self.pictures + 1, self.channels)
        x[:, :-1, :-1], x[:, -1, -1] = pictures[chosen], 1
        present = torch.zeros(size, 10, dtype=torch.long).scatter_(1, labels[chosen], 1)
        answers = torch.cat([present, labels[chosen].amax(1, keepdim=True), present.sum(1, keepdim=True) - 1], 1)
        targets = torch.full((size, self.pictures + 1, self.questions), NOT_ASKED)
        targets[:, -1] = answers
        return x, targets


@functools.lru_cache(maxsize=1)
def rows(path: str) -> dict[str, Float[Tensor, "t c"]]:
    """An ETT file's first 60 % of rows, the next and the last 20 %, standardised by the first part's mean and
    deviation.
    """
    import pandas as pd

    table = pd.read_csv(path)
    if "date" not in table or table.shape[1] != DayOfETT.channels + 1:
        raise ValueError(f"ett must be a table of ETT, a column date and 7 channels, got {path!r} of other columns.")
    table = torch.from_numpy(table.drop(columns="date").to_numpy("float32"))
    ends = [0, *(round(share * len(table)) for share in (0.6, 0.8, 1.0))]
    parts = {split: table[start:end] for split, start, end in zip(HELD_OUT, ends, ends[1:])}
    return {split: (part - parts["train"].mean(0)) / parts["train"].std(0) for split, part in parts.items()}


class DayOfETT:
    """Two days of ETT's channels; every row of the second is asked about the 96 rows up to it."""

    channels = 7

    def __init__(self, path: str):
        self.path = path

    def cut(self, generator, size, split) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b day c w"]]:
        table = rows(self.path)[split]
        start = torch.randint(len(table) - 2 * WINDOW, (size, 1), generator=generator)
        x = table[start + torch.arange(2 * WINDOW)]
        return x, x.unfold(1, WINDOW, 1)[:, 1:]

    @staticmethod
    def ask(answers: Tensor, nothing: int | float) -> Tensor:
        """The answers, after a first day in which nothing is asked."""
        return torch.cat([torch.full_like(answers, nothing), answers], 1)


class DailyExtremes(DayOfETT, Numbers):
    """Maximum and minimum of every channel over the last 96 rows."""

    about = "extremes of the last day in ETT, 7 channels"
    asks_for = "extremes"
    outputs = 14

    def draw(self, generator, size, split="train"):
        x, days = self.cut(generator, size, split)
        return x, self.ask(torch.cat([days.amax(-1), days.amin(-1)], -1), float("nan"))


class Exceeded(DayOfETT, Classes):
    """Did a channel exceed its training quantile of .9 within the last 96 rows? One question per channel."""

    about = "did a channel of ETT exceed its quantile of .9 in the last day"
    asks_for = "extremes"
    classes, questions = 2, 7

    def draw(self, generator, size, split="train"):
        x, days = self.cut(generator, size, split)
        limit = rows(self.path)["train"].quantile(0.9, 0)
        return x, self.ask((days.amax(-1) > limit).long(), NOT_ASKED)


@functools.lru_cache(maxsize=1)
def speeches(path: str) -> tuple[int, dict[str, list[Int[Tensor, " n"]]]]:
    """The size of the vocabulary, and, by split, the words of the ten speakers with most words, as indices into it: the
    first 60 % of what each says, the next 20 % and the last 20 %. The vocabulary has the 1,000 most frequent words of
    the first part, and one entry for all others.

    Speeches are paragraphs after a line "NAME:". Raises ValueError on a text of fewer than ten such speakers.
    """
    said: dict[str, list[str]] = {}
    text = Path(path).read_text(encoding="utf-8")
    for name, speech in re.findall(r"^([^\n:]+):\n(.+?)(?:\n\n|\Z)", text, re.M | re.S):
        said.setdefault(name, []).extend(re.findall(r"[a-z']+", speech.lower()))
    speakers = sorted(said, key=lambda name: -len(said[name]))[:10]
    if len(speakers) < 10 or len(said[speakers[-1]]) < 10 * WORDS:
        told = f"play must have ten speakers of {10 * WORDS} words or more, named 'NAME:'"
        raise ValueError(f"{told}, got {path!r} without them.")
    ends = {name: [0, *(round(share * len(said[name])) for share in (0.6, 0.8, 1.0))] for name in speakers}
    frequent = Counter(word for name in speakers for word in said[name][: ends[name][1]]).most_common(1000)
    number = {word: index for index, (word, _) in enumerate(frequent)}
    told = {name: torch.tensor([number.get(word, len(number)) for word in said[name]]) for name in speakers}
    return len(number) + 1, {
        split: [told[name][ends[name][part] : ends[name][part + 1]] for name in speakers]
        for part, split in enumerate(HELD_OUT)
    }


class Speakers(Classes):
    """32 successive words of one of ten speakers, and an empty last token, which is asked who says them."""

    about = "which of ten speakers says these 32 words"
    asks_for = "the words that give a speaker away"
    classes, questions = 10, 1

    def __init__(self, path: str):
        self.path = path

    channels = property(lambda self: speeches(self.path)[0] + 1)

    def draw(self, generator, size, split="train"):
        said = speeches(self.path)[1][split]
        speaker = torch.randint(len(said), (size,), generator=generator)
        longest = torch.tensor([len(said[index]) - WORDS + 1 for index in speaker])
        start = (torch.rand(size, generator=generator) * longest).long()
        words = torch.stack([said[who][first : first + WORDS] for who, first in zip(speaker, start)])
        x = torch.zeros(size, WORDS + 1, self.channels)
        x[:, :-1].scatter_(2, words[..., None], 1.0)
        x[:, -1, -1] = 1
        targets = torch.full((size, WORDS + 1, 1), NOT_ASKED)
        targets[:, -1, 0] = speaker
        return x, targets
