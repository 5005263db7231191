"""Positions, documents and boundaries, against a loop over one row at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fem.ops.common.tokens import read_tokens

rows = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=12)


def by_loop(row):
    """position, document and start of each kept token of [(keep, id)]."""
    last, position, document, out = None, 0, 0, []
    for keep, number in row:
        if not keep:
            out.append(None)
            continue
        start = last is not None and number != last
        if start:
            position, document = 0, document + 1
        out.append((position, document, start))
        last, position = number, position + 1
    return out


def kept(tokens, cell):
    start = tokens.start is not None and bool(tokens.start[cell])
    return int(tokens.position.expand(1, -1)[cell]), int(tokens.document[cell]), start


@given(row=rows, cut=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_tokens_of_a_row_in_any_two_parts_and_of_the_reversed_one_are_those_of_the_loop(row, cut):
    """A reversed document opens at its last kept token."""
    keep, ids = (torch.tensor([part]) for part in zip(*row))
    seen, cache_position = [], None
    for part in (slice(None, cut), slice(cut, None)):
        marks = keep[:, part], ids[:, part]
        if marks[0].shape[1]:
            tokens, cache_position = read_tokens(tuple(marks[0].shape), keep.device, *marks, cache_position)
            seen += [kept(tokens, (0, t)) if keep[0, part][t] else None for t in range(keep[:, part].shape[1])]
    assert seen == by_loop(row)
    tokens, _ = read_tokens(tuple(keep.shape), keep.device, keep, ids)
    backwards = tokens.reversed()
    for t, cell in enumerate(by_loop(row[::-1])):
        if cell is not None:
            assert bool(backwards.start[0, t]) == cell[2]


def test_plain_tokens_cost_nothing():
    tokens, cache_position = read_tokens((2, 5), torch.device("cpu"))
    assert tokens.keep is tokens.start is tokens.document is None
    assert tokens.position.tolist() == [0, 1, 2, 3, 4]
    assert cache_position.position.tolist() == [5, 5]


def test_tokens_are_moved_to_another_device():
    marks = read_tokens((1, 3), torch.device("cpu"), torch.tensor([[True, False, True]]))[0].to("meta")
    assert marks.keep.is_meta
    assert marks.document is None
