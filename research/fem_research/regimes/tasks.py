"""The tasks: what a model is given, what it has to answer at every token, and how answers are scored."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
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

    Score: the share of right answers. The constant answer is the most frequent class of each token and question.
    """

    measure = "accuracy"
    classes: int
    questions: int

    @property
    def outputs(self) -> int:
        return self.questions * self.classes

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
    about = "running maximum and minimum of 16 sensors"
    asks_for = "extremes"

    @property
    def channels(self):
        return self.sensors

    @property
    def outputs(self):
        return 2 * self.sensors

    def draw(self, generator, size, split="train"):
        x = torch.randn(size, self.tokens, self.sensors, generator=generator)
        return x, torch.cat([x.cummax(1).values, x.cummin(1).values], -1)


@dataclass(frozen=True)
class EventStream(Classes):
    """Tokens (field, value); after each of them a question about every field seen so far."""

    fields: int = 8
    values: int = 16
    tokens: int = 32

    @property
    def channels(self):
        return self.fields + self.values

    @property
    def classes(self):
        return self.values

    @property
    def questions(self):
        return self.fields

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

    about = "largest value so far of each of 8 fields"
    asks_for = "extremes"

    def answers(self, events):
        return events.cummax(1).values


class Snapshot(EventStream):
    """The latest value of every field."""

    about = "latest value of each of 8 fields"
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

    @property
    def channels(self):
        return 2 * self.each + 1

    @property
    def outputs(self):
        return 2 * self.each

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
    """Sixteen tokens (key, value), then keys alone: answer with the value of each."""

    pairs: int = 16
    keys: int = 32
    values: int = 16
    queries: int = 32
    about = "the value that a key was shown with, 16 pairs"
    asks_for = "one token"
    questions = 1

    @property
    def channels(self):
        return self.keys + self.values

    @property
    def classes(self):
        return self.values

    def draw(self, generator, size, split="train"):
        key = torch.rand(size, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        value = torch.randint(self.values, (size, self.pairs), generator=generator)
        asked = torch.randint(self.pairs, (size, self.queries), generator=generator)
        keys = torch.cat([key, key.gather(1, asked)], 1)
        values = torch.cat([F.one_hot(value, self.values), torch.zeros(size, self.queries, self.values)], 1)
        targets = torch.cat([torch.full((size, self.pairs), NOT_ASKED), value.gather(1, asked)], 1)
        return torch.cat([F.one_hot(keys, self.keys).float(), values], -1), targets[..., None]
