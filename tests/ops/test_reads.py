"""What every read promises: one promise, one test over all reads."""

import warnings

import pytest
import torch
from processes import printed
from reads import (
    LAYOUTS,
    READS,
    RECURRENT,
    SCANS,
    SHARED,
    SOFTMAX,
    beside_float64,
    by_definition,
    documents_of,
    excess,
    gradients_of,
    make,
    relative,
)

from fem.functional import ScanState
from fem.ops.common.precision import fallbacks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
every_read = pytest.mark.parametrize("name", READS)
every_scan = pytest.mark.parametrize("name", SCANS)
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])


def equal(got, wanted, tolerance=1e-9):
    torch.testing.assert_close([*got], [*wanted], rtol=tolerance, atol=tolerance)


# Exactness: a case is what is drawn, and what is special about it.
CASES = {
    "usual": {},
    "one token": {"time": 1},
    "two tokens": {"time": 2},
    "more than one chunk": {"time": 67, "heads": 1},
    "a prime number of tokens": {"time": 127, "heads": 1, "width": 1},
    "both directions": {"causal": False},
    "masked": {"mask": True},
    "documents": {"ids": True},
    "masked and packed": {"mask": True, "ids": True},
    "masked and packed, both directions": {"mask": True, "ids": True, "causal": False},
    "a pair of values": {"free": 2, "mask": True, "ids": True},
    "a pair, both directions": {"free": 2, "causal": False},
    "free energies alone": {"width": 0, "free": 3},
    "means alone": {"width": 3, "free": 0},
    "a span of 50": {"spread": 10.0},
    "a span of 200, both directions": {"spread": 40.0, "causal": False},
    "a span of 1000": {"spread": 150.0},
    "a narrow span": {"spread": 1e-2},
    "a spike": {"spike": 300.0},
    "a dip": {"spike": -300.0},
    "a spike that decays": {"spike": 500.0, "decay": 30.0},
    "a spike in a long memory": {"spike": 300.0, "decay": 1e-3, "time": 80},
    "an offset": {"offset": 1000.0},
    "heavy weights": {"weights": 30.0},
    "decays of a thousand": {"decay": 500.0},
    "no decay": {"decay": 0.0},
    "a small beta": {"beta": 1e-3},
    "the smallest beta": {"beta": 1e-6},
    "a large beta": {"beta": 50.0},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 and a span of 200": {"dtype": torch.bfloat16, "spread": 40.0},
    "float64": {"dtype": torch.float64, "mask": True, "ids": True},
    "float64 and a span of 1000": {"dtype": torch.float64, "spread": 150.0},
}
OF_SCANS = {
    "unnormalised": {"normalize": False},
    "unnormalised, both directions": {"normalize": False, "causal": False, "mask": True},
}
OF_SCANS |= {f"{time} tokens": {"time": time, "heads": 1, "width": 1} for time in (63, 64, 65, 191)}
OF_RECURRENT = {"log-weights of a hundred": {"weights": 100.0, "time": 43}}
OF_SOFTMAX = {
    "grouped heads": {"groups": 2, "mask": True, "ids": True},
    "scores of 1000": {"weights": 1000.0},
    "values wider than the keys": {"width": 13},
    "float16 and a span of 200": {"dtype": torch.float16, "spread": 40.0},
}
IDS = torch.tensor([4, 4, 4, 4, 1, 1, 1, 4, 4, 7, 7, 7, 7, 7, 7, 2, 2])  # one that returns begins a new document


def drawn(name, case):
    """A call, its marks, and the tokens of its documents; what stands in masked tokens is large."""
    options = dict(case)
    mask, ids, spike, offset = (options.pop(n, 0) for n in ("mask", "ids", "spike", "offset"))
    time = options.pop("time", 23)
    call = make(name, time, **options)
    values = {part: call.arguments[part] + offset for part in {"v", "free_values"} & call.along.keys()}
    call, marks = call.set(**values).spiked(spike, time // 3), {}
    keep, documents = torch.ones(time, dtype=torch.bool), torch.zeros(time, dtype=torch.long)
    if mask:
        keep[:3] = keep[7] = keep[11:13] = keep[-1] = False
        marks["key_mask"] = keep[None]
    if ids:
        documents = IDS.repeat(1 + time // 17)[:time]
        marks["segment_ids"] = documents[None]
    return call, documents_of(keep, documents), marks


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in READS for c in CASES]
    + [(n, c) for n in SCANS for c in OF_SCANS]
    + [(n, c) for n in RECURRENT for c in OF_RECURRENT]
    + [(n, c) for n in SOFTMAX for c in OF_SOFTMAX],
)
def test_reads_and_gradients_in_every_form_err_no_more_than_the_plain_form_may(name, case):
    """Whole, in chunks, token by token and streamed; masked tokens deleted, documents apart, windows as they stand."""
    call, documents, marks = drawn(name, (CASES | OF_SCANS | OF_RECURRENT | OF_SOFTMAX)[case])
    over = {part: ratio for part, ratio in excess(call, documents, marks).items() if not ratio <= 1}
    assert not over, over


@every_read
@pytest.mark.parametrize("change", [1e4, -1e4, 30.0])  # the last is proven without a second computation
def test_the_future_changes_nothing(name, change):
    call = make(name, 61, batch=2)
    later = call.map(torch.clone)
    for part, x in later.along.items():
        if part == "log_decay":
            x[:, 40:] -= 50.0
        elif part != "bias":
            x[:, 40:] += change if call.softmax or part == "v" else abs(change)
    for got, wanted in zip(later.read(), call.read()):
        assert (got - wanted)[:, :40].abs().max() <= 5e-6 * (1 + call.arguments["v"].abs().max())


MASKS = torch.tensor([[0] * 3 + [1] * 14, [1] * 14 + [0] * 3, [1] * 17, [0] * 17]).bool()


@every_read
@both_ways
def test_rows_of_a_batch_are_read_apart_and_masked_tokens_may_hold_anything(name, causal):
    call = make(name, 17, batch=4, causal=causal, dtype=torch.float64)
    ids = torch.stack([IDS, 0 * IDS, IDS[torch.arange(17) // 2], IDS])
    wanted = []
    for row in range(3):
        alone = call.set(**{n: x if n == "bias" else x[row : row + 1] for n, x in call.along.items()})
        wanted.append(by_definition(alone, documents_of(MASKS[row], ids[row])))
    shaped = lambda x: ~MASKS.view(4, 17, *[1] * (x.dim() - 2))  # noqa: E731
    spoilt = {n: x.masked_fill(shaped(x), 1e4 if n == "q" else torch.nan) for n, x in call.along.items() if n != "bias"}
    mine = call.set(**spoilt).leaves()
    found = mine.read(key_mask=MASKS, segment_ids=ids)
    assert all(part.isfinite().all() for part in found)
    equal([part[:3][MASKS[:3]] for part in found], [torch.cat([x[0] for x in parts]) for parts in zip(*wanted)])
    for part, gradient in gradients_of(mine, found, [MASKS[..., None, None].expand_as(x) for x in found]).items():
        assert gradient.isfinite().all(), part
        assert part in (*SHARED, "bias", "q") or not gradient[~MASKS].any(), part


def weightless(name, call):
    """The call in which the third token sees no weight, and the names of what it changes."""
    changed = {n: x.clone() for n, x in call.arguments.items() if x is not None}
    if "q" in changed and not call.softmax:
        changed["q"][:, 2] = 0
    elif name == "ssm":
        changed["C"][:, 2], changed["D"] = 0, torch.zeros_like(changed["D"])
    elif "log_weight" in changed:
        changed["log_weight"][:, :3] = -torch.inf
    elif name == "softmax with bias":
        changed["bias"][:, 2] = -torch.inf
    else:
        return None
    return call.set(**changed)


@every_read
@both_ways
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_row_that_sees_nothing_reads_0_and_passes_no_gradient(name, causal, backend):
    call = make(name, 9, batch=2, causal=causal).leaves()
    mask = torch.ones(2, 9).bool()
    mask[1] = False
    read = call.read(key_mask=mask, backend=backend)
    assert not any(part[1].any() for part in read)
    for part, gradient in gradients_of(call, read, [torch.ones_like(part) for part in read]).items():
        assert gradient.isfinite().all(), part
        assert part in (*SHARED, "bias") or not gradient[1].any(), part
    if (call := weightless(name, make(name, 9, batch=2))) is not None:
        call = call.leaves()
        read = call.read(backend=backend)
        assert not any(part[:, 2].any() for part in read)
        gradients = gradients_of(call, read, [torch.arange(9).eq(2)[:, None, None].expand_as(part) for part in read])
        assert backend != "auto" or not any(x.any() for x in gradients.values())
        gradients = gradients_of(call, read, [torch.ones_like(part) for part in read])
        assert backend != "auto" or all(x.isfinite().all() for x in gradients.values())


@every_read
@both_ways
@pytest.mark.parametrize("what", ["rows", "tokens"])
def test_a_read_of_nothing_is_nothing(name, causal, what):
    cut = slice(0, 0) if what == "rows" else (slice(None), slice(0, 0))
    call = make(name, 3, dtype=torch.float64)
    mine = call.set(**{n: x[cut] for n, x in call.along.items() if n != "bias"})
    if "bias" in call.along and what == "tokens":
        mine = mine.set(bias=call.along["bias"][:, :0, :0])
    mine = mine.leaves()
    read = mine.read(causal=causal)
    assert read.mean.shape == read.free_energy.shape == mine.arguments["v"].shape
    assert not any(gradient.any() for gradient in gradients_of(mine, read, read).values())


@every_scan
@pytest.mark.parametrize("masked", [False, True])
def test_no_token_leaves_a_state_as_it_is_and_begins_a_sequence(name, masked):
    call = make(name, 6, batch=2)
    none = {"key_mask": torch.ones(2, 0).bool()} if masked else {}
    _, state = call.at(slice(0, 4)).read(return_state=True)
    nothing, same = call.at(slice(4, 4)).read(initial_state=state, return_state=True, **none)
    assert nothing.mean.shape[1] == 0
    assert all(torch.equal(same.memory[part], x) for part, x in state.memory.items())
    equal(*(call.at(slice(4, 6)).read(initial_state=x) for x in (same, state)), 0)
    _, new = call.at(slice(0, 0)).read(return_state=True)
    equal(call.read(initial_state=new), call.read(), 1e-6)


@every_read
@both_ways
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_mean_alone_needs_no_beta(name, causal, backend):
    whole, results = make(name, 21, causal=causal), []
    for change in ({}, {"beta": None}):
        call = whole.set(**change).leaves()
        read = call.read(backend=backend)
        assert (read.free_energy is None) == bool(change)
        gradients = gradients_of(call, [read.mean], [torch.ones_like(read.mean)])
        results.append([read.mean, *(x for n, x in gradients.items() if n != "beta")])
    equal(*results, 1e-5)


@every_read
@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_that_is_undefined_is_passed_on(name, again):
    """As `torch.autograd.gradcheck` tries, and a function whose backward returns None."""
    call = make(name, 5).leaves()
    sum(torch._C._functions.UndefinedGrad()(part).sum() for part in call.read()).backward(create_graph=again)
    assert not any(x.grad is not None and x.grad.any() for x in call.tensors())


@every_read
@both_ways
def test_the_reference_backend_is_the_definition(name, causal):
    call, documents, marks = drawn(name, CASES["float64"] | {"causal": causal, "time": 16})
    rows = torch.cat(documents)
    equal([part[:, rows] for part in call.read(backend="reference", **marks)], by_definition(call, documents))


@every_read
@both_ways
def test_derivatives_of_first_and_second_order_are_those_of_the_definition(name, causal):
    """With `create_graph`, over masked tokens, of inputs that are computed from one."""
    call, documents, marks = drawn(name, {"causal": causal, "mask": True, "time": 9, "dtype": torch.float64})
    rows, one = torch.cat(documents), torch.randn(9, dtype=torch.float64).requires_grad_()
    leaves = [one, call.arguments["beta"].requires_grad_()]
    turned = lambda x: x * (1 + 0.1 * one.sin().view(1, 9, *[1] * (x.dim() - 2)))  # noqa: E731
    call, found = call.set(**{n: turned(x.detach()) for n, x in call.along.items() if n != "bias"}), []
    for read in ([part[:, rows] for part in call.read(**marks)], by_definition(call, documents)):
        loss = sum(part.sin().sum() for part in read)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in again), leaves, retain_graph=True)
        equal(again, first)
        found.append([*first, *second])
    equal(*found, 1e-7)


@every_read
@both_ways
def test_transforms_pass_rows_that_see_nothing(name, causal):
    call = make(name, 5, batch=3, causal=causal)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    read = lambda beta: call.set(beta=beta).read(key_mask=mask).free_energy[mask.bool()].square().sum()  # noqa: E731
    beta = call.arguments["beta"].clone().requires_grad_()
    wanted = torch.autograd.grad(read(beta), beta)[0]
    torch.testing.assert_close(torch.func.grad(read)(beta.detach()), wanted, rtol=1e-4, atol=1e-4)


@every_read
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_layout_of_an_argument_changes_nothing(name, layout):
    call = make(name, 9, keys=4, width=4)
    laid = call.map(lambda x: LAYOUTS[layout](x).detach() if x.dim() > 2 else x)
    results = []
    for inputs in (laid, laid.map(lambda x: x.clone(memory_format=torch.contiguous_format))):
        with torch.no_grad():
            parts = [*inputs.read()]
        leaves = inputs.map(lambda x: x.requires_grad_())
        out = leaves.read()
        cotangents = [LAYOUTS[layout](torch.arange(y.numel()).sin().view(y.shape)) for y in out]
        results.append([*parts, *out, *torch.autograd.grad(list(out), leaves.tensors(), cotangents)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@every_scan
@both_ways
def test_one_input_in_float64_is_read_in_float64(name, causal):
    """Each in turn, the others in float32, of which the read has the dtype of v."""
    call = make(name, 9, causal=causal)
    wanted = call.map(lambda x: x.double()).read()
    for part, x in call.arguments.items():
        if x is not None:
            for got, want in zip(call.set(**{part: x.double()}).read(), wanted):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@every_read
@pytest.mark.parametrize("time", [1, 37])
def test_autocast_leaves_a_read_as_it_is(name, time):
    call = make(name, time)
    with torch.autocast("cpu", torch.bfloat16):
        inside = call.read()
    equal(inside, call.read(), 0)


@pytest.mark.parametrize("name, heavy", [*((name, 0.0) for name in SCANS), ("aft", 100.0), ("aft with decay", 100.0)])
def test_long_sequences_stay_exact(name, heavy):
    """Beside float64, which other tests hold to the definition; log-weights may lie around a hundred."""
    call = make(name, 4093, heads=1, beta=20.0)
    if heavy:
        call = call.set(log_weight=call.arguments["log_weight"] + heavy)
    got, wanted, found, expected = beside_float64(call, definition=type(call).read)
    assert all(relative(one, other, 0.1) < 1e-5 for one, other in zip(got, wanted))
    for part, gradient in found.items():
        assert relative(gradient, expected[part], 0.1) < 1e-5, part


def saved_numbers(call):
    held = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.update({x.data_ptr(): x.numel()}) or x, lambda x: x):
        call.leaves().read()
    return sum(held.values())


@pytest.mark.parametrize("name", [name for name in READS if name != "softmax with bias"])
def test_training_keeps_no_state_and_no_score_per_token(name):
    sizes = {"keys": 32, "width": 32, "rank": 32, "heads": 4}
    short, long = (saved_numbers(make(name, time, **sizes)) for time in (1024, 2048))
    assert long <= 2.1 * short
    assert long <= 0.25 * 2048 * 4 * 32 * 32


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_is_small_and_opaque(name):
    _, state = make(name, 50, batch=2).read(return_state=True)
    assert isinstance(state, ScanState)
    entries = 2 * 2 * 3 * (6 if name == "ssm" else 3)
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in state.memory.values()}
    assert sum(held.values()) == 4 * entries


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_entries_computed_again_are_counted_and_said_once(name, monkeypatch):
    monkeypatch.setattr(fallbacks, "warned", False)
    fallbacks.reset()
    call = make(name, 20)
    call.read()
    assert (fallbacks.entries, fallbacks.recomputed) == (20 * 2 * 3, 0)
    spiked = call.spiked(500, 10)
    with pytest.warns(UserWarning, match="computed again"):
        spiked.read()
    assert fallbacks.recomputed >= 10 * 2 * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spiked.read()


@pytest.mark.slow
@every_scan
def test_three_thousand_steps_drift_by_nothing(name):
    """A rounding error of 2^-24 a step would add up to 1.8e-4; measured: 5e-7 after 1,000 steps, 1.2e-6 after 8,000."""
    call = make(name, 3000, heads=1, weights=0.5, decay=0.02)
    found, wanted = call.in_pieces(*[1] * 3000), call.map(lambda x: x.double()).read()
    assert all(relative(one[:, 1000:], other[:, 1000:]) < 5e-6 for one, other in zip(found, wanted))


COMPILED = """
import sys, torch
from reads import READS, SOFTMAX, make
torch.set_num_threads(1)
for name in READS:
    torch._dynamo.reset()
    call = make(name, 70, batch=2, spread=20.0).leaves()
    def loss(*tensors):
        given = call.set(**dict(zip((n for n, x in call.arguments.items() if x is not None), tensors)))
        reads = [given.read(), given.read(causal=False)]
        if name not in SOFTMAX:
            reads[0], state = given.read(return_state=True)
            reads.append(list(state.memory.values()))
        return sum((x / 10).sin().sum() for read in reads for x in read)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(run(*call.tensors()), call.tensors()) for run in (loss, compiled)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
print("whole")
"""


@pytest.mark.slow
def test_forward_and_backward_are_one_graph_that_computes_the_same():
    assert printed("-c", COMPILED) == "whole\n"


@every_scan
@both_ways
@pytest.mark.parametrize("kept", [slice(8), slice(12, None), slice(0)], ids=["right", "left", "all masked"])
def test_tokens_that_see_nothing_are_not_computed_again(name, causal, kept):
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[:, kept] = True
    fallbacks.reset()
    make(name, 20).read(causal=causal, key_mask=mask)
    assert fallbacks.recomputed == 0
