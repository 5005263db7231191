"""One token's kernels in Triton's interpreter: `test_kernels.py` runs this file.

Errors are in units of the largest value: of a read beside its definition in float64, of gates and rotation beside
PyTorch's own operations, of maps beside their products in float64, of a scan token by token beside its definition in
float64, and of layers beside themselves in float64.
"""

import interpreted  # noqa: F401  (before any kernel)

# isort: split

import pytest
import torch
import torch.nn.functional as F
from dispatched import watched
from layers import FAMILIES, SPLIT, make_layer, streamed, tokens
from reads import KEYED, by_definition, documents_of, make, of_one_query, relative

from fem import FreeEnergyMixerConfig, functional
from fem.gates import TwoLevelGate
from fem.ops.channel_scan.channel_kernels import channels_by_kernels
from fem.ops.common import precision, rope, token_kernels
from fem.ops.common.read import Read, Terms
from fem.ops.common.row_maps import row_maps
from fem.ops.common.token_kernels import append_token, gated, rotated_tokens
from fem.ops.linear_attention import chunked, linear_token
from fem.ops.linear_attention.linear_log_space import LinearInputs, linear_step
from fem.ops.softmax import one_query_kernels, softmax_read
from fem.ops.ssm import mix_channels, mix_token, ssm_numbers, ssm_numbers_kernels
from fem.priors import linear_attention

torch.set_num_threads(1)
# float32's rounding; that of a score of 1,000 moves its weight; 16 bits keep 8 or 11 binary digits
LIMIT = 1e-6
OF_A_CARD = 2e-6  # what its exponentials, logarithms and reciprocals leave of gradients through several of them
LOOSE = {
    "scores of 1,000": 3e-5,
    "spans about a quarter of a nat": 2e-6,
    "bfloat16": 1e-2,
    "a bias of 16 bits": 1e-2,
    "float16": 1e-3,
    "weights of 60 nats": 5e-6,
}
READS = {
    "plain": {},
    "one key": {"time": 1},
    "several parts": {"time": 701},
    "several blocks of a part": {"time": 301, "NUMBERS": 256},
    "grouped heads": {"heads": 6},
    "a pair of widths": {"mean": 5, "free": 3, "shared": False},
    "no mean": {"mean": 0, "shared": False},
    "no free energy": {"free": 0, "shared": False},
    "a mask that hides all of one row": {"masked": True, "time": 301},
    "keys that do not exist, of NaN": {"masked": True, "time": 301, "hidden": torch.nan, "exist": True},
    "a last key that does not exist": {"masked": True, "hidden": 1e30, "exist": True, "last": False},
    "small beta, a last key that does not exist": {"beta": 1e-5, "masked": True, "hidden": 0.0, "last": False},
    "a mask that hides NaN": {"masked": True, "time": 301, "hidden": torch.nan},
    "keys of a pair that do not exist": {"masked": True, "hidden": torch.inf, "mean": 5, "free": 3, "shared": False},
    "a bias of each head": {"biased": True},
    "a bias of 16 bits": {"biased": True, "dtype": torch.bfloat16},
    "spans of 1,000 nats": {"scale_of_values": 400.0},
    "a spike": {"spike": 1e4, "time": 301},
    "a hidden spike": {"spike": 1e4, "masked": True, "time": 301},
    "small beta": {"beta": 1e-5},
    "small beta beside a spike of no weight": {"beta": 1e-5, "spike": 1e6, "lowered": -400.0},
    "small beta behind a spike of no weight": {"beta": 1e-5, "spike": 1e6, "lowered": -400.0, "time": 100},
    "spans about a quarter of a nat": {"beta": 0.06, "time": 301},
    "equal values": {"scale_of_values": 0.0},
    "scores of 1,000": {"scale_of_keys": 400.0},
    "keys that lie token by token": {"transposed": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}


def draw(
    time=37, heads=2, mean=7, free=7, shared=True, masked=False, biased=False, scale_of_values=1.0, spike=0.0,
    beta=None, scale_of_keys=1.0, transposed=False, dtype=torch.float32, lowered=0.0, hidden=None, last=True,
):  # fmt: skip
    """hidden: what keys and values hold that a query does not see."""
    torch.manual_seed(0)
    rows, kv_heads, width = 2, 2, 10

    def lie(d: int) -> torch.Tensor:
        shape = (rows, time, kv_heads, d) if transposed else (rows, kv_heads, time, d)
        return torch.randn(shape).transpose(1, 2) if transposed else torch.randn(shape)

    q, k, v = torch.randn(rows, heads, width), scale_of_keys * lie(width), 3.0 + scale_of_values * lie(mean)
    v[:, :, time // 3] += spike
    f = v if shared else scale_of_values * lie(free)
    rate = torch.rand(kv_heads, f.shape[-1]) + 0.5 if beta is None else torch.full((kv_heads, f.shape[-1]), beta)
    mask = torch.zeros(1, 1, time)
    if masked:
        mask = torch.where(torch.rand(rows, 1, time) < 0.5, -torch.inf, 0.0)
        mask[0], mask[1, :, time // 3] = -torch.inf, -torch.inf
    if biased:
        mask = torch.randn(1, heads, time)
    mask[..., time // 3] += lowered
    if not last:
        mask[..., -1] = -torch.inf
    if hidden is not None:
        k, v, f = (x.masked_fill(torch.isneginf(mask)[..., None], hidden) for x in (k, v, f))
        f = v if shared else f
    q, k, v, f = (x.to(dtype) for x in (q, k, v, f))
    return q, k, v, v if shared else f, rate, mask if masked or biased or lowered else None, width**-0.5, shared


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.double(), wanted.double()
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)).item() if wanted.numel() else 0.0


MARKS = {
    "a mask of keys": {"key_mask": True},
    "a mask and a bias": {"key_mask": True, "bias": True},
    "one bias for all": {"bias": True},
    "documents": {"segment_ids": True},
    "documents and a mask": {"segment_ids": True, "key_mask": True},
    "a window": {"window": 7},
    "a window and a mask": {"window": 7, "key_mask": True},
    "five queries": {"queries": 5},
    "five queries of all keys": {"queries": 5, "causal": False},
    "five queries in both directions and a mask": {"queries": 5, "causal": False, "key_mask": True},
    "five queries in both directions and a bias": {"queries": 5, "causal": False, "bias": True},
    "sixteen queries under a window": {"queries": 16, "window": 4},
    "five queries, a mask and a bias": {"queries": 5, "key_mask": True, "bias": True},
    "five queries of documents": {"queries": 5, "segment_ids": True, "key_mask": True},
    "a window of all keys and a mask": {"window": 61, "key_mask": True},
}
GATES = {
    "both gates": {},
    "split values": {"free_share": 0.5},
    "F only": {"use_temperature": False},
    "the mean only": {"use_lse": False, "use_temperature": False},
    "no outer gate": {"use_outer_gate": False},
    "slim gates": {"gate_rank": 4},
}
HALF = torch.bfloat16
ROTATIONS = [(torch.float32, at, LIMIT) for at in ([1000], [[5], [70000]], [3, 70000, 1], [[1, 9, 2], [4, 70000, 6]])]
ROTATIONS += [(HALF, [[5], [70000]], 1e-2)]
MAPS = (1, torch.float32, LIMIT), (17, torch.float32, LIMIT), (64, HALF, 1e-2), (5, torch.float16, 1e-3)


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_cache(name, monkeypatch):
    case = READS[name]
    monkeypatch.setattr(one_query_kernels, "NUMBERS", case.get("NUMBERS", 1024))
    inputs = draw(**{name: value for name, value in case.items() if name not in ("NUMBERS", "exist")})
    mask = inputs[5] == 0 if case.get("exist") else inputs[5]
    found = one_query_kernels.read_one_query(*inputs[:5], mask, *inputs[6:])
    assert all(x.dtype == inputs[0].dtype for x in found)
    assert max(map(far, found, of_one_query(*inputs[:-1]))) < LOOSE.get(name, LIMIT)


@pytest.mark.parametrize("case", MARKS)
def test_marks_of_one_query_a_row_or_of_several_of_one_row(case, monkeypatch):
    """They tell which keys a query sees; what a mask hides is NaN."""
    monkeypatch.setattr(softmax_read, "_has_kernels", lambda q: True)
    rules = MARKS[case]
    q, k, v, _, rate, *_ = draw(time=61, heads=4)
    q, k, v = q[:, None], k.transpose(1, 2), v.transpose(1, 2)
    bias = torch.randn(2, 4, 1, 61).masked_fill(torch.rand(2, 1, 1, 61) < 0.3, -torch.inf)
    keep, document = torch.rand(2, 61) < 0.6, torch.arange(61).expand(2, -1) // 23
    keep[0, -1], keep[1, -1] = False, True
    if queries := rules.get("queries"):
        q, k, v, keep, document, bias = torch.randn(1, queries, 4, 10), *(x[:1] for x in (k, v, keep, document, bias))
    if rules.get("key_mask"):
        k, v = (x.masked_fill(~keep[..., None, None], torch.nan) for x in (k, v))
    else:
        bias = bias[0, 0, 0]  # one for all
    marks = {"key_mask": keep, "bias": bias, "segment_ids": document, "window": rules.get("window")}
    how = {name: marks.get(name, value) for name, value in rules.items() if name != "queries"}
    found, wanted = (functional.softmax_read(q, k, v, rate, **how, backend=x) for x in ("auto", "reference"))
    assert max(map(far, found, wanted)) < LIMIT


@pytest.mark.parametrize("case", GATES)
def test_gates_and_their_first_and_second_derivatives(case):
    config = FreeEnergyMixerConfig.matched(n_embd=24, n_head=3, use_conv=False, **GATES[case])
    gate, x = TwoLevelGate(config), 10.0 * torch.randn(2, 5, 24)
    split = config.free_share is not None
    mean = torch.randn(2, 5, 3, config.value_width - (config.free_width if split else 0))
    read = Read(mean, torch.randn(2, 5, 3, config.free_width) if config.use_lse else None)
    leaves = [x.requires_grad_() for x in (*read, *gate.parameters()) if x is not None]
    logits = [None if part is None else part(x) for part in (gate.inner, gate.outer)]
    results = []
    columns = [None if x is None else F.pad(x, (1, 2))[..., 1:-2] for x in logits]  # as those of a product
    for o in (gated(gate._mixed, *read, *columns, split, config.eps), gate(x, read)):
        loss = o.pow(3).sum() / 1e3
        known = [
            torch.autograd.grad(loss, leaves, create_graph=more, retain_graph=True, materialize_grads=True)
            for more in (False, True)
        ]
        again = torch.autograd.grad(sum(d.square().sum() for d in known[1]), leaves, materialize_grads=True)
        results.append([o.detach(), *known[0], *(d.detach() for d in known[1]), *again])
    with torch.no_grad():
        results[0][0] = torch.stack([results[0][0], gated(gate._mixed, *read, *logits, split, config.eps)])
        results[1][0] = torch.stack([results[1][0], results[1][0]])
    assert max(map(far, *results)) < OF_A_CARD


@pytest.mark.parametrize("dtype, position, limit", ROTATIONS)
def test_rotation(dtype, position, limit):
    """Of columns of a product, and of heads that lie first."""
    place = torch.tensor(position)
    q = torch.randn(2, place.shape[-1], 99).to(dtype)[..., 7:67].unflatten(-1, (6, 10))
    k = torch.randn(2, 2, place.shape[-1], 10).to(dtype).transpose(1, 2)
    turn = place, rope.frequencies(10, 1e4, q.device), 1.3
    assert max(map(far, rotated_tokens((q, k), *turn), rope.rotate_all((q, k), *turn))) < limit


@pytest.mark.parametrize("lie", [lambda x: x, lambda x: torch.cat([x, x], -1).chunk(2, -1)[0]], ids=["whole", "parts"])
def test_key_and_value_of_a_token_in_a_cache_with_more_room(lie):
    """Which keeps what it holds elsewhere."""
    wide, caches = [torch.randn(2, 1, 3, d) for d in (10, 7)], [torch.randn(2, 3, 9, d) for d in (10, 7)]
    tokens, wanted = [lie(x).transpose(1, 2) for x in wide], [x.clone() for x in caches]
    append_token(*tokens, *(x.narrow(2, 4, 1) for x in caches))
    for cache, x in zip(wanted, tokens):
        cache[:, :, 4:5] = x
    assert max(map(far, caches, wanted)) < LIMIT


@pytest.mark.parametrize("rows, dtype, limit", MAPS)
def test_maps(rows, dtype, limit):
    """Of unlike widths: of a whole input, its start and its end; as one matrix or two; with a bias or without;
    of inputs that lie among others, and weights that are rows of a larger one."""
    x, weight = torch.randn(rows, 3, 333).to(dtype)[:, 1:2, :300], torch.randn(900, 300).to(dtype)
    inputs, full = [x, x, x[..., 280:], x, x], lambda *shape: torch.randn(shape).to(dtype)
    weights = [weight[:16], full(816, 280), full(1, 20), weight[20:28], weight[30:46]]
    ups, biases = [None, None, None, full(50, 8), full(7, 16)], [None, full(816), full(1), full(50), None]
    wanted = []
    for x, w, up, bias in zip(inputs, weights, ups, biases):
        y = x[..., : w.shape[1]].double() @ w.double().T
        y = y if up is None else y.to(dtype).double() @ up.double().T
        wanted.append(y if bias is None else y + bias)
    assert max(map(far, row_maps(inputs, weights, ups, biases), wanted)) < limit


KERNELS = {
    "linear_token": linear_token,
    "numbers_by_kernels": ssm_numbers_kernels,
    "mix_token": mix_token,
    "rotated_tokens": token_kernels,
    "launch_softplus": token_kernels,
}
CASES = {
    "one by one": {},
    "documents": {"documents": True},
    "masks, also of the first tokens": {"masked": True},
    "documents and masks": {"documents": True, "masked": True},
    "behind a chunk": {"pieces": [9, 1, 1]},
    "odd widths": {"width": 7, "keys": 5, "rank": 3},
    "a pair of widths": {"free": 2},
    "a spike": {"spike": 300.0},
    "spans of 1,000 nats": {"spread": 400.0},
    "small beta": {"beta": 1e-4},
    "equal values": {"spread": 0.0},
    "weights of 60 nats": {"weights": 60.0},
    "decays of 60 nats": {"decay": 60.0},
    "first tokens of no weight": {"weightless": True},
    "bfloat16": {"dtype": torch.bfloat16},
}
OF_GLA = "one by one", "documents and masks", "small beta"  # as "gla" with a decay for each key channel takes all


@pytest.fixture
def scans_by_kernels(monkeypatch):
    """Kernels read float32 on a CPU, too."""
    taken = lambda *given, differentiable=False: all(x is None or x.dtype == torch.float32 for x in given)  # noqa: E731
    for module in (chunked, ssm_numbers, mix_channels, linear_attention, precision):
        monkeypatch.setattr(module, "by_kernels", taken)


def drawn(name: str, documents=False, masked=False, weightless=False, spike=0.0, pieces=None, **sizes):
    """A call, its marks, the tokens of its documents, and how many tokens are read at a time."""
    time = 7 if pieces is None else sum(pieces)
    call, marks = make(name, time, **sizes).spiked(spike, time // 3), {}
    if weightless:
        for weight, nothing in (("log_weight", -torch.inf), ("k", 0.0), ("B", 0.0)):
            if call.arguments.get(weight) is not None:
                call.arguments[weight][:, :2] = nothing
    mask, ids = torch.ones(1, time, dtype=torch.bool), torch.zeros(1, time, dtype=torch.long)
    if masked:
        mask[0, :2] = mask[0, 4] = False
        marks["key_mask"] = mask
    if documents:
        ids[0, 2:], ids[0, 5:] = 1, 2
        marks["segment_ids"] = ids
    return call, marks, documents_of(mask[0], ids[0]), pieces or [1] * time


@pytest.mark.parametrize("name, case", [(n, case) for n in KEYED for case in (OF_GLA if n == "gla" else CASES)])
@torch.no_grad()
def test_a_scan_token_by_token(name, case, scans_by_kernels):
    call, marks, parts, pieces = drawn(name, **CASES[case])
    wanted, found = by_definition(call.map(torch.Tensor.double), parts), call.in_pieces(*pieces, **marks)
    error = max(relative(got[:, torch.cat(parts)], right, least=1.0) for got, right in zip(found, wanted))
    assert error < LOOSE.get(case, LIMIT)
    assert "key_mask" not in marks or not any(part[:, :2].any() for part in found)  # where nothing is seen yet


LAYERS = {name: fields for name, fields in FAMILIES.items() if not name.startswith(("softmax", "rnn"))}
LAYERS |= {f"{name} split": {"prior_type": name} | SPLIT for name in ("gla", "mamba")}
LAYERS["mamba_interactive of small beta"] = {"prior_type": "mamba_interactive", "beta_max_init": -9.0}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_token_by_token(name, scans_by_kernels):
    found = []
    for dtype in (torch.float64, torch.float32):
        layer, x = make_layer(torch.float32, **LAYERS[name]).to(dtype), tokens(time=5).float()
        found.append(streamed(layer, x.to(dtype), [1] * 5)[0])
    assert relative(found[1], found[0]) < LIMIT


@torch.no_grad()
def test_no_kernel_of_a_scans_token_is_left_out(monkeypatch, scans_by_kernels):
    calls = [watched(monkeypatch, module, name) for name, module in KERNELS.items()]
    for prior in ("gla", "mamba", "mamba_interactive"):
        streamed(make_layer(torch.float32, prior_type=prior), tokens(time=2).float(), [1, 1])
    assert all(calls)


def test_inputs_of_16_bits_are_read_as_the_same_numbers_in_float32():
    """Of linear attention, whose read is in bfloat16 too, and of channels, whose read is not."""
    q, k, v, f = (torch.rand(2, 1, 3, width).bfloat16() for width in (4, 4, 5, 6))
    g, beta = -torch.rand(2, 1, 3, 1), torch.rand(3, 6) + 0.5
    memory = Terms(*(torch.randn(2, 3, 4, width) for width in (1, 5, 6)))
    found = linear_token.linear_token(memory, LinearInputs(q, k, g, None, v, f, beta))
    wanted = linear_step(memory, LinearInputs(q.float(), k.float(), g, None, v.float(), f.float(), beta))
    assert found[0].mean.dtype == found[0].free_energy.dtype == v.dtype
    pairs = [pair for one, other in zip(found, wanted) for pair in zip(one, other)]

    memory, inputs = Terms(*torch.randn(3, 2, 1, 6)), [torch.randn(2, 1, 6).bfloat16() for _ in "xavf"]
    found = channels_by_kernels(memory, *inputs, beta[0])[0]
    pairs += zip(found, channels_by_kernels(memory, *(x.float() for x in inputs), beta[0])[0])
    assert found.mean.dtype == found.log_weight.dtype == torch.float32
    assert max(relative(*pair) for pair in pairs) < 1e-2


def test_logarithms_of_the_numbers_of_an_ssm(scans_by_kernels):
    """Of logits so low that softplus(.) itself is next to nothing, too."""
    logits, a = torch.linspace(-90, 30, 24).view(2, 1, 3, 4), torch.randn(3, 4, 5)
    _, logs = ssm_numbers.ssm_numbers(logits, a, *torch.randn(2, 2, 1, 5), a[..., 0])
    assert relative(logs[0], F.softplus(logits.double()).log()) < LIMIT


def test_gradients_of_the_logits_of_an_ssm(scans_by_kernels):
    """Without some of the numbers and logarithms, beside PyTorch's own in float64."""
    shapes = (2, 3, 2, 4), (2, 4, 5), (2, 3, 5), (2, 3, 5), (2, 4)
    logits, found = [20 * torch.randn(shape) for shape in shapes], []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in logits]
        columns = [F.pad(x.flatten(2), (0, 3))[..., :-3] for x in leaves[:1] + leaves[2:4]]  # as those of a product
        delta = columns[0].unflatten(-1, leaves[0].shape[2:])
        numbers, logs = ssm_numbers.ssm_numbers(delta, leaves[1], *columns[1:], leaves[4])
        loss = sum((n + 1) * (x * x.detach().cos()).sum() for n, x in enumerate((*numbers[:2], numbers[4], *logs)))
        found.append(torch.autograd.grad(loss, leaves))
    assert max(relative(*pair) for pair in zip(*found)) < OF_A_CARD
