"""What every public read owes its arguments: any memory layout, and inputs that are computed from each other."""

import pytest
import torch
from torch import Tensor

from fem.functional import channel_scan_read, decay_scan, keyed_scan_read, softmax_read, ssm_read

TIME, HEADS = 9, 2

LAYOUTS = {
    "time innermost": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "axes reversed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "one channel expanded": lambda x: x[..., :1].expand(x.shape),
    "one token expanded": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (1,) * x.dim()),
}
KEEPS_VALUES = list(LAYOUTS)[:4]


def normal(*shape: int) -> Tensor:
    return torch.randn(1, TIME, *shape)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def softmax(key: int, value: int, **how):
    tensors = [normal(HEADS, key), normal(HEADS, key), normal(HEADS, value), positive(HEADS, value)]
    return tensors, lambda *x: softmax_read(*x, **how)


def keyed(*decay: int):
    features = [positive(1, TIME, HEADS, 3) for _ in range(2)]
    tensors = [*features, normal(HEADS, 4), positive(HEADS, 4), *([-positive(1, TIME, *decay)] if decay else [])]
    return tensors, keyed_scan_read


def channel():
    tensors = [normal(HEADS, 4), normal(HEADS, 4), positive(HEADS, 4), -positive(1, TIME, HEADS, 4)]
    return tensors, channel_scan_read


def ssm():
    delta, b, c = positive(1, TIME, HEADS, 4), positive(1, TIME, 2), positive(1, TIME, 2)
    return [delta, -positive(HEADS, 4, 2), b, c, positive(HEADS, 4), normal(HEADS, 4), positive(HEADS, 4)], ssm_read


def attention(**how):
    (q, k, v, _), _ = softmax(8, 8)
    return [q, k, v], lambda *x: (softmax_read(*x, None, **how).mean,)


CALLS = {
    "softmax": lambda: softmax(8, 4),
    "softmax, wide values": lambda: softmax(4, 8),
    "softmax, narrow values": lambda: softmax(16, 4),
    "softmax, window": lambda: softmax(8, 4, window=3),
    "softmax, one query": lambda: (lambda tensors, read: ([tensors[0][:, -1:], *tensors[1:]], read))(*softmax(8, 4)),
    "softmax, plain": lambda: softmax(8, 4, backend="plain"),
    "attention": attention,
    "attention both ways": lambda: attention(causal=False),
    "linear": keyed,
    "gla": lambda: keyed(HEADS),
    "gla by channel": lambda: keyed(HEADS, 3),
    "channel scan": channel,
    "ssm": ssm,
    "decay scan": lambda: ([-positive(1, TIME, 5), normal(5)], lambda *x: (decay_scan(*x),)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_the_memory_layout_of_an_argument_changes_nothing(call, layout):
    tensors, read = CALLS[call]()
    laid = [LAYOUTS[layout](x).detach() if x.dim() > 2 else x for x in tensors]
    results = []
    for inputs in (laid, [x.clone(memory_format=torch.contiguous_format) for x in laid]):
        with torch.no_grad():
            parts = [*read(*inputs)]
        leaves = [x.requires_grad_() for x in inputs]
        out = read(*leaves)
        cotangents = [LAYOUTS[layout](torch.arange(y.numel()).sin().view(y.shape)) for y in out]
        results.append([*parts, *out, *torch.autograd.grad(list(out), leaves, cotangents)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def from_one(build):
    """A read whose tensor inputs are all computed from one, x (1, T, H, 4)."""
    return lambda x, beta: build(x, torch.nn.functional.softplus(x), beta)


SHARED = {
    "k and v from q": from_one(lambda x, _, beta: softmax_read(x, x.sin(), x.cos(), beta)),
    "bias from q": from_one(lambda x, _, beta: softmax_read(x, x, x, beta, bias=x[..., 0].transpose(1, 2)[:, :, None])),
    "q = k": from_one(lambda x, w, beta: keyed_scan_read(w, w, x, beta)),
    "decay from v": from_one(lambda x, w, beta: keyed_scan_read(w, w, x, beta, -w)),
    "weight and decay from v": from_one(lambda x, w, beta: channel_scan_read(x, x, beta, -w)),
    "B = C": from_one(lambda x, w, beta: ssm_read(w, -beta[..., None], w[..., 0, :1], w[..., 0, :1], beta, x, beta)),
}


@pytest.mark.parametrize("call", SHARED)
def test_create_graph_does_not_change_a_first_gradient_of_shared_inputs(call):
    x, beta = normal(HEADS, 4).double().requires_grad_(), positive(HEADS, 4).double().requires_grad_()
    loss = lambda: sum(part.sin().sum() for part in SHARED[call](x, beta))  # noqa: E731
    wanted = torch.autograd.grad(loss(), (x, beta))
    for got, want in zip(torch.autograd.grad(loss(), (x, beta), create_graph=True), wanted):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("call", ["linear", "gla", "gla by channel", "channel scan", "ssm"])
def test_one_input_in_float64_is_read_in_float64(call, causal):
    """Each in turn, the others in float32, of which the read has the dtype of v."""
    tensors, read = CALLS[call]()
    wanted = read(*(x.double() for x in tensors), causal=causal)
    for n in range(len(tensors)):
        mixed = [x.double() if n == place else x for place, x in enumerate(tensors)]
        for got, part in zip(read(*mixed, causal=causal), wanted):
            torch.testing.assert_close(got.double(), part, rtol=1e-5, atol=1e-5)


def test_features_of_float64_may_leave_float32():
    q, v = torch.full((1, 3, 1, 1), 1e50, dtype=torch.float64), torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)
    read, state = keyed_scan_read(q, q, v, torch.ones(1, 1), return_state=True)
    torch.testing.assert_close(read.mean.flatten(), torch.tensor([1.0, 2.0, 4.0]))
    more = keyed_scan_read(q, q, v, torch.ones(1, 1), initial_state=state).mean
    torch.testing.assert_close(more.flatten(), torch.tensor([13 / 4, 16 / 5, 4.0]))
