"""One token's kernels in Triton's interpreter, but those of a scan: `scan_token_in_triton.py` runs all.

The largest error of each case in units of the largest value: of a read beside its definition in float64, of gates and
rotation beside PyTorch's own operations, of maps beside their products in float64.
"""

import interpreted  # noqa: F401  (before any kernel)
import torch
import torch.nn.functional as F
from reads import of_one_query

from fem import FreeEnergyMixerConfig, functional
from fem.gates import TwoLevelGate
from fem.ops.common import rope
from fem.ops.common.read import Read
from fem.ops.common.row_maps import row_maps
from fem.ops.common.token_kernels import append_token, gated, rotated_token
from fem.ops.softmax import one_query_kernels, softmax_read

torch.set_num_threads(1)
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


def of_read(case: dict) -> float:
    one_query_kernels.NUMBERS = case.get("NUMBERS", 1024)
    inputs = draw(**{name: value for name, value in case.items() if name not in ("NUMBERS", "exist")})
    mask = inputs[5] == 0 if case.get("exist") else inputs[5]
    found = one_query_kernels.read_one_query(*inputs[:5], mask, *inputs[6:])
    assert all(x.dtype == inputs[0].dtype for x in found)
    return max(map(far, found, of_one_query(*inputs[:-1])))


def of_marks(rules: dict) -> float:
    """Of one query a row, or of several of one row, with what tells which keys they see; what a mask hides is NaN."""
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
    return max(map(far, found, wanted))


def of_gates(fields: dict) -> float:
    """Of the output, and of its first and second derivatives."""
    torch.manual_seed(0)
    config = FreeEnergyMixerConfig.matched(n_embd=24, n_head=3, use_conv=False, **fields)
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
    return max(map(far, *results))


def of_rotation(dtype: torch.dtype, position: list) -> float:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 1, heads, 10).to(dtype) for heads in (6, 2))
    turn = torch.tensor(position), rope.frequencies(10, 1e4, q.device), 1.3
    return max(map(far, rotated_token((q, k), *turn), rope.rotate_all((q, k), *turn)))


def of_cache(lie) -> float:
    """Key and value of a token in a cache with more room, which keeps what it holds elsewhere."""
    torch.manual_seed(0)
    wide, caches = [torch.randn(2, 1, 3, d) for d in (10, 7)], [torch.randn(2, 3, 9, d) for d in (10, 7)]
    tokens, wanted = [lie(x).transpose(1, 2) for x in wide], [x.clone() for x in caches]
    append_token(*tokens, *(x.narrow(2, 4, 1) for x in caches))
    for cache, x in zip(wanted, tokens):
        cache[:, :, 4:5] = x
    return max(map(far, caches, wanted))


def of_maps(rows: int, dtype: torch.dtype) -> float:
    """Of maps of unlike widths: of a whole input, its start and its end; as one matrix or two; with a bias or without;
    of inputs that lie among others, and weights that are rows of a larger one."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 3, 333).to(dtype)[:, 1:2, :300], torch.randn(900, 300).to(dtype)
    inputs, full = [x, x, x[..., 280:], x, x], lambda *shape: torch.randn(shape).to(dtype)
    weights = [weight[:16], full(816, 280), full(1, 20), weight[20:28], weight[30:46]]
    ups, biases = [None, None, None, full(50, 8), full(7, 16)], [None, full(816), full(1), full(50), None]
    wanted = []
    for x, w, up, bias in zip(inputs, weights, ups, biases):
        y = x[..., : w.shape[1]].double() @ w.double().T
        y = y if up is None else y.to(dtype).double() @ up.double().T
        wanted.append(y if bias is None else y + bias)
    return max(map(far, row_maps(inputs, weights, ups, biases), wanted))


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
ROTATIONS = {
    "one position": (torch.float32, [1000]),
    "a position of each row": (torch.float32, [[5], [70000]]),
    "rotation in bfloat16": (torch.bfloat16, [[5], [70000]]),
}

MAPS = {
    "of 1 row": (1, torch.float32),
    "of 17 rows": (17, torch.float32),
    "of 64 rows: bfloat16": (64, torch.bfloat16),
    "of 5 rows: float16": (5, torch.float16),
}


def errors() -> dict[str, float]:
    errors = {name: of_read(case) for name, case in READS.items()}
    softmax_read._has_kernels = lambda q: True
    errors |= {name: of_marks(rules) for name, rules in MARKS.items()}
    errors |= {name: of_gates(fields) for name, fields in GATES.items()}
    errors |= {name: of_rotation(*turn) for name, turn in ROTATIONS.items()}
    errors |= {f"maps {name}": of_maps(*case) for name, case in MAPS.items()}
    errors |= {
        "a token's cache": of_cache(lambda x: x),
        "of parts": of_cache(lambda x: torch.cat([x, x], -1).chunk(2, -1)[0]),
    }
    return errors
