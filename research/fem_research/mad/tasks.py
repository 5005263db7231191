"""The six tasks of MAD (Poli et al., 2024), with generators written here.

A sequence of tokens 0..V-1 comes with a target at every position, -100 where nothing is scored. The recall tasks score
every next token in training, and in testing only those that the sequence before them determines.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Int64

from fem.checks import nearest

IGNORED = -100
SPLITS = ("train", "test")
SHARED = len(SPLITS)  # the random stream of what train and test have in common

Example = tuple[Int64[np.ndarray, " l"], Int64[np.ndarray, " l"]]


def generate(
    task: str, n: int, seed: int, split: str, **settings
) -> tuple[Int64[np.ndarray, "n l"], Int64[np.ndarray, "n l"]]:
    """The first n examples of a split: inputs and targets, -100 where nothing is scored.

    settings: the task's fields, MAD's baseline where left out. Each example has a random stream of its own,
    SeedSequence(( seed, split, index)): a larger n begins with the same examples. A digest of its tokens decides to
    which split a sequence belongs, so that no test sequence is a training sequence, with any seeds.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    if n < 1 or seed < 0:
        raise ValueError(f"n must be positive and seed not negative, got n = {n} and seed = {seed}.")
    rules = build(task, settings)
    examples = [_draw_in_split(rules, seed, split, index) for index in range(n)]
    inputs, targets = (np.stack(rows).astype(np.int64) for rows in zip(*examples))
    return inputs, targets


def build(task: str, settings: Mapping[str, int | float]) -> Task:
    """The task's rules with these settings. Raises ValueError on an unknown task and as `generate` does on settings."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}{nearest(task, TASKS)}")
    known = [field.name for field in fields(TASKS[task])]
    for name in settings:
        if name not in known:
            raise ValueError(f"{task} has no setting {name!r}, only {', '.join(known)}{nearest(name, known)}")
    return replace(TASKS[task], **settings)


def _draw_in_split(rules: Task, seed: int, split: str, index: int) -> Example:
    rng = np.random.default_rng((seed, SPLITS.index(split), index))
    for _ in range(100):
        inputs, targets = rules.draw(rng, split, seed)
        if _split_of(inputs) == split:
            return inputs, targets
    raise ValueError(f"{rules} allows too few sequences to keep test apart from train; choose a longer seq_len.")


def _split_of(inputs: Int64[np.ndarray, " l"]) -> str:
    digest = hashlib.blake2b(inputs.astype("<i8").tobytes(), digest_size=1).digest()
    return SPLITS[digest[0] % len(SPLITS)]


class Task(ABC):
    """The rules of a task: its settings, and how one example is drawn."""

    vocab_size: int
    seq_len: int

    @abstractmethod
    def draw(self, rng: np.random.Generator, split: str, seed: int) -> Example:
        """One example. seed: decides what all examples of both splits share, such as a map from keys to values."""

    def require(self, holds: bool, sentence: str) -> None:
        if not holds:
            raise ValueError(f"{sentence}, got {self}.")


@dataclass(frozen=True, kw_only=True)
class InContextRecall(Task):
    """k1 v1 k2 v2 ...: a key keeps its value within a sequence; predict the value of a key shown before.

    The first half of the V - noise_vocab_size tokens are keys, the second half values. A slot holds a pair or, with
    probability frac_noise, two noise tokens; at least one slot holds a pair. The last pair's key was shown before.
    Length seq_len - 1: the last value is only a target.
    """

    vocab_size: int = 16
    seq_len: int = 128
    noise_vocab_size: int = 0
    frac_noise: int | float = 0.0

    def __post_init__(self):
        _check_noise(self)
        self.require(self.seq_len >= 4 and self.seq_len % 2 == 0, "seq_len must be even and at least 4")
        self.require(
            self.vocab_size - self.noise_vocab_size >= 2, "vocab_size must leave a key and a value beside noise"
        )

    def draw(self, rng, split, seed):
        tokens = self.vocab_size - self.noise_vocab_size
        keys, slots = tokens // 2, self.seq_len // 2 - 1
        noise = rng.random(slots) < self.frac_noise
        if noise.all():
            noise[rng.integers(slots)] = False
        shown = rng.integers(keys, size=slots)
        probe = rng.choice(np.unique(shown[~noise]))
        key = np.append(shown, probe)
        value = rng.integers(keys, tokens, size=keys)[key]
        pairs = np.stack([key, value], -1)
        first = ~np.append(noise, False)
        first[first] = _first_occurrence(key[first])
        scored = np.zeros_like(pairs, dtype=bool)
        scored[:, 1] = ~first & ~np.append(noise, False)
        if noise.any():
            pairs[:-1][noise] = rng.integers(tokens, self.vocab_size, size=(noise.sum(), 2))
        return _next_token(pairs.reshape(-1), scored.reshape(-1), split)


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Task):
    """Recall in which keys and values are motifs of several distinct tokens, and sequences are padded on the left.

    Sizes are uniform in 1..k_motif_size and 1..v_motif_size; in testing every key has k_motif_size tokens. One pair,
    the probe, is repeated at the end; its first place is uniform among those that leave room for it: it is always shown
    before. Token V - 1 pads. Length seq_len.
    """

    vocab_size: int = 16
    seq_len: int = 128
    k_motif_size: int = 3
    v_motif_size: int = 3
    noise_vocab_size: int = 0
    frac_noise: int | float = 0.0

    def __post_init__(self):
        _check_noise(self)
        keys = (self.vocab_size - 1 - self.noise_vocab_size) // 2
        self.require(min(self.k_motif_size, self.v_motif_size) >= 1, "k_motif_size and v_motif_size must be positive")
        self.require(
            keys >= max(self.k_motif_size, self.v_motif_size),
            "vocab_size must leave as many keys and values as a motif has tokens",
        )
        self.require(self.seq_len + 1 >= 2 * self._longest, "seq_len must hold the longest pair twice")

    @property
    def _longest(self) -> int:
        return self.k_motif_size + self.v_motif_size

    def draw(self, rng, split, seed):
        tokens = self.vocab_size - 1 - self.noise_vocab_size
        slots = self.seq_len // 2 + 2
        shortest_key = 1 if split == "train" else self.k_motif_size
        keys = _motifs(rng, slots, range(tokens // 2), shortest_key, self.k_motif_size)
        values = _motifs(rng, slots, range(tokens // 2, tokens), 1, self.v_motif_size)
        noise = rng.random(slots) < self.frac_noise
        probe, answer = keys.pop(), values.pop()
        room = self.seq_len - len(probe + answer) - self._longest
        earliest = rng.integers(max(1, room - self._longest + 1))
        meaning, shown = {probe: answer}, set()
        sequence: list[int] = []
        scored: list[bool] = []
        for key, value, is_noise in zip(keys, values, noise):
            if probe not in shown and len(sequence) >= earliest:
                key, is_noise = probe, False
            elif len(sequence) >= room:
                break
            if is_noise:
                size = len(key + value)
                sequence += rng.integers(tokens, tokens + self.noise_vocab_size, size=size).tolist()
                scored += [False] * size
                continue
            value = meaning.setdefault(key, value)
            sequence += key + value
            scored += [False] * len(key) + [key in shown] * len(value)
            shown.add(key)
        sequence += probe + answer
        scored += [False] * len(probe) + [True] * len(answer)
        pads = self.seq_len + 1 - len(sequence)
        return _next_token(np.array([self.vocab_size - 1] * pads + sequence), np.array([False] * pads + scored), split)


@dataclass(frozen=True, kw_only=True)
class Memorization(Task):
    """k ? k ? ...: predict a key's value at each ? (token V - 1), by a map that the seed decides."""

    vocab_size: int = 256
    seq_len: int = 32

    def __post_init__(self):
        self.require(self.vocab_size >= 3, "vocab_size must be at least 3: a key, a value and the insert token")
        self.require(self.seq_len >= 2 and self.seq_len % 2 == 0, "seq_len must be even and positive")

    def draw(self, rng, split, seed):
        keys = rng.integers((self.vocab_size - 1) // 2, size=self.seq_len // 2)
        inputs = np.full(self.seq_len, self.vocab_size - 1)
        targets = np.full(self.seq_len, IGNORED)
        inputs[::2] = keys
        targets[1::2] = _value_map(self.vocab_size - 1, seed)[keys]
        return inputs, targets


@dataclass(frozen=True, kw_only=True)
class Compression(Task):
    """seq_len - 1 uniform tokens and a last one, V - 1: predict all of them from the output at the last one only."""

    vocab_size: int = 16
    seq_len: int = 32

    def __post_init__(self):
        self.require(self.vocab_size >= 2, "vocab_size must be at least 2")
        self.require(self.seq_len >= 2, "seq_len must be at least 2")

    def draw(self, rng, split, seed):
        inputs = np.append(rng.integers(self.vocab_size - 1, size=self.seq_len - 1), self.vocab_size - 1)
        return inputs, inputs.copy()


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Data tokens among blanks, the copy token, blanks: predict the data tokens in order at the last blanks.

    Token V - 1 asks for the copy, V - 2 is the blank. Every one of the seq_len - 2 num_tokens_to_copy - 1 blanks
    before the copy token stands in front of a data token, uniformly chosen.
    """

    vocab_size: int = 16
    seq_len: int = 256
    num_tokens_to_copy: int = 16

    def __post_init__(self):
        self.require(self.vocab_size >= 3, "vocab_size must be at least 3: a data token, the blank and the copy token")
        self.require(self.num_tokens_to_copy >= 1, "num_tokens_to_copy must be positive")
        self.require(self.seq_len > 2 * self.num_tokens_to_copy, "seq_len must exceed twice num_tokens_to_copy")

    def draw(self, rng, split, seed):
        count = self.num_tokens_to_copy
        blanks = self.seq_len - 2 * count - 1
        data = rng.integers(self.vocab_size - 2, size=count)
        before = np.bincount(rng.integers(count, size=blanks), minlength=count)
        inputs = np.full(self.seq_len, self.vocab_size - 2)
        inputs[before.cumsum() + np.arange(count)] = data
        inputs[-count - 1] = self.vocab_size - 1
        targets = np.full(self.seq_len, IGNORED)
        targets[-count:] = data
        return inputs, targets


def _check_noise(task: InContextRecall | FuzzyRecall) -> None:
    task.require(task.noise_vocab_size >= 0, "noise_vocab_size must not be negative")
    task.require(0 <= task.frac_noise < 1, "frac_noise must lie in [0, 1)")
    task.require(task.frac_noise == 0 or task.noise_vocab_size > 0, "frac_noise > 0 needs noise_vocab_size > 0")


def _first_occurrence(keys: Int64[np.ndarray, " n"]) -> np.ndarray:
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def _motifs(
    rng: np.random.Generator, count: int, alphabet: range, shortest: int, longest: int
) -> list[tuple[int, ...]]:
    order = rng.random((count, len(alphabet))).argsort(1) + alphabet.start
    sizes = rng.integers(shortest, longest + 1, size=count)
    return [tuple(row[:size]) for row, size in zip(order.tolist(), sizes.tolist())]


@functools.lru_cache(maxsize=8)
def _value_map(tokens: int, seed: int) -> Int64[np.ndarray, " keys"]:
    rng = np.random.default_rng((seed, SHARED))
    return rng.permutation(np.arange(tokens // 2, tokens))[: tokens // 2]


def _next_token(sequence: np.ndarray, scored: np.ndarray, split: str) -> Example:
    if split == "test":
        return sequence[:-1], np.where(scored, sequence, IGNORED)[1:]
    return sequence[:-1], sequence[1:]


TASKS: dict[str, Task] = {
    "compression": Compression(),
    "fuzzy-in-context-recall": FuzzyRecall(),
    "in-context-recall": InContextRecall(),
    "memorization": Memorization(),
    "noisy-in-context-recall": InContextRecall(vocab_size=32, noise_vocab_size=16, frac_noise=0.2),
    "selective-copying": SelectiveCopying(),
}
