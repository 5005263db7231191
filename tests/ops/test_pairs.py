"""Every scan reads a pair, the mean of some values and the free energy of others, as loops over the definition do."""

import pytest
import torch

from fem.functional import channel_scan_read, keyed_scan_read, ssm_read
from fem.ops.channel_scan.naive_channel_scan import naive_channel_scan_read
from fem.ops.linear_attention.naive_linear_attention import naive_linear_attention_read
from fem.ops.ssm.naive_ssm import naive_ssm_read

B, T, H, N = 2, 19, 2, 3
MASK = torch.tensor([[1] * T, [0, 0, 1, 1, 0] + [1] * (T - 5)])
IDS = torch.tensor([[0] * 7 + [1] * (T - 7), [0] * 12 + [5] * (T - 12)])
OPTIONS = {
    "plain": {},
    "documents": {"key_mask": MASK, "segment_ids": IDS},
    "both ways": {"causal": False, "key_mask": MASK},
}


def arguments(kind, d_v, d_f):
    """The arguments of a read in the order of its signature: those before v, and a decay after beta."""
    rand = lambda *shape: torch.rand(*shape, dtype=torch.float64)  # noqa: E731
    d = d_v + d_f
    if kind == "channel":
        return [rand(B, T, H, d) * 3], [-rand(B, T, H, d)]
    if kind == "ssm":
        return [rand(B, T, H, d), -rand(H, d, N), rand(B, T, N), rand(B, T, N), rand(H, d)], []
    return [rand(B, T, H, 3), rand(B, T, H, 3)], [{"head": -rand(B, T, H), "none": None}[kind]]


def of_channels(kind, before, after, part):
    """What belongs to some of the channels."""
    if kind == "channel":
        return [before[0][..., part]], [after[0][..., part]]
    if kind == "ssm":
        delta, a, b, c, d = before
        return [delta[..., part], a[:, part], b, c, d[:, part]], after
    return before, after


READS = {"channel": channel_scan_read, "ssm": ssm_read, "head": keyed_scan_read, "none": keyed_scan_read}
LOOPS = {
    "channel": naive_channel_scan_read,
    "ssm": naive_ssm_read,
    "head": naive_linear_attention_read,
    "none": naive_linear_attention_read,
}


def case(kind, d_v, d_f):
    torch.manual_seed(0)
    before, after = arguments(kind, d_v, d_f)
    v, f = (torch.randn(B, T, H, d, dtype=torch.float64) for d in (d_v, d_f))
    beta = torch.rand(H, d_f, dtype=torch.float64) + 0.5
    leaves = [x.requires_grad_() for x in (*before, *after, v, f, beta) if x is not None]
    return before, after, v, f, beta, leaves


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("d_v, d_f", [(3, 2), (0, 2), (3, 0)])
@pytest.mark.parametrize("kind", READS)
def test_a_pair_is_the_mean_of_one_and_the_free_energy_of_the_other(kind, d_v, d_f, options, as_users_run):
    before, after, v, f, beta, leaves = case(kind, d_v, d_f)
    read = READS[kind](*before, v, beta, *after, free_values=f, **OPTIONS[options])
    (one, decay), (other, decay_f) = (
        of_channels(kind, before, after, part) for part in (slice(0, d_v), slice(d_v, d_v + d_f))
    )
    mean = LOOPS[kind](*one, v, None, *decay, **OPTIONS[options]).mean if d_v else v
    free_energy = LOOPS[kind](*other, f, beta, *decay_f, **OPTIONS[options]).free_energy if d_f else f
    seen = MASK.bool() if "key_mask" in OPTIONS[options] else torch.ones(B, T, dtype=torch.bool)
    wanted, found = ([x[seen] for x in pair] for pair in ((mean, free_energy), read))
    weights = [torch.randn_like(x) for x in wanted]
    gradients = []
    for pair in (found, wanted):
        loss = sum((w * x).sum() for w, x in zip(weights, pair))
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    for one, other in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("d_v, d_f", [(3, 2), (0, 2), (3, 0)])
@pytest.mark.parametrize("kind", READS)
def test_a_pair_in_pieces_is_the_whole_and_its_state_holds_no_more(kind, d_v, d_f, as_users_run):
    before, after, v, f, beta, _ = case(kind, d_v, d_f)
    read = READS[kind]
    time = lambda x, piece: x[:, piece] if x is not None and x.shape[:2] == (B, T) else x  # noqa: E731
    whole, _ = read(*before, v, beta, *after, free_values=f, return_state=True)
    state, pieces = None, []
    for piece in (slice(0, 8), slice(8, 9), slice(9, 9), slice(9, T)):
        given = [time(x, piece) for x in (*before, v)]
        rest = [time(x, piece) for x in after]
        found, state = read(
            *given, beta, *rest, free_values=f[:, piece], initial_state=state, return_state=True
        )  # fmt: skip
        pieces.append(found)
    for one, *parts in zip(whole, *pieces):
        torch.testing.assert_close(torch.cat(parts, 1), one, rtol=1e-9, atol=1e-9)
    kept = {name.split(".")[-1] for name, x in state.memory.items() if x.numel()}
    assert ("free_energy" in kept) == (d_f > 0)


@pytest.mark.parametrize("kind", READS)
def test_free_values_of_another_shape_or_without_beta_are_refused(kind, as_users_run):
    before, after, v, f, beta, _ = case(kind, 3, 2)
    with pytest.raises(ValueError, match="free_values must have shape"):
        READS[kind](*before, v, beta, *after, free_values=f[:, :4])
    with pytest.raises(ValueError, match="beta must have shape"):
        READS[kind](*before, v, None, *after, free_values=f)
