"""The six MAD tasks against their rules: a checker per task, which also judges MAD's own examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fem_research.mad.tasks import TASKS, generate

MEMORY = {2: 8, 0: 7, 3: 4, 1: 6}


def runs(sequence, is_key):
    """A sequence of key and value tokens as [(key motif, value motif, place of the value)]."""
    pairs, place = [], 0
    while place < len(sequence):
        key_end = place
        while key_end < len(sequence) and is_key(sequence[key_end]):
            key_end += 1
        value_end = key_end
        while value_end < len(sequence) and not is_key(sequence[value_end]):
            value_end += 1
        assert place < key_end < value_end, "keys and values take turns"
        pairs.append((tuple(sequence[place:key_end]), tuple(sequence[key_end:value_end]), key_end))
        place = value_end
    return pairs


def check_recall(inputs, targets, split, last, vocab_size, seq_len, noise_vocab_size=0, frac_noise=0.0):
    assert len(inputs) == seq_len - 1
    keys = (vocab_size - noise_vocab_size) // 2
    sequence = [*inputs, last]
    meaning, expected = {}, [-100] * seq_len
    for place in range(0, seq_len, 2):
        first, second = sequence[place : place + 2]
        if first >= vocab_size - noise_vocab_size:
            assert vocab_size - noise_vocab_size <= second < vocab_size
            assert frac_noise > 0
            assert place < seq_len - 2
            continue
        assert 0 <= first < keys <= second < vocab_size - noise_vocab_size
        if first in meaning:
            expected[place + 1] = second
        assert meaning.setdefault(first, second) == second
    assert expected[-1] == last, "the last key was shown before"
    assert list(targets) == (sequence[1:] if split == "train" else expected[1:])


def check_fuzzy(inputs, targets, split, last, vocab_size, seq_len, k_motif_size=3, v_motif_size=3):
    assert len(inputs) == len(targets) == seq_len
    pad = vocab_size - 1
    sequence = [*inputs, last]
    start = next(i for i, token in enumerate(sequence) if token != pad)
    assert pad not in sequence[start:]
    body = sequence[start:]
    meaning, expected = {}, [-100] * len(sequence)
    pairs = runs(body, lambda token: token < pad // 2)
    for key, value, place in pairs:
        assert len(set(key)) == len(key) <= k_motif_size
        assert len(set(value)) == len(value) <= v_motif_size
        assert split == "train" or len(key) == k_motif_size
        if key in meaning:
            expected[start + place : start + place + len(value)] = value
        assert meaning.setdefault(key, value) == value
    assert pairs[-1][0] in [key for key, _, _ in pairs[:-1]], "the probe was shown before"
    assert list(targets) == (sequence if split == "train" else expected)[1:]


def check_memorization(inputs, targets, vocab_size, seq_len, memory):
    assert len(inputs) == len(targets) == seq_len
    assert all(inputs[1::2] == vocab_size - 1)
    assert all(targets[::2] == -100)
    assert list(targets[1::2]) == [memory[key] for key in inputs[::2]]


def check_compression(inputs, targets, vocab_size, seq_len):
    assert len(inputs) == seq_len
    assert inputs[-1] == vocab_size - 1
    assert 0 <= inputs[:-1].min() <= inputs[:-1].max() < vocab_size - 1
    assert list(targets) == list(inputs)


def check_copying(inputs, targets, vocab_size, seq_len, num_tokens_to_copy):
    assert len(inputs) == len(targets) == seq_len
    before, after = inputs[: -num_tokens_to_copy - 1], inputs[-num_tokens_to_copy:]
    assert inputs[-num_tokens_to_copy - 1] == vocab_size - 1
    assert vocab_size - 1 not in before
    assert all(after == vocab_size - 2)
    data = [token for token in before if token != vocab_size - 2]
    assert len(data) == num_tokens_to_copy
    assert before[-1] != vocab_size - 2, "blanks stand in front of data tokens"
    assert all(targets[:-num_tokens_to_copy] == -100)
    assert list(targets[-num_tokens_to_copy:]) == data


IN_CONTEXT = [2, 6, 1, 5, 0, 4, 0, 4, 0, 4, 3, 6, 3, 6, 0]
NOISY = [10, 9, 8, 8, 3, 6, 2, 6, 2, 6, 2, 6, 0, 5, 0]
FUZZY_TRAIN = [10] * 6 + [1, 0, 4, 7, 5, 8, 0, 1, 8, 5, 7, 2, 4, 8, 9, 0, 5, 0, 5, 4, 6, 2, 3, 1, 5, 0]
FUZZY_TEST = [10] * 4 + [4, 1, 2, 8, 7, 1, 3, 4, 8, 5, 7, 0, 4, 2, 9, 7, 8, 1, 4, 0, 7, 3, 1, 4, 5, 1, 4, 0]
X = -100


def test_mads_own_examples_obey_the_rules():
    small, noisy = {"vocab_size": 8, "seq_len": 16}, {"noise_vocab_size": 4, "frac_noise": 0.4}
    check_recall(IN_CONTEXT, [*IN_CONTEXT[1:], 4], "train", 4, **small)
    check_recall(IN_CONTEXT, [X, X, X, X, X, X, 4, X, 4, X, X, X, 6, X, 4], "test", 4, **small)
    check_recall(NOISY, [*NOISY[1:], 5], "train", 5, vocab_size=12, seq_len=16, **noisy)
    targets = [X, X, X, X, X, X, X, X, 6, X, 6, X, X, X, 5]
    check_recall(NOISY, targets, "test", 5, vocab_size=12, seq_len=16, **noisy)
    check_fuzzy(FUZZY_TRAIN, [*FUZZY_TRAIN[1:], 5], "train", 5, vocab_size=11, seq_len=32)
    check_fuzzy(FUZZY_TEST, [X] * 31 + [7], "test", 7, vocab_size=11, seq_len=32)
    inputs = np.array([3, 9, 3, 9, 0, 9, 0, 9, 2, 9, 2, 9])
    check_memorization(inputs, np.array([X, 4, X, 4, X, 7, X, 7, X, 8, X, 8]), 10, 12, MEMORY)
    check_compression(np.array([5, 4, 3, 1, 2, 0, 0, 0, 1, 7]), [5, 4, 3, 1, 2, 0, 0, 0, 1, 7], 8, 10)
    copying = np.array([6, 6, 5, 6, 3, 3, 6, 6, 6, 6, 1, 7, 6, 6, 6, 6])
    check_copying(copying, np.array([X] * 12 + [5, 3, 3, 1]), 8, 16, 4)


@pytest.mark.parametrize("split", ["train", "test"])
@given(
    keys=st.integers(2, 9), slots=st.integers(2, 11), noise=st.sampled_from([0.0, 0.3, 0.9]), seed=st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_recall_obeys_its_rules(split, keys, slots, noise, seed):
    sizes = {"vocab_size": 2 * keys + 3, "seq_len": 2 * slots + 14, "noise_vocab_size": 3, "frac_noise": noise}
    for inputs, targets in zip(*generate("noisy-in-context-recall", 8, seed, split, **sizes)):
        check_recall(inputs, targets, split, targets[-1], **sizes)


@pytest.mark.parametrize("split", ["train", "test"])
@given(
    k=st.integers(1, 3),
    v=st.integers(1, 3),
    extra=st.integers(0, 3),
    length=st.integers(12, 70),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_fuzzy_recall_obeys_its_rules(split, k, v, extra, length, seed):
    sizes = {"vocab_size": 2 * max(k, v) + extra + 5, "seq_len": length, "k_motif_size": k, "v_motif_size": v}
    for inputs, targets in zip(*generate("fuzzy-in-context-recall", 8, seed, split, **sizes)):
        check_fuzzy(inputs, targets, split, targets[-1], **sizes)


def test_memorization_obeys_its_rules_and_has_one_map_for_both_splits():
    sizes = {"vocab_size": 31, "seq_len": 40}
    memory = {}
    for split in ("train", "test"):
        inputs, targets = generate("memorization", 50, 4, split, **sizes)
        memory |= dict(zip(inputs[:, ::2].ravel().tolist(), targets[:, 1::2].ravel().tolist()))
        for one, wanted in zip(inputs, targets):
            check_memorization(one, wanted, **sizes, memory=memory)
    assert sorted(memory) == list(range(15))
    assert len(set(memory.values())) == 15
    assert set(memory.values()) <= set(range(15, 30))
    others = generate("memorization", 50, 5, "train", **sizes)
    assert any(memory[key] != value for key, value in zip(others[0][:, ::2].ravel(), others[1][:, 1::2].ravel()))


@pytest.mark.parametrize("split", ["train", "test"])
def test_compression_obeys_its_rules(split):
    for inputs, targets in zip(*generate("compression", 50, 1, split, vocab_size=5, seq_len=17)):
        check_compression(inputs, targets, 5, 17)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_copying_obeys_its_rules(split, count):
    sizes = {"vocab_size": 7, "seq_len": 19, "num_tokens_to_copy": count}
    for inputs, targets in zip(*generate("selective-copying", 50, 1, split, **sizes)):
        check_copying(inputs, targets, **sizes)


def test_fuzzy_noise_is_never_scored():
    sizes = {"vocab_size": 16, "seq_len": 60, "noise_vocab_size": 4, "frac_noise": 0.5}
    inputs, targets = generate("fuzzy-in-context-recall", 50, 1, "test", **sizes)
    assert ((inputs >= 11) & (inputs < 15)).any()
    assert targets.max() < 11


def test_noise_comes_as_often_as_asked():
    inputs, _ = generate("noisy-in-context-recall", 400, 0, "train", seq_len=66, frac_noise=0.4)
    assert (inputs[:, :-1:2] >= 16).mean() == pytest.approx(0.4, abs=0.02)


def test_blanks_stand_before_every_data_token_equally_often():
    inputs, _ = generate("selective-copying", 600, 0, "train", vocab_size=9, seq_len=49, num_tokens_to_copy=8)
    gaps = np.stack([np.diff(np.flatnonzero(row[:41] < 7), prepend=-1) - 1 for row in inputs])
    assert gaps.shape == (600, 8)
    np.testing.assert_allclose(gaps.mean(0), 4.0, atol=0.35)


def test_motif_sizes_are_uniform():
    inputs, targets = generate("fuzzy-in-context-recall", 300, 0, "train", seq_len=64)
    sizes = [
        (len(key), len(value))
        for row, wanted in zip(inputs, targets)
        for key, value, _ in runs([*row[row != 15], wanted[-1]], lambda token: token < 7)[:-1]
    ]
    for side in zip(*sizes):
        np.testing.assert_allclose(np.bincount(side)[1:] / len(side), 1 / 3, atol=0.03)


@pytest.mark.parametrize("task", TASKS)
def test_no_sequence_is_in_both_splits(task):
    sequences = {
        (seed, split): {tuple(row) for row in generate(task, 200, seed, split)[0]}
        for seed in (0, 1)
        for split in ("train", "test")
    }
    everything = set().union(*sequences.values())
    assert len(everything) == 800


def test_even_a_tiny_space_of_sequences_is_split():
    train, test = (
        {tuple(x) for x in generate("compression", 300, 0, s, vocab_size=4, seq_len=5)[0]} for s in ("train", "test")
    )
    assert train
    assert test
    assert not train & test


@pytest.mark.parametrize("task", TASKS)
def test_examples_depend_on_seed_split_and_index_alone(task):
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    few, more = generate(task, 3, 7, "test"), generate(task, 9, 7, "test")
    for part, whole in zip(few, more):
        assert part.dtype == np.int64
        np.testing.assert_array_equal(part, whole[:3])
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("task", "arguments", "sentence"),
    [
        ("recall", {}, "task must be one of"),
        ("compression", {"split": "dev"}, "split must be one of"),
        ("compression", {"n": 0}, "n must be positive"),
        ("compression", {"vocab_siz": 4}, "did you mean vocab_size"),
        ("compression", {"frac_noise": 0.1}, "has no setting 'frac_noise'"),
        ("compression", {"vocab_size": 2}, "too few sequences"),
        ("in-context-recall", {"seq_len": 15}, "seq_len must be even"),
        ("in-context-recall", {"frac_noise": 0.1}, "needs noise_vocab_size"),
        ("noisy-in-context-recall", {"frac_noise": 1.0}, "frac_noise must lie in"),
        ("noisy-in-context-recall", {"vocab_size": 16}, "vocab_size must leave"),
        ("fuzzy-in-context-recall", {"vocab_size": 6}, "vocab_size must leave"),
        ("fuzzy-in-context-recall", {"seq_len": 10}, "seq_len must hold"),
        ("memorization", {"seq_len": 7}, "seq_len must be even"),
        ("selective-copying", {"seq_len": 32}, "seq_len must exceed"),
    ],
)
def test_impossible_data_is_one_sentence(task, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(task, **{"n": 4, "seed": 0, "split": "train"} | arguments)
