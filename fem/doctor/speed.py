"""How fast a layer trains and decodes here, beside plain attention."""

from __future__ import annotations

import time as clock
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from fem import FreeEnergyMixer, FreeEnergyMixerConfig
from fem.runs.run import first_line

PRIORS = ("softmax", "gla", "rnn_softmax", "mamba")


def seconds(step) -> float:
    """Median seconds of a step, after a first call."""
    step()
    return Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median


def training(device: torch.device) -> Iterator[dict]:
    """A train step of one layer: on a GPU in bfloat16, with 16 heads of width 64, and with Table 7's 12."""
    gpu = device.type == "cuda"
    for width, heads, times in ((1024, 16, (2048, 8192)), (768, 12, (1024,))) if gpu else ((64, 4, (128,)),):
        for time in times:
            dtype = torch.bfloat16 if gpu else torch.float32
            x = torch.randn(2 if time > 4096 else 8 if gpu else 1, time, width, device=device, dtype=dtype)
            attention = torch.nn.ModuleDict({n: torch.nn.Linear(width, width) for n in "qkvo"}).to(device, dtype)

            def plain(x, attention=attention, heads=heads):
                q, k, v = (attention[n](x).unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
                read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return attention["o"](read.transpose(1, 2).flatten(2))

            layers = {"attention (SDPA)": plain}
            for prior in PRIORS:
                config = FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, prior_type=prior, use_conv=False)
                layers[f"FEM, {prior}"] = FreeEnergyMixer(config).to(device, dtype)
            if gpu and find_spec("fla") and find_spec("fla.layers"):  # not of fla-core
                from fla.layers import GatedLinearAttention

                gla = GatedLinearAttention(hidden_size=width, num_heads=heads).to(device, dtype)
                layers["GLA (flash-linear-attention)"] = lambda x, gla=gla: gla(x)[0]
            base = None
            for name, layer in layers.items():
                row = {"layer": name, "width": width, "tokens": f"{x.shape[0]} x {time}"}
                try:
                    row |= _step(layer, x)
                    base = base or row["ms"]
                    row |= {"of attention": row["ms"] / base, "result": "ok"}
                except Exception as error:
                    row |= {"result": f"{type(error).__name__}: {first_line(error)}"}
                yield row


def _step(layer, x: torch.Tensor) -> dict:
    def step():
        layer(x).float().sum().backward()

    taken = 1e3 * seconds(step)
    if x.device.type != "cuda":
        return {"ms": taken, "host ms": None, "peak MiB": None}
    torch.cuda.reset_peak_memory_stats(x.device)
    torch.cuda.synchronize(x.device)
    started = clock.perf_counter()
    step()
    host = 1e3 * (clock.perf_counter() - started)
    torch.cuda.synchronize(x.device)
    return {"ms": taken, "host ms": host, "peak MiB": torch.cuda.max_memory_allocated(x.device) / 2**20}


@torch.no_grad()
def decoding(device: torch.device) -> Iterator[dict]:
    """Decoding one token after 1k, 4k and 16k tokens, beside attention of equal weights: the softmax prior alone."""
    gpu = device.type == "cuda"
    width, heads, dtype = (1024, 16, torch.bfloat16) if gpu else (64, 4, torch.float32)
    base: dict[int, float] = {}
    attention = {"use_lse": False, "use_temperature": False, "use_outer_gate": False}
    layers = {"attention": attention} | {f"FEM, {prior}": {"prior_type": prior} for prior in PRIORS}
    for name, fields in layers.items():
        config = FreeEnergyMixerConfig.matched(n_embd=width, n_head=heads, use_conv=False, **fields)
        layer = FreeEnergyMixer(config).to(device, dtype).eval()
        for time in (1024, 4096, 16384) if gpu else (128,):
            row = {"layer": name, "tokens before": time}
            try:
                _, state = layer(torch.randn(1, time, width, device=device, dtype=dtype), return_state=True)
                held = state.nbytes / 2**20
                taken = 1e3 * _seconds_a_token(layer, torch.randn(1, 1, width, device=device, dtype=dtype), state)
                if name == "attention":
                    base[time] = taken
                ratio = taken / base[time] if time in base else None
                row |= {"ms a token": taken, "of attention": ratio, "state MiB": held, "result": "ok"}
            except Exception as error:
                row |= {"result": f"{type(error).__name__}: {first_line(error)}"}
            yield row


def _seconds_a_token(layer, x: torch.Tensor, state, tokens: int = 64) -> float:
    """Mean seconds of a token, each with the state that the one before it left."""
    states = [state]

    def step():
        states[0] = layer(x, state=states[0], return_state=True)[1]

    step()
    return Timer("step()", globals={"step": step}).timeit(tokens).mean
