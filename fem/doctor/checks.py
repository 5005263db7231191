"""The checks on a device: each function yields the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.call import Call
from fem.functional import softmax_read
from fem.fused_layer import fits

Row = dict[str, Any]


def outcome(what: str, run: Callable[[], str | None], **more: Any) -> Row:
    """A row of a table, whose result is "ok", what `run` returns as wrong, or the exception that it raised."""
    try:
        result = run() or "ok"
    except Exception as error:  # whatever happens, the next check must run
        result = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return {"check": what, **more, "result": result}


def apart(tensors: list[Tensor], wanted: list[Tensor], limit: float = 1e-3, least: float = 1e-3) -> str | None:
    """None where every tensor equals the one that is wanted, to `limit` of its norm, which counts as `least` or more;
    else by how much one is off."""
    errors = [
        (a.double().cpu() - b.double().cpu()).norm() / b.norm().cpu().clamp_min(least) for a, b in zip(tensors, wanted)
    ]
    worst = torch.stack(errors).max().item()  # NaN, where one is, which Python's max may pass over
    return None if worst <= limit else f"off by {worst:.2g} of the norm"


def trained(layer: FreeEnergyMixer, x: Tensor, run: Callable | None = None) -> list[Tensor]:
    """The output of the layer, or of `run`, and every gradient of the layer's parameters."""
    y = (layer if run is None else run)(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()), materialize_grads=True)]


def _exact(layer: FreeEnergyMixer) -> FreeEnergyMixer:
    """The same layer in float64 on the CPU."""
    exact = FreeEnergyMixer(replace(layer.config, backend="plain")).double()
    exact.load_state_dict(layer.state_dict())
    return exact


def scans(device: torch.device, prior: str) -> Iterator[Row]:
    """A layer of a prior that scans, outputs and gradients, against the same layer in float64 on the CPU.

    flash-linear-attention's kernels multiply float32 inputs in TF32, so their limit is bfloat16's. In bfloat16 features
    of `linear` near ReLU's kink fall on its other side: gradients of the query are off by 8 %, in the plain form, too.
    """
    products = device.type == "cuda" and prior in ("linear", "gla")
    rounded = 1e-1 if prior == "linear" else 5e-2
    for fields in [{"decay": "head"}, {"decay": "channel"}] if prior == "gla" else [{}]:
        config = FreeEnergyMixerConfig(n_embd=64, n_head=2, prior_type=prior, **fields)
        name = ", ".join([prior, *fields.values()])
        for dtype, limit in ((torch.float32, 5e-2 if products else 1e-3), (torch.bfloat16, rounded)):
            layer, x = built(config, device, dtype)
            yield outcome(name, partial(_against_float64, layer, x, limit), dtype=str(dtype)[6:])
            ids = torch.arange(x.shape[1]).div(50, rounding_mode="floor").expand(len(x), -1)
            packed = partial(_against_float64, layer, x, limit, segment_ids=ids)
            yield outcome(f"{name}, documents", packed, dtype=str(dtype)[6:])
            if device.type == "cuda" and not _waits(layer, x):
                yield outcome(f"{name}, captured train step", partial(_captured, layer, x), dtype=str(dtype)[6:])
        run = partial(_token_by_token, *built(config, device))
        yield outcome(f"{name}, token by token", run, dtype="float32")


def _waits(layer: FreeEnergyMixer, x: Tensor) -> bool:
    """Whether a train step waits for the host to see a proof, which no CUDA graph holds."""
    if layer.config.prior_type not in ("linear", "gla"):
        return False
    return not fits(layer, Call.open(layer, x, None, None, None, False))


def built(config, device, dtype: torch.dtype = torch.float32) -> tuple[FreeEnergyMixer, Tensor]:
    """A layer and its input; on a GPU rows so long that kernels cut them."""
    torch.manual_seed(0)
    x = torch.randn(2, 520 if device.type == "cuda" else 130, config.n_embd)
    return FreeEnergyMixer(config).to(device, dtype), x.to(device, dtype)


def _against_float64(
    layer: FreeEnergyMixer, x: Tensor, limit: float, least: float = 1e-3, **marks: Tensor
) -> str | None:
    """Output and gradients; a tensor's error counts by its norm, or `least` of the largest norm where that is more."""
    exact, here = _exact(layer), {name: mark.to(x.device) for name, mark in marks.items()}
    wanted = trained(exact, x.double().cpu(), partial(exact, **marks))
    return apart(
        trained(layer, x, partial(layer, **here)), wanted, limit, least * max(part.norm() for part in wanted).item()
    )


def softmax(device: torch.device) -> Iterator[Row]:
    """The softmax read against the plain form in float64, outputs and gradients: every pair of dtype, length and width.
    F must repeat bit for bit; gradients need not, as flash attention adds them up by atomics."""
    gpu = device.type == "cuda"
    lengths, widths = ((1, 127, 129, 2049), (64, 128, 256)) if gpu else ((1, 129), (16,))
    several = 513 if gpu else 129  # tokens: five blocks of 128, of which no two see the same
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        plain = [(time, widths[(number + index) % len(widths)], "plain") for index, time in enumerate(lengths)]
        others = [(several, widths[0], what) for what in ("window", "documents", "mask", "bias", "spike")]
        for time, width, what in [*plain, (129, 208 if gpu else widths[0], "grouped"), *others]:
            run = partial(_softmax, device, dtype, time, width, what)
            yield outcome(f"softmax {what}", run, dtype=str(dtype)[6:], tokens=time, width=width)


def _softmax(device, dtype, time: int, width: int, what: str) -> str | None:
    random = torch.Generator().manual_seed(0)
    heads, groups = 4, 4 if what == "grouped" else 1
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu")  # noqa: E731
    inputs = {"q": draw(1, time, heads, width), "k": draw(1, time, heads // groups, width)}
    inputs["v"] = draw(1, time, heads // groups, width // 2)
    if what == "spike":
        inputs["v"][:, time // 3] = 40.0
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs["beta"] = torch.full((heads // groups, width // 2), 1.95)
    place = torch.arange(time)
    options: dict[str, Any] = {
        "window": {"window": 50},
        "documents": {"segment_ids": (place // 40)[None]},
        "mask": {"key_mask": (place % 7 != 3)[None]},
        "bias": {"bias": -0.1 * (place[:, None] - place).abs()[None, None].float()},
    }.get(what, {})

    def run(device, in_float64: bool, backend: str) -> list[Tensor]:
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x  # noqa: E731
        leaves = [(x.double() if in_float64 else x).to(device).requires_grad_() for x in inputs.values()]
        moved = {name: move(x.double() if in_float64 and name == "bias" else x) for name, x in options.items()}
        read = softmax_read(*leaves, **moved, backend=backend)
        return [*read, *torch.autograd.grad(sum(x.double().sum() for x in read), leaves)]

    got, again = run(device, False, "auto"), run(device, False, "auto")
    if not torch.equal(got[1], again[1]):
        return "the free energies of two runs differ"
    limit = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}[dtype]
    return apart(got, run("cpu", True, "plain"), limit, least=1.0)  # of one token dq is 0


FUSED = {
    "full gates": {},
    "slim gates": {"gate_rank": 40},
    "split values": {"gate_rank": 16, "free_share": 0.5},
    "grouped heads": {"n_kv_head": 2},
    "conditioner": {"use_conv": True},
    "attention": {"use_lse": False, "use_temperature": False, "use_outer_gate": False},
    "both directions": {"causal": False},
    "a window": {"window": 50},
    "heads of 128 columns": {"n_head": 2, "fem_dim": 256},
    "a hook on a map": {},
    "spikes": {},
    "spikes, split values": {"gate_rank": 40, "free_share": 0.5},
    "spikes, a window": {"window": 50},
}


def layers(device: torch.device) -> Iterator[Row]:
    """Softmax layers in bfloat16, which fused kernels read on a GPU, against themselves in float64 on the CPU: to a
    hundredth of the largest norm, as a gradient of 0, such as that of a bias of keys, is rounding."""
    fused = partial(_against_float64, limit=5e-2, least=1e-2)
    for name, fields in FUSED.items():
        config = FreeEnergyMixerConfig(
            **{"n_embd": 256, "n_head": 4, "fem_dim": 128, "qk_dim": 256, "use_conv": False} | fields
        )
        runs = {"outputs and gradients": fused}
        runs |= {"captured train step": _captured} if device.type == "cuda" else {}
        runs |= {"token by token": _token_by_token} if config.causal else {}
        for what, run in runs.items():
            yield outcome(what, partial(run, *_layer_in_bfloat16(config, device, name)), layer=name)


def _layer_in_bfloat16(config, device, name: str) -> tuple[FreeEnergyMixer, Tensor]:
    torch.manual_seed(0)
    layer = FreeEnergyMixer(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        if "spikes" in name:
            layer.value.weight[::5].mul_(100)
    if "hook" in name:  # as an adapter does, it takes the map from the product of all maps
        layer.value.register_forward_hook(lambda *call: None)
    return layer.to(device, torch.bfloat16), torch.randn(2, 333, config.n_embd).to(device, torch.bfloat16)


@torch.no_grad()
def _token_by_token(layer: FreeEnergyMixer, x: Tensor) -> str | None:
    """The last four tokens from the state of those before, against the whole sequence in float64 on the CPU."""
    wanted = _exact(layer)(x.double().cpu())[:, -4:]
    _, state = layer(x[:, :-4], return_state=True)
    for n, token in enumerate(x[:, -4:].split(1, 1)):
        y, state = layer(token, state=state, return_state=True)
        if wrong := apart([y], [wanted[:, n : n + 1]], 5e-2):
            return f"token {n + 1}: {wrong}"
    return None


def _captured(layer: FreeEnergyMixer, x: Tensor) -> str | None:
    """A train step, captured in a CUDA graph and replayed."""
    return apart(*replayed(lambda: trained(layer, x), x.device), 1e-2)


def replayed(run: Callable[[], list[Tensor]], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """What the replay of a CUDA graph of `run` computes, and what `run` itself does."""
    with side_stream(device):
        for _ in range(3):
            wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    torch.cuda.synchronize()
    return got, wanted


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def compiled_model(device: torch.device) -> Iterator[Row]:
    """A language model under torch.compile: its loss and every gradient, against the same model without it."""
    from fem.models import FEMConfig, FEMForCausalLM

    for prior in ("softmax", "rnn_softmax", "mamba"):
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        torch.manual_seed(0)
        model = FEMForCausalLM(FEMConfig(vocab_size=128, prior_type=prior, **sizes)).to(device)
        yield outcome("loss and gradients", partial(_compiled_model, model, device), prior=prior)


def _compiled_model(model, device: torch.device) -> str | None:
    ids = torch.randint(128, (2, 65)).to(device)
    sides = []
    for run in (model, torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager")):
        loss = run(ids, labels=ids).loss
        sides.append([loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)])
    return apart(*reversed(sides))
