"""Tasks on real data: bags of the digits that scikit-learn ships, the channels of ETT, the speakers of a play."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fem_research.regimes.tasks import NOT_ASKED, Classes, Numbers

HELD_OUT = {"train": slice(0, 1200), "validation": slice(1200, 1400), "test": slice(1400, None)}
WINDOW = 96  # rows of ETTm1 in a day
WORDS = 32


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Float[Tensor, "n 64"], Int[Tensor, " n"]]:
    """1,797 pictures of 8 x 8 in [0, 1] and their digits, in an order that mixes the writers."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return torch.from_numpy(pictures[order] / 16).float(), torch.from_numpy(labels[order]).long()


@dataclass(frozen=True)
class DigitBags(Classes):
    """Bags of 7 pictures, and an empty last token that is asked 12 questions: is digit 0, ... 9 in the bag, which is
    the largest, how many different ones are there. No picture of the test is seen in training.
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
    """The first 60 % of an ETT file's rows, the next 20 % and the last 20 %, standardised by the first part's mean and
    standard deviation."""
    import pandas as pd

    table = torch.from_numpy(pd.read_csv(path).drop(columns="date").to_numpy("float32"))
    ends = [0, *(round(share * len(table)) for share in (0.6, 0.8, 1.0))]
    parts = {split: table[start:end] for split, start, end in zip(HELD_OUT, ends, ends[1:])}
    return {split: (part - parts["train"].mean(0)) / parts["train"].std(0) for split, part in parts.items()}


class DayOfETT:
    """Two days of the 7 channels from anywhere in a split; every row of the second day is asked about the 96 rows up to
    it."""

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
    for name, speech in re.findall(
        r"^([^\n:]+):\n(.+?)(?:\n\n|\Z)", Path(path).read_text(encoding="utf-8"), re.M | re.S
    ):
        said.setdefault(name, []).extend(re.findall(r"[a-z']+", speech.lower()))
    speakers = sorted(said, key=lambda name: -len(said[name]))[:10]
    if len(speakers) < 10 or len(said[speakers[-1]]) < 10 * WORDS:
        raise ValueError(f"play must have ten speakers of {10 * WORDS} words or more, named 'NAME:'; {path!r} has not.")
    ends = {name: [0, *(round(share * len(said[name])) for share in (0.6, 0.8, 1.0))] for name in speakers}
    frequent = Counter(word for name in speakers for word in said[name][: ends[name][1]]).most_common(1000)
    number = {word: index for index, (word, _) in enumerate(frequent)}
    told = {name: torch.tensor([number.get(word, len(number)) for word in said[name]]) for name in speakers}
    return len(number) + 1, {
        split: [told[name][ends[name][part] : ends[name][part + 1]] for name in speakers]
        for part, split in enumerate(HELD_OUT)
    }


class Speakers(Classes):
    """32 successive words of one of ten speakers, and an empty last token, which is asked who says them.

    A speaker's words in the test come later in the play than those in training.
    """

    about = "which of ten speakers says these 32 words"
    asks_for = "the words that give a speaker away"
    classes, questions = 10, 1

    def __init__(self, path: str):
        self.path = path

    @property
    def channels(self):
        return speeches(self.path)[0] + 1

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


def tasks_of_files(ett: Path | None, play: Path | None) -> dict:
    """The tasks whose data files are given."""
    found = {} if ett is None else {"ett-extremes": DailyExtremes(str(ett)), "ett-events": Exceeded(str(ett))}
    return found | ({} if play is None else {"speakers": Speakers(str(play))})
