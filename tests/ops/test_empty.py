"""Calls without a row or without a token: empty results, gradients of 0, states that stay as they are."""

import pytest
import torch
from scan_reads import READS, SHARED, scan_call
from softmax_calls import softmax_call

from fem.functional import decay_scan, softmax_read


def without(call, what):
    """The call without its rows, or without its tokens."""
    cut = (lambda x: x[:0]) if what == "rows" else (lambda x: x[:, :0])
    return call.set(**{n: cut(x) for n, x in call.arguments.items() if x is not None and n not in SHARED}).leaves()


def check_gradients_of_zero(read, tensors):
    sum(part.sum() for part in read).backward()
    for x in tensors:
        assert x.grad.shape == x.shape
        assert not x.grad.any()


@pytest.mark.parametrize("what", ["rows", "tokens"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", READS)
def test_a_scan_of_nothing_reads_nothing(name, causal, backend, what):
    call = without(scan_call(name, 3, dtype=torch.float64), what)
    read = call.read(causal=causal, backend=backend)
    assert read.mean.shape == read.free_energy.shape == call.arguments["v"].shape
    check_gradients_of_zero(read, call.tensors())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", READS)
def test_no_token_leaves_a_state_as_it_is(name, masked):
    whole = scan_call(name, 6)
    _, state = whole.at(slice(0, 4)).read(return_state=True)
    none = {"key_mask": torch.ones(2, 0, dtype=torch.bool)} if masked else {}
    nothing, same = whole.at(slice(4, 4)).read(initial_state=state, return_state=True, **none)
    assert nothing.mean.shape[1] == 0
    for part, x in state.memory.items():
        assert torch.equal(same.memory[part], x)
    for one, other in zip(
        whole.at(slice(4, 6)).read(initial_state=same), whole.at(slice(4, 6)).read(initial_state=state)
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", READS)
def test_a_state_of_no_token_begins_a_sequence(name):
    call = scan_call(name, 5)
    _, state = call.at(slice(0, 0)).read(return_state=True)
    for one, other in zip(call.read(initial_state=state), call.read()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("what", ["rows", "tokens"])
@pytest.mark.parametrize("backend", ["auto", "plain", "reference"])
def test_a_softmax_read_of_nothing_reads_nothing(backend, what):
    call = without(softmax_call(3), what)
    q, k, v, beta, *_ = call.arguments.values()
    read = softmax_read(q, k, v, beta, backend=backend)
    assert read.mean.shape == read.free_energy.shape == (*q.shape[:3], v.shape[3])
    check_gradients_of_zero(read, call.tensors())


@pytest.mark.parametrize("backend", ["auto", "plain", "reference"])
def test_queries_of_no_key_read_0(backend):
    call = softmax_call(3).leaves()
    q, k, v, beta, *_ = call.arguments.values()
    read = softmax_read(q, k[:, :0], v[:, :0], beta, causal=False, backend=backend)
    assert read.mean.shape == (1, 3, 2, 3)
    assert not any(part.any() for part in read)
    check_gradients_of_zero(read, call.tensors())


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2)])
def test_a_decay_scan_of_nothing_is_nothing(shape):
    log_decay, u, start = (torch.zeros(s, requires_grad=True) for s in (shape, shape, (shape[0], shape[2])))
    check_gradients_of_zero([decay_scan(log_decay, u, start)], [log_decay, u, start])
