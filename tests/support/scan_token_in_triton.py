"""One token by kernels in Triton's interpreter.

Prints the largest error of each case in units of the largest value: those of `token_in_triton.py`, of reads of a scan
token by token beside their definition in float64, and of layers beside themselves in float64.
"""

import json

import interpreted  # noqa: F401  (before any kernel)
import token_in_triton
import torch
import torch.nn.functional as F
from layers import FAMILIES, SPLIT, make_layer, streamed, tokens
from reads import KEYED, by_definition, documents_of, make, relative

from fem.ops.channel_scan.channel_kernels import channels_by_kernels
from fem.ops.common import precision, token_kernels
from fem.ops.common.read import Terms
from fem.ops.linear_attention import chunked, linear_token
from fem.ops.linear_attention.linear_log_space import LinearInputs, linear_step
from fem.ops.ssm import mix_channels, mix_token, ssm_numbers, ssm_numbers_kernels
from fem.priors import linear_attention

torch.set_num_threads(1)
KERNELS = {
    "linear_token": linear_token,
    "numbers_by_kernels": ssm_numbers_kernels,
    "mix_token": mix_token,
    "rotated_token": token_kernels,
    "launch_softplus": token_kernels,
}
taken = []  # the kernels that ran
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


def by_kernels(*given: torch.Tensor | None, differentiable: bool = False) -> bool:
    return all(x is None or x.dtype == torch.float32 for x in given)


def counted(module, name: str) -> None:
    """Make the module's function say that it ran."""
    function = getattr(module, name)
    setattr(module, name, lambda *inputs: taken.append(name) or function(*inputs))


def error(name: str, documents=False, masked=False, weightless=False, spike=0.0, pieces=None, **sizes) -> float:
    torch.manual_seed(0)
    time = 7 if pieces is None else sum(pieces)
    call, marks = make(name, time, **sizes), {}
    call.arguments["v"][:, time // 3] += spike
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
    parts = documents_of(mask[0], ids[0])
    wanted = by_definition(call.map(torch.Tensor.double), parts)
    found = call.in_pieces(*(pieces or [1] * time), **marks)
    if masked and any(part[:, :2].any() for part in found):
        return torch.inf  # where nothing is seen yet, 0 is read
    return max(relative(got[:, torch.cat(parts)], right, least=1.0) for got, right in zip(found, wanted))


def of_layer(**fields) -> float:
    found = []
    for dtype in (torch.float64, torch.float32):
        layer, x = make_layer(torch.float32, **fields).to(dtype), tokens(time=5).float()
        found.append(streamed(layer, x.to(dtype), [1] * 5)[0])
    return relative(found[1], found[0])


def of_16_bits() -> float:
    """Inputs in bfloat16 beside the same numbers in float32: of linear attention, whose read is in bfloat16 too, and
    of channels, whose read is not."""
    torch.manual_seed(0)
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
    return max(relative(*pair) for pair in pairs)


def of_numbers() -> float:
    """Logarithms of an SSM's numbers, of logits so low that softplus(.) itself is next to nothing, too."""
    logits, a = torch.linspace(-90, 30, 24).view(2, 1, 3, 4), torch.randn(3, 4, 5)
    _, logs = ssm_numbers.ssm_numbers(logits, a, *torch.randn(2, 2, 1, 5), a[..., 0])
    return relative(logs[0], F.softplus(logits.double()).log())


def gradient_of_numbers() -> float:
    """Gradients of an SSM's logits, without some of the numbers and logarithms, beside PyTorch's own in float64."""
    torch.manual_seed(0)
    shapes = (2, 3, 2, 4), (2, 4, 5), (2, 3, 5), (2, 3, 5), (2, 4)
    logits, found = [20 * torch.randn(shape) for shape in shapes], []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in logits]
        columns = [F.pad(x.flatten(2), (0, 3))[..., :-3] for x in leaves[:1] + leaves[2:4]]  # as those of a product
        delta = columns[0].unflatten(-1, leaves[0].shape[2:])
        numbers, logs = ssm_numbers.ssm_numbers(delta, leaves[1], *columns[1:], leaves[4])
        loss = sum((n + 1) * (x * x.detach().cos()).sum() for n, x in enumerate((*numbers[:2], numbers[4], *logs)))
        found.append(torch.autograd.grad(loss, leaves))
    return max(relative(*pair) for pair in zip(*found))


if __name__ == "__main__":
    errors = token_in_triton.errors()
    for module in (chunked, ssm_numbers, mix_channels, linear_attention, precision):
        module.by_kernels = by_kernels
    for name, module in KERNELS.items():
        counted(module, name)
    with torch.no_grad():
        for name in KEYED:
            errors |= {f"{name}: {what}": error(name, **CASES[what]) for what in (OF_GLA if name == "gla" else CASES)}
        families = {name: fields for name, fields in FAMILIES.items() if not name.startswith(("softmax", "rnn"))}
        others = {f"{name} split": {"prior_type": name} | SPLIT for name in ("gla", "mamba")}
        others["mamba_interactive of small beta"] = {"prior_type": "mamba_interactive", "beta_max_init": -9.0}
        for name, fields in (families | others).items():
            errors[f"layer of {name}"] = of_layer(**fields)
    errors["one token: bfloat16"] = of_16_bits()
    errors["logarithms of an SSM's numbers"] = of_numbers()
    errors["gradients of an SSM's numbers"] = gradient_of_numbers()
    assert set(taken) == KERNELS.keys()
    print(json.dumps(errors))
