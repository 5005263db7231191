"""Tokens that hold NaN or infinity: who reads them reads NaN, and nobody else is touched."""

import pytest
import torch
from layers import FAMILIES, make_layer, tokens

pytestmark = pytest.mark.usefixtures("as_users_run")
families = pytest.mark.parametrize("family", FAMILIES)
conditioned = pytest.mark.parametrize("conditioner", [False, True], ids=["", "C"])
TIME = 23
DOCUMENT = torch.tensor([[0] * 6 + [1] * 9 + [2] * 8, [5] * 15 + [4] * 8])
KEEP = torch.tensor([[1] * 4 + [0] * 4 + [1] * 15, [0, 0] + [1] * 21]).bool()
PLACE = (0, 10)  # in the second document of the first row


def spoil(x, what):
    x = x.clone()
    x[PLACE] = torch.where(torch.arange(x.shape[-1]) == 3, what, x[PLACE])
    return x


def readers(causal, window=None):
    """The places whose row sees the spoilt one, where a row sees what is before it in its document."""
    place = torch.arange(TIME)
    seen = torch.zeros(2, TIME, dtype=torch.bool)
    seen[0] = (DOCUMENT[0] == 1) & ((place >= PLACE[1]) if causal else True)
    if window is not None:
        seen[0] &= place < PLACE[1] + window
    return seen & KEEP


@families
@conditioned
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_other_documents_and_earlier_tokens_never_know(family, conditioner, causal, what):
    """Nor do gradients, where the token is set apart: attention alone reads it as it is, and W'x meets it."""
    fields = FAMILIES[family]
    if not causal and fields.get("window"):
        pytest.skip("a window is causal")
    layer = make_layer(causal=causal, use_conv=conditioner, **fields)
    seen = readers(causal, None if conditioner else fields.get("window"))
    results = []
    for x in (tokens(time=TIME), spoil(tokens(time=TIME), what)):
        layer.zero_grad()
        x.requires_grad_()
        y = layer(x, KEEP, DOCUMENT)
        y[KEEP & ~readers(False)].square().sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
        results.append([y, x.grad, *gradients])
    (clean, *wanted), (y, *gradients) = results
    assert y[seen].isnan().all()
    torch.testing.assert_close(y[KEEP & ~seen], clean[KEEP & ~seen], rtol=1e-9, atol=1e-9)
    if conditioner or layer.prior.name != "softmax":
        for got, expected in zip(gradients, wanted):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@families
@conditioned
def test_without_documents_earlier_tokens_never_know(family, conditioner):
    layer = make_layer(use_conv=conditioner, **FAMILIES[family])
    x = tokens(time=70)
    y = layer(torch.where(torch.arange(70)[:, None] < 40, x, torch.nan))
    torch.testing.assert_close(y[:, :40], layer(x)[:, :40], rtol=1e-9, atol=1e-9)
    assert y[:, 40].isnan().all()


@families
@conditioned
@pytest.mark.parametrize("cuts", [(10,), (11, 12), (11, 15), (5, 14, 16), tuple(range(1, TIME))])
def test_a_stream_forgets_a_spoilt_token_with_its_document(family, conditioner, cuts):
    layer, x = make_layer(use_conv=conditioner, **FAMILIES[family]), spoil(tokens(time=TIME), torch.nan)
    whole, state, parts = layer(x, KEEP, DOCUMENT), None, []
    for part, keep, document in zip(*(s.tensor_split(cuts, 1) for s in (x, KEEP, DOCUMENT))):
        y, state = layer(part, keep, document, state=state, return_state=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1)[KEEP], whole[KEEP], rtol=1e-9, atol=1e-9, equal_nan=True)


@families
def test_a_state_that_met_it_unseen_is_read_until_its_document_ends(family):
    """Token by token and without ids nothing is set apart: the state itself holds the NaN."""
    layer, x = make_layer(**FAMILIES[family]), spoil(tokens(time=TIME), torch.nan)
    state = None
    for token in x[:, :12].unbind(1):
        y, state = layer(token[:, None], state=state, return_state=True)
    assert y[0].isnan().all()
    ids = torch.full((2, 11), 7)
    ids[:, :2] = 0  # the document of the stream goes on
    y = layer(x[:, 12:], None, ids, state=state)
    assert y[0, :2].isnan().all() or "window" in FAMILIES[family]
    torch.testing.assert_close(y[0, 2:], layer(x[:, 14:])[0], rtol=1e-9, atol=1e-9)
