"""What a query may see, as an interval of keys, against a loop over the rules."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fem.ops.common.naive_rows import supports
from fem.ops.common.tokens import read_tokens
from fem.ops.softmax.support import intervals


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_intervals_are_the_support(data):
    batch, keys = 2, data.draw(st.integers(1, 12))
    queries, causal = data.draw(st.integers(1, keys)), data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, 6))
    draw = lambda most: torch.tensor(data.draw(st.lists(st.integers(0, most), min_size=2 * keys, max_size=2 * keys)))  # noqa: E731
    mask = draw(1).view(batch, keys) if data.draw(st.booleans()) else None
    ids = draw(2).view(batch, keys) if data.draw(st.booleans()) else None
    tokens, _ = read_tokens((batch, keys), torch.device("cpu"), mask, ids)
    seen = intervals(queries, keys, causal, window, tokens, torch.device("cpu"))
    inside = seen.allowed(keys).expand(batch, -1, -1)
    if mask is not None:
        of_kept, kept, order = seen.of_kept(tokens.keep)
        again = of_kept.allowed(keys).expand(batch, -1, -1)
        assert torch.equal(kept.long(), mask.sum(1))
        inside = inside & tokens.keep[:, None]
        assert torch.equal(inside, torch.zeros_like(inside).scatter(2, order[:, None].expand_as(inside), again))
    for row in range(batch):
        keep = [True] * keys if mask is None else mask[row].bool().tolist()
        sees = supports(keep, None if ids is None else ids[row].tolist(), causal, window)
        want = torch.tensor([[sees(t, i) for i in range(keys)] for t in range(keys - queries, keys)])
        rows = torch.tensor(keep)[keys - queries :]  # a masked query may see anything
        assert torch.equal(inside[row][rows], want[rows])
    assert (seen.first.diff(dim=1) >= 0).all()
    assert (seen.end.diff(dim=1) >= 0).all()
