"""What all scan reads promise alike."""

import pytest
import torch
from scan_reads import READS, RECURRENT, SHARED, compare, gradients_of, relative, scan_call

from fem.functional import ScanState

every_kind = pytest.mark.parametrize("kind", READS)
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])


@every_kind
@both_ways
@pytest.mark.parametrize("time", [1, 2, 37])
def test_read_and_gradients_are_those_of_the_definition(kind, causal, time):
    compare(scan_call(kind, time), causal=causal)


@every_kind
@both_ways
def test_float64_is_computed_in_float64(kind, causal):
    compare(scan_call(kind, 23, dtype=torch.float64), limit=1e-12, causal=causal)


@every_kind
@both_ways
@pytest.mark.parametrize("span", [40, 200, 1000])
def test_read_is_exact_however_far_the_values_spread(kind, causal, span):
    inputs = scan_call(kind, 19, beta=2.0)
    v = torch.rand_like(inputs.arguments["v"]) * span / 2
    compare(inputs.set(v=v), limit=1e-5, causal=causal)


@every_kind
def test_a_spike_that_decayed_away_leaves_no_trace(kind):
    inputs = scan_call(kind, 41, beta=2.0)
    v = inputs.arguments["v"].clone()
    v[:, 3] = 300.0
    changed = {"v": v}
    if inputs.arguments.get("log_decay") is not None:
        decay = inputs.arguments["log_decay"].clone()
        decay[:, 8:12] = -400.0
        changed["log_decay"] = decay
    if kind == "ssm":
        delta = inputs.arguments["delta"].clone()
        delta[:, 8:12] = 500.0
        changed["delta"] = delta
    compare(inputs.set(**changed), limit=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in READS if kind not in ("aft", "linear")])
@both_ways
def test_decays_of_nothing_and_of_a_thousand_a_step(kind, causal):
    for level in (0.0, -1000.0):
        inputs = scan_call(kind, 13)
        if kind == "ssm":
            rate = torch.full_like(inputs.arguments["A"], level)
            compare(inputs.set(A=rate, delta=torch.ones_like(inputs.arguments["delta"])), causal=causal)
        else:
            decay = torch.full_like(inputs.arguments["log_decay"], level)
            compare(
                inputs.set(log_decay=decay), limit=3e-5, causal=causal
            )  # where gradients cancel: 16 eps (1 + max|v|)


@every_kind
@both_ways
@pytest.mark.parametrize("normalize", [True, False])
def test_masks_and_documents_are_those_of_the_definition(kind, causal, normalize):
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1]])
    ids = torch.tensor([[5, 5, 5, 2, 7, 2, 5, 5, 5, 5, 1], [0, 0, 1, 9, 1, 1, 1, 0, 0, 0, 0]])
    inputs = scan_call(kind, 11)
    compare(inputs, causal=causal, key_mask=mask, normalize=normalize)
    compare(inputs, causal=causal, segment_ids=ids, normalize=normalize)
    compare(inputs, causal=causal, key_mask=mask, segment_ids=ids, normalize=normalize)


@every_kind
@both_ways
@pytest.mark.parametrize("where", ["left", "right", "interior"])
def test_masking_tokens_is_deleting_them(kind, causal, where):
    masked = {"left": [0, 1, 2], "right": [15, 16], "interior": [3, 4, 9]}[where]
    kept = [t for t in range(17) if t not in masked]
    inputs = scan_call(kind, 17)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[:, masked] = False
    poisoned = inputs.map(torch.clone)
    for tensor in poisoned.along.values():
        tensor[:, masked] = tensor[:, masked].sign() * 1e4
    for got, wanted in zip(poisoned.read(causal=causal, key_mask=mask), inputs.at(kept).read(causal=causal)):
        torch.testing.assert_close(got[:, kept], wanted, rtol=1e-6, atol=1e-6)
        assert got.isfinite().all()


@every_kind
@both_ways
def test_documents_are_separate_runs(kind, causal):
    ids = torch.tensor([[4] * 5 + [1] * 8 + [4] * 6] * 2)
    inputs = scan_call(kind, 19)
    runs = [inputs.at(slice(*ends)).read(causal=causal) for ends in ((0, 5), (5, 13), (13, 19))]
    for got, *parts in zip(inputs.read(causal=causal, segment_ids=ids), *runs):
        torch.testing.assert_close(got, torch.cat(parts, 1), rtol=1e-6, atol=1e-6)


@every_kind
@pytest.mark.parametrize("sizes", [[1] * 29, [7, 1, 16, 5], [28, 1]], ids=["steps", "chunks", "step after prefill"])
def test_whole_equals_chunks_equals_steps(kind, sizes):
    inputs = scan_call(kind, 29)
    ids = torch.tensor([[0] * 9 + [3] * 20, [1] * 23 + [2] * 6])
    mask = torch.rand(2, 29) > 0.2
    whole = inputs.read(key_mask=mask, segment_ids=ids)
    state, pieces, first = None, [], 0
    for size in sizes:
        piece = slice(first, first + size)
        read, state = inputs.at(piece).read(
            key_mask=mask[:, piece], segment_ids=ids[:, piece], initial_state=state, return_state=True
        )
        pieces.append(read)
        first += size
    for wanted, *parts in zip(whole, *pieces):
        torch.testing.assert_close(torch.cat(parts, 1)[mask], wanted[mask], rtol=1e-5, atol=1e-5)


@every_kind
def test_future_tokens_change_nothing(kind):
    inputs = scan_call(kind, 33)
    before = inputs.read()
    for sign in (1, -1):
        changed = inputs.map(torch.clone)
        changed.arguments["v"][:, 20:] = sign * 1e4
        for name in {"log_weight", "q", "k"} & changed.along.keys():
            changed.along[name][:, 20:] = 1e4
        for got, wanted in zip(changed.read(), before):
            assert (got - wanted)[:, :20].abs().max() <= 5e-6 * (1 + inputs.arguments["v"].abs().max())


@every_kind
@both_ways
def test_free_energy_lies_between_mean_and_maximum(kind, causal):
    inputs = scan_call(kind, 300, spread=5.0)
    mean, free_energy = inputs.read(causal=causal)
    v = inputs.arguments["v"]
    top = v.cummax(1).values if causal else v.amax(1, keepdim=True)
    slack = 1e-5 * (1 + v.abs())
    assert (mean <= free_energy + slack).all()
    assert (free_energy <= top + slack).all()


@every_kind
def test_a_common_shift_of_the_values_shifts_the_reads(kind):
    inputs = scan_call(kind, 31)
    for got, wanted in zip(inputs.set(v=inputs.arguments["v"] + 50).read(), inputs.read()):
        torch.testing.assert_close(got - 50, wanted, rtol=0, atol=50e-6)


@every_kind
@both_ways
def test_rows_that_see_nothing_read_zero_and_pass_no_gradient(kind, causal):
    inputs = scan_call(kind, 9).leaves()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    read = inputs.read(causal=causal, key_mask=mask)
    for part in read:
        assert (part[1] == 0).all()
    for name, gradient in gradients_of(inputs, read, [torch.ones_like(part) for part in read]).items():
        assert gradient.isfinite().all(), name
        assert name in SHARED or (gradient[1] == 0).all(), name


@every_kind
@both_ways
def test_mean_alone_needs_no_beta(kind, causal):
    inputs = scan_call(kind, 21)
    alone = inputs.set(beta=None).read(causal=causal)
    assert alone.free_energy is None
    torch.testing.assert_close(alone.mean, inputs.read(causal=causal).mean)


@every_kind
@pytest.mark.parametrize("time", [1, 37])
def test_autocast_computes_in_float32(kind, time):
    inputs = scan_call(kind, time)
    with torch.autocast("cpu", torch.bfloat16):
        read = inputs.read()
    for got, wanted in zip(read, inputs.read()):
        assert (got == wanted).all()


@every_kind
def test_long_sequences_stay_exact(kind):
    inputs = scan_call(kind, 4093, batch=1, beta=20.0)
    mine, exact = inputs.leaves(), inputs.leaves(torch.float64)
    got, wanted = mine.read(), exact.read()
    weights = [torch.randn_like(part) for part in wanted]
    for one, other in zip(got, wanted):
        assert relative(one, other, 0.1) < 1e-5
    expected = gradients_of(exact, wanted, weights)
    for name, gradient in gradients_of(mine, got, weights).items():
        assert relative(gradient, expected[name], 0.1) < 1e-5, name


@pytest.mark.parametrize("kind", RECURRENT)
def test_the_state_is_small_and_opaque(kind):
    inputs = scan_call(kind, 50)
    _, state = inputs.read(return_state=True)
    assert isinstance(state, ScanState)
    entries = 2 * 2 * 3 * (6 if kind == "ssm" else 3)
    assert sum(part.numel() for part in state.memory.values()) == entries
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in state.memory.values()}
    assert sum(held.values()) == 4 * entries


@every_kind
@both_ways
def test_the_reference_backend_reads_the_same_and_keeps_no_state(kind, causal):
    inputs, mask = scan_call(kind, 9), torch.rand(2, 9) > 0.3
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0]).expand(2, -1)
    options = {"causal": causal, "key_mask": mask, "segment_ids": ids}
    for got, wanted in zip(inputs.read(backend="reference", **options), inputs.read(**options)):
        torch.testing.assert_close(got[mask], wanted[mask], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="keeps no state"):
        inputs.read(backend="reference", return_state=True)


@pytest.mark.parametrize("kind", RECURRENT)
@both_ways
@pytest.mark.parametrize("span", [4, 200])
def test_bfloat16_loses_no_more_than_its_own_rounding(kind, causal, span):
    inputs = scan_call(kind, 31, beta=2.0)
    inputs = inputs.set(v=torch.rand_like(inputs.arguments["v"]) * span / 2).map(lambda x: x.bfloat16())
    compare(inputs, limit=2**-7, causal=causal)
