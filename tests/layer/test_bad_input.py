"""A wrong call gets one sentence that names the argument, what was got and what is wanted: one table of them all."""

import dataclasses
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch

import fem
from fem import FreeEnergyCrossMixer, FreeEnergyMixer, FreeEnergyMixerConfig, FreeEnergyPooling, MixerState, theory
from fem.functional import Read, channel_scan_read, decay_scan, keyed_scan_read, softmax_read, ssm_read
from fem.ops.common.backend import softmax_backend
from fem.ops.common.rope import frequencies
from fem.priors import PRIORS, OperatorPrior, Prior

pytestmark = pytest.mark.usefixtures("as_users_run")

NAN, INF = float("nan"), float("inf")
SIZES = {"n_embd": 64, "n_head": 4}
X = torch.zeros(2, 6, 64)
NESTED = torch.nested.nested_tensor([*X], layout=torch.jagged)
ONES = torch.ones(2, 6, dtype=torch.bool)
NO_F = {"use_lse": False, "use_temperature": False}
MAMBA = {"prior_type": "mamba"}


config = partial(FreeEnergyMixerConfig, **SIZES)
matched = partial(FreeEnergyMixerConfig.matched, **SIZES)


def layer(prior=None, **fields):
    return FreeEnergyMixer(config(**fields), prior)


def call(fields=None, **given):
    """The layer of 64 channels and 4 heads, called."""
    return layer(**fields or {})(**{"x": X} | given)


def state_of(rows=2, dtype=torch.float32, **fields):
    return layer(**fields).to(dtype)(torch.zeros(rows, 3, 64, dtype=dtype), return_state=True)[1]


@torch.no_grad()
def packed():
    state_of().to(torch.float16)


def continued(**fields):
    return call(state=state_of(**fields))


def operator(op, v=None, **fields):
    """A layer whose prior is `op`, called; with `v`, on values that are spread so far."""
    mixer = layer(OperatorPrior(op), use_conv=False, **fields)
    torch.nn.init.normal_(mixer.value.weight, std=0.02 if v is None else v)
    return mixer(torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)))


def shifted(x):
    return torch.nn.functional.pad(x, (0, 0, 1, -1))


def late_negative(x):
    """Of weights 1, 1, 1 and -0.3, whose sums are seldom negative."""
    return x + shifted(x) + shifted(shifted(x)) - 0.3 * shifted(shifted(shifted(x)))


def own(change):
    """A layer in a stream, whose prior returns `change` of what it should."""

    class Own(PRIORS["linear"]):
        def read(self, *inputs):
            return change(*super().read(*inputs))

    return layer(Own(config()))(X, return_state=True)


def unsaved_below(**given):
    class Forgetful(PRIORS["linear"]):
        def __init__(self, config):
            super().__init__(config)
            self.part = torch.nn.Module()
            self.part.register_buffer("table", torch.zeros(3), persistent=False)

    return layer(Forgetful(config()))


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def some(bad, *shape):
    """Ones, and one entry that is `bad`."""
    tensor = torch.ones(shape)
    tensor.view(-1)[1] = bad
    return tensor


HEADS = {"v": normal(1, 5, 2, 3), "beta": torch.ones(2, 3)}
NUMBERS = {"delta": torch.ones(1, 5, 2, 3), "A": -torch.ones(2, 3, 4), "B": torch.ones(1, 5, 4)}
# Good calls, of which every row of the table spoils one argument.
read = partial(softmax_read, q=normal(1, 5, 2, 4), k=normal(1, 5, 2, 4), **HEADS)
keyed = partial(keyed_scan_read, q=torch.ones(1, 5, 2, 4), k=torch.ones(1, 5, 2, 4), **HEADS)
channel = partial(channel_scan_read, log_weight=normal(1, 5, 2, 3), **HEADS)
ssm = partial(ssm_read, **NUMBERS, C=torch.ones(1, 5, 4), D=torch.ones(2, 3), **HEADS)
summed = partial(decay_scan, log_decay=torch.zeros(2, 5, 3), u=torch.zeros(2, 5, 3))
cross = partial(FreeEnergyCrossMixer, **SIZES)
pool = partial(FreeEnergyPooling, **SIZES)


def crossed(**given):
    return cross()(**{"x": X, "memory": X} | given)


def pooled(**given):
    return pool()(**{"x": X} | given)


def restored(**changes):
    return MixerState.from_state_dict(state_of().state_dict() | changes)


def scan_state(scan=keyed, **changes):
    return scan(return_state=True, **changes)[1]


WIDE = torch.ones(2, 5, 2, 3)
P, V = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 2.0, 3.0])
free = partial(theory.free_energy, p=P, v=V, beta=1.0)


def hidden(lam=0.5, beta_max=1.0, p=P):
    return theory.hidden_temperature(p, V, lam, beta_max)


CAUSES = {"causal": False, "conv_bidirectional": True, "conv_hidden": 9}
BOOL = "must be True or False, got"
TABLE = [
    # The configuration.
    (config, {"n_head": 5}, ValueError, "n_head must divide n_embd = 64"),
    *((config, {"n_head": n}, ValueError, f"n_head must be a positive integer, got {n!r}") for n in (0, 4.0, True)),
    (config, {"prior_type": "softmin"}, ValueError, "prior_type must be one of softmax"),
    (config, {"fem_ratoi": 0.5}, TypeError, "no field 'fem_ratoi' .* did you mean 'fem_ratio'"),
    (lambda: FreeEnergyMixer(n_embd=64, n_heads=4), {}, TypeError, "no field 'n_heads' .* did you mean 'n_head'"),
    (lambda: FreeEnergyMixerConfig(64, 4), {}, TypeError, "takes its fields by name, .* got 2 without"),
    (config, {"backend": "sdpa", "softmax_backend": "naive"}, ValueError, "give one"),
    (config, {"ssm_rank": 4}, ValueError, "ssm_rank needs prior_type='mamba' or 'mamba_interactive', got ssm_rank=4"),
    (config, {"fem_dim": 30}, ValueError, "fem_dim must be a multiple of 4, got 30"),
    (config, {"qk_dim": 12}, ValueError, "qk_dim must be a multiple of 8 .*RoPE"),
    (config, {"n_kv_head": 3}, ValueError, "n_kv_head must divide n_head = 4, got 3"),
    (config, {"normalize": False}, ValueError, "normalize=False is for scan priors"),
    (config, {"conv_bidirectional": True}, ValueError, "needs causal=False"),
    (config, CAUSES, ValueError, "conv_bidirectional needs halves of conv_hidden, which is 9"),
    (config, {"dropout": 1.0}, ValueError, r"dropout must lie in \[0, 1\), got 1.0"),
    (config, {"eps": 1e-60}, ValueError, "eps must be positive, got 1e-60"),
    (config, {"rope_frequencies": 1.0}, ValueError, r"rope_frequencies must be a list of numbers, got 1\.0"),
    (config, {"rope_frequencies": [NAN] * 8}, ValueError, "each of rope_frequencies must be a finite number, got nan"),
    (config, {"rope_frequencies": [1.0] * 8, "use_rope": False}, ValueError, "rope_frequencies needs use_rope=True"),
    (config, MAMBA | {"rope_frequencies": [1.0] * 8}, ValueError, "rope_frequencies needs prior_type='softmax' or"),
    (config, {"rope_frequencies": [1.0] * 7}, ValueError, "one number for each of the 8 planes of a head, got 7"),
    (config, {"beta_max_init": -104}, ValueError, r"beta_max_init must be in \[-87, 1e\+30\], got -104"),
    # Fields that nothing would read.
    (config, MAMBA | {"qk_dim": 16}, ValueError, "qk_dim needs a prior with queries and keys, got qk_dim=16 without"),
    (config, {"rope_theta": 500.0, "use_rope": False}, ValueError, "rope_theta needs use_rope=True"),
    (config, {"fem_dim": 32, "fem_ratio": 0.25}, ValueError, "fem_ratio needs fem_dim=None"),
    (config, {"use_conv": False, "conv_hidden": 8}, ValueError, "conv_hidden needs use_conv=True"),
    (config, {"use_conv": False, "conv_norm_first": False}, ValueError, "conv_norm_first needs use_conv=True"),
    (config, {"use_temperature": False, "use_outer_gate": False, "gate_rank": 4}, ValueError, "gate_rank needs a gate"),
    (config, {"free_share": 0.5, "use_outer_gate": False, "gate_rank": 4}, ValueError, "gate_rank needs a gate"),
    (matched, {"fem_dim": 32}, ValueError, "^matched solves the widths; leave out fem_dim"),
    (FreeEnergyMixerConfig.paper, SIZES | MAMBA | {"fem_dim": 32}, ValueError, "^paper solves the widths; leave out"),
    *(
        (config, {"keep_lambda": True} | fields, ValueError, "^keep_lambda needs use_lse=True, .* no free_share")
        for fields in ({}, NO_F, {"use_temperature": False, "free_share": 0.5})
    ),
    (config, {"free_share": 0.05}, ValueError, "free_share needs a whole channel of each head's 8, got .*=0.05"),
    (config, NO_F | {"free_share": 0.5}, ValueError, "free_share needs use_lse=True"),
    (config, {"free_share": 0.5, "prior_type": "mamba_interactive"}, ValueError, "reads all channels of a head togeth"),
    (config, {"use_temperature": False, "lambda_init": -3.0}, ValueError, "lambda_init needs use_temperature=True"),
    (config, {"free_share": 0.5, "lambda_init": -3.0}, ValueError, "lambda_init needs .* without free_share"),
    (config, {"rope_theta": 5.0, "rope_frequencies": (1.0,) * 8}, ValueError, "rope_theta needs .* without rope_"),
    (config, {"use_temperature": False, "beta_max_init": 2.5}, ValueError, "beta_max_init needs use_temperature=True"),
    (config, {"qk_dim": 64, "p_t_to_fem_ratio": 2.0}, ValueError, "p_t_to_fem_ratio needs qk_dim=None"),
    # Building a layer.
    (FreeEnergyMixer, {"config": SIZES}, TypeError, "config must be a FreeEnergyMixerConfig, .* got a dict"),
    (layer, {"prior": PRIORS["gla"]}, TypeError, "prior must be a Prior that was built, .* the class GatedLinearPrior"),
    (unsaved_below, {}, ValueError, r"buffer 'part\.table' of a prior must be persistent"),
    (own, {"change": lambda read, memory: read}, TypeError, "read of the prior 'linear' must return .* got Read"),
    (own, {"change": lambda read, memory: (read, None)}, TypeError, "read of the prior 'linear' .* got no dict"),
    (own, {"change": lambda read, memory: None}, TypeError, "read of the prior 'linear' must return .* got NoneType"),
    (own, {"change": lambda r, m: (r, m | {"n": 3})}, ValueError, "batch first, here 2 rows, got int as 'n'"),
    (own, {"change": lambda r, m: (r, m | {"n": torch.ones(4, 2)})}, ValueError, r"2 rows, got shape \(4, 2\) as 'n'"),
    (own, {"change": lambda read, memory: (read.mean, memory)}, TypeError, "read of the prior .* a Read .* got Tensor"),
    (own, {"change": lambda read, memory: (Read(read.mean, None), memory)}, ValueError, "a free energy.* got None"),
    (own, {"change": lambda r, m: (Read(r.mean[:, :, :1], r.free_energy), m)}, ValueError, r"mean .*got \(2, 6, 1, 8"),
    (own, {"change": lambda r, m: (Read(r.mean, r.mean[:, :1]), m)}, ValueError, r"free_energy .*got \(2, 1, 4, 8"),
    (lambda: layer(PRIORS["softmax"](config(window=2))), {}, ValueError, "prior must be built .*got window=2"),
    (OperatorPrior, {"op": "cumsum"}, TypeError, "op must be a function or module .* got 'cumsum'"),
    (operator, {"op": lambda x: x.cumsum(1).double()}, TypeError, "op must return .*32, got torch.float64"),
    (operator, {"op": lambda x: 2 * x - shifted(x)}, ValueError, "op must be non-negative, got a negative weight"),
    (operator, {"op": late_negative}, ValueError, "op must be non-negative, got a negative weight"),
    (operator, {"op": torch.cumsum, "causal": False}, ValueError, "leave out causal, got causal=False"),
    (operator, {"op": lambda x: x[:, 1:]}, ValueError, r"op must map \(B, T, C\) to the same shape, got \(1, 5, 32\)"),
    (operator, {"op": lambda x: x.cumsum(1), "v": 1e3}, ValueError, "v spreads too far for an operator prior"),
    (lambda: layer(OperatorPrior(torch.cumsum))(X, return_state=True), {}, ValueError, "keeps no state"),
    (FreeEnergyMixer, {"config": config(), "n_embd": 64}, TypeError, "give config or fields by name, not both"),
    (FreeEnergyMixer, SIZES | {"dtype": torch.int64}, TypeError, "dtype must be a floating dtype of torch, .* got"),
    (PRIORS["softmax"], {"config": None}, TypeError, "config must be a FreeEnergyMixerConfig, got a NoneType"),
    (PRIORS["gla"], {"config": config()}, ValueError, "config must have prior_type='gla' .* got 'softmax'"),
    (operator, {"op": lambda x: x.cumsum(1) + 1}, ValueError, "op must be linear"),
    (operator, {"op": lambda x: x.cumsum(1).relu()}, ValueError, "op must be linear"),
    (operator, {"op": lambda x: x.flip(1).cumsum(1).flip(1)}, ValueError, "op must be causal"),
    (operator, {"op": lambda x: x.cumsum(1) + 0.1 * x.cumsum(1).roll(1, 2)}, ValueError, "op must leave channels"),
    # Calling a layer.
    (call, {"return_state": 1}, TypeError, "return_state must be True or False, got 1"),
    (call, {"key_padding_mask": ~ONES}, TypeError, "no argument 'key_padding_mask'; use attention_mask"),
    (call, {"attention_mask": ONES.to_sparse()}, TypeError, "attention_mask must be a dense tensor"),
    (call, {"x": torch.zeros(2, 6, 64).long()}, TypeError, "x must be a floating-point tensor .* got dtype"),
    (call, {"x": X.to_sparse()}, TypeError, "x must be a dense tensor, got layout torch.sparse_coo; pad"),
    (call, {"x": NESTED}, TypeError, "x must be a dense tensor, got a nested tensor; pad"),
    (call, {"x": X.double()}, TypeError, r"x must have the layer's dtype, torch\.float32, got torch\.float64"),
    (call, {"x": X.to("meta")}, ValueError, "x must be on the layer's device, cpu, got x on meta"),
    (call, {"attention_mask": ONES.float()}, TypeError, "attention_mask must be bool or integers"),
    (call, {"attention_mask": ONES[:, 1:]}, ValueError, r"attention_mask must have shape .*\(2, 6\), got \(2, 5\)"),
    (call, {"attention_mask": 2 * ONES.long()}, ValueError, "attention_mask must hold 0 and 1 only, got 2"),
    (call, {"attention_mask": ONES.tolist()}, TypeError, "attention_mask must be a tensor .* got a list"),
    (call, {"attention_mask": ONES.to("meta")}, ValueError, "attention_mask must be on the device of the tokens, cpu"),
    (call, {"segment_ids": torch.zeros(2, 6)}, TypeError, "segment_ids must be integers"),
    (call, {"state": "a state"}, TypeError, "state must be a MixerState that this layer returned, got a str"),
    (call, {"fields": {"causal": False}, "return_state": True}, ValueError, "causal=False"),
    (call, {"fields": {"causal": False}, "state": state_of()}, ValueError, "causal=False"),
    (lambda: layer().inspect(X[:, :0]), {}, ValueError, "inspect needs at least one row and one token"),
    (call, {"x": X[0]}, ValueError, r"x must have shape .*got \(6, 64\); of one row, pass x\[None\]"),
    # States.
    (lambda: state_of().reorder([0, 1]), {}, TypeError, "index must be a tensor of row numbers, .* got a list"),
    (lambda: state_of().reorder(torch.tensor([2])), {}, ValueError, "index must name rows from 0 to 1, got"),
    (lambda: state_of().reorder(torch.tensor([[0]])), {}, ValueError, r"index must have shape \(rows,\), got \(1, 1\)"),
    (lambda: state_of().to(None), {}, TypeError, "target must be a device or a dtype of torch"),
    (lambda: state_of().to(torch.int64), {}, TypeError, r"to a floating dtype of 16 bits or more, got torch\.int64"),
    (lambda: state_of().to(torch.float8_e4m3fn), {}, TypeError, r"16 bits or more, got torch\.float8_e4m3fn"),
    (packed, {}, ValueError, r"holds exp\(beta v\), which has no range in float16"),
    (continued, {"n_head": 2}, ValueError, "state belongs to another layer: it has n_head=2"),
    (continued, {"rows": 3}, ValueError, "another batch size: it has 3, this call has 2"),
    (continued, {"dtype": torch.float64}, ValueError, r"another input dtype: it has torch\.float64"),
    (lambda: call(state=state_of().to("meta")), {}, ValueError, "another device: it has meta, this call has cpu"),
    (lambda: state_of().to("gpu"), {}, ValueError, "target must be a device of torch, .* got 'gpu'"),
    (MixerState.from_state_dict, {"tensors": None}, TypeError, "the dict of tensors that .* got NoneType"),
    (restored, {"memory.other": X}, ValueError, r"state_dict returned, got 'memory\.other' of \[2, 6, 64\]"),
    # A memory or a set.
    (cross, {"window": 3}, TypeError, "got window"),
    (cross, {"memory_dim": "8"}, ValueError, "memory_dim must be a positive integer, got"),
    (pool, {"queries": 0}, ValueError, "queries must be a positive integer, got 0"),
    (crossed, {"x": None}, TypeError, "x must be a floating-point .* got a NoneType"),
    (crossed, {"memory": X.long()}, TypeError, r"memory must be a .* got dtype torch\.int64"),
    (crossed, {"memory_mask": ONES.float()}, TypeError, "memory_mask must be"),
    (crossed, {"memory": torch.zeros(3, 3, 64)}, ValueError, "one batch size, got 2 and 3"),
    (pooled, {"attention_mask": ONES.float()}, TypeError, "attention_mask must be"),
    (crossed, {"attention_mask": ONES}, TypeError, "no argument 'attention_mask'; memory_mask .*1 = keep"),
    (pooled, {"key_padding_mask": ONES}, TypeError, "no argument 'key_padding_mask'; attention_mask .*1 = keep"),
    (pooled, {"x": torch.zeros(2, 64, 4, 4)}, ValueError, r"x must have shape .*of an image, pass x\.flatten\(2\)\.mT"),
    # The softmax read.
    (read, {"beta": some(NAN, 2, 3)}, ValueError, "beta must be positive, finite and not NaN, got nan"),
    (read, {"beta": torch.ones(3)}, ValueError, r"beta must .* shape .*\(2, 3\), got \(3,\)"),
    (read, {"beta": 1.0}, TypeError, "beta must be a floating-point tensor, got a float"),
    (read, {"q": torch.ones(1, 5, 2, 4).long()}, TypeError, "q must be floating point, got dtype"),
    (read, {"q": normal(5, 2, 4)}, ValueError, "q must have 4 dimensions"),
    (read, {"q": normal(1, 5, 3, 4)}, ValueError, "q must have a multiple of the heads of k"),
    (read, {"q": normal(1, 7, 2, 4)}, ValueError, "q has 7 queries and k only 5 keys"),
    (read, {"q": normal(1, 5, 2, 3)}, ValueError, "q and k must agree in batch and width"),
    (read, {"k": normal(1, 6, 2, 4)}, ValueError, "k and v must agree in batch, time and heads"),
    (read, {"free_values": normal(1, 4, 2, 3)}, ValueError, "free_values must have shape"),
    (read, {"beta": None, "free_values": normal(1, 5, 2, 3)}, ValueError, "where free_values are given, got None"),
    (read, {"k": normal(1, 5, 2, 4).to("meta")}, ValueError, "k must be on the device of q"),
    (read, {"q": normal(1, 5, 2, 0), "k": normal(1, 5, 2, 0)}, ValueError, "at least one head and one channel"),
    (read, {"scale": NAN}, ValueError, "scale must be a finite number, got nan"),
    (read, {"window": 0}, ValueError, "window must be a positive integer or None"),
    (read, {"causal": "no"}, TypeError, f"causal {BOOL} 'no'"),
    (read, {"key_mask": torch.ones(1, 4).bool()}, ValueError, "key_mask must have shape"),
    (read, {"bias": torch.ones(1, 2, 5, 5).bool()}, TypeError, "bias must be floating point"),
    (read, {"bias": torch.zeros(1, 3, 5, 5)}, ValueError, "bias must broadcast"),
    (read, {"bias": some(NAN, 5, 5)}, ValueError, "bias must be below infinity and not NaN .* got nan"),
    (read, {"backend": "magic"}, ValueError, "backend must be one of"),
    (read, {"backend": "triton"}, ValueError, "kernels for scans, not for softmax"),
    (partial(softmax_backend, "sdpa", torch.device("mps"), X.dtype), {}, ValueError, "got tensors on mps"),
    (partial(softmax_backend, "sdpa", torch.device("cuda"), torch.float64), {}, ValueError, "no fused kernel for"),
    (read, {"q": normal(1, 5, 2, 4).to_sparse()}, TypeError, "q must be a dense tensor, got layout torch.sparse_coo"),
    (frequencies, {"width": 5, "theta": 1e4, "device": X.device}, ValueError, "width must be even, got 5"),
    # The scans.
    (keyed, {"q": -torch.ones(1, 5, 2, 4)}, ValueError, "q must be finite and non-negative .* got -1"),
    (keyed, {"q": torch.ones(1, 5, 4, 4)}, ValueError, "q and k must have one shape"),
    (keyed, {"log_decay": torch.ones(1, 5, 2)}, ValueError, r"log_decay must be zero or negative .* got 1\.0"),
    (keyed, {"log_decay": torch.zeros(1, 4, 2)}, ValueError, "log_decay must have shape"),
    (keyed, {"return_state": 1}, TypeError, f"return_state {BOOL} 1"),
    (keyed, {"causal": False, "return_state": True}, ValueError, "causal=False reads the future"),
    (keyed, {"initial_state": {}}, TypeError, "initial_state must be the state that a scan returned, got a dict"),
    (keyed, {"initial_state": scan_state(channel)}, ValueError, "initial_state must hold"),
    (keyed, {"initial_state": scan_state(beta=None)}, ValueError, "given both times or neither"),
    (keyed, {"backend": "sdpa"}, ValueError, "a scan has no such form"),
    (channel, {"log_weight": some(NAN, 1, 5, 2, 3)}, ValueError, "log_weight must be below infinity .* got nan"),
    (channel, {"log_weight": normal(1, 5, 2)}, ValueError, "log_weight must have the shape of v"),
    (channel, {"v": normal(5, 2, 3)}, ValueError, "v must have shape"),
    (channel, {"v": normal(1, 5, 2, 0)}, ValueError, "heads and d_v at least 1"),
    (channel, {"initial_state": scan_state(channel, log_weight=WIDE, v=WIDE)}, ValueError, "belongs to a batch of 2"),
    (channel, {"backend": "reference", "return_state": True}, ValueError, "keeps no state"),
    (ssm, {"A": torch.ones(2, 3, 4)}, ValueError, "A must be finite, and zero or negative"),
    (ssm, {"A": -torch.ones(2, 3, 0)}, ValueError, "A must have shape"),
    (ssm, {"C": torch.ones(1, 5, 3)}, ValueError, r"C must have shape \(1, 5, 4\)"),
    (ssm, {"D": some(NAN, 2, 3)}, ValueError, "D must be finite and non-negative .* got nan"),
    (ssm, {"delta": some(-1.0, 1, 5, 2, 3)}, ValueError, "delta must be finite and non-negative"),
    (ssm, {"delta": torch.ones(1, 5, 2, 2)}, ValueError, "delta must have the shape of v"),
    (ssm, {"delta": None}, TypeError, "delta must be a floating-point tensor, got a NoneType"),
    (decay_scan, {"log_decay": -P[None], "u": P[None]}, ValueError, r"u must have shape .*, got \(1, 3\)"),
    (summed, {"u": torch.zeros(2, 4, 3)}, ValueError, "must have shape"),
    (summed, {"initial_state": torch.zeros(2, 4)}, ValueError, "must have shape"),
    (summed, {"u": torch.ones(2, 5, 3).long()}, TypeError, "u must be floating"),
    (summed, {"log_decay": some(0.5, 2, 5, 3)}, ValueError, "must be zero or negative"),
    (summed, {"log_decay": some(NAN, 2, 5, 3)}, ValueError, "must be zero or negative"),
    (summed, {"log_decay": torch.zeros(2, 5, 3, device="meta")}, ValueError, "on the device of u"),
    (summed, {"backend": "cuda"}, ValueError, "backend must be one of"),
    # The theory.
    (free, {"p": torch.tensor([0.5, 0.25, 0.5])}, ValueError, "p must sum to 1 over the tokens"),
    (free, {"p": torch.tensor([0.5, NAN, 0.5])}, ValueError, "p must hold weights >= 0 .* got NaN"),
    (free, {"p": torch.tensor([1, 0, 0])}, TypeError, "p must be floating point"),
    (free, {"p": [1.0]}, TypeError, "p must be a tensor, got a list"),
    (free, {"v": torch.ones(4)}, ValueError, "p and v must broadcast"),
    (free, {"beta": -1.0}, ValueError, "beta must be >= 0"),
    (free, {"p": P.expand(2, 3), "beta": torch.ones(3)}, ValueError, "beta must broadcast"),
    (hidden, {"lam": 1.5}, ValueError, r"lam must lie in \[0, 1\]"),
    (hidden, {"beta_max": -0.5}, ValueError, "beta_max must be >= 0"),
    (hidden, {"beta_max": INF}, ValueError, "beta_max must be finite"),
    (lambda: theory.index_accuracy(V, V, V.long()), {}, ValueError, "values must have shape"),
    (lambda: theory.index_accuracy(V, V[None, :2], V.long()), {}, ValueError, "prediction and winner"),
    (lambda: theory.index_accuracy(V, V[None], V), {}, TypeError, "winner must be a tensor of integers"),
    (lambda: theory.index_accuracy(V, V[None], V.long()), {}, ValueError, "winner must name tokens from 0 to 0"),
    (free, {"dim": None}, ValueError, "dim must be an axis of p and v"),
    # The optimiser.
    (lambda: fem.parameter_groups(layer(), NAN), {}, ValueError, "weight_decay must be finite .* got nan"),
    (lambda: fem.parameter_groups(layer(), True), {}, TypeError, "weight_decay must be a number, got True"),
    (lambda: fem.parameter_groups(None, 0.1), {}, TypeError, "model must be a torch.nn.Module, got a NoneType"),
    (lambda: fem.parameter_groups(torch.nn.Module(), 0.1), {}, ValueError, "model must have parameters that train"),
]


@pytest.mark.parametrize("function, fields, error, words", TABLE, ids=[f"{n} {row[3]}" for n, row in enumerate(TABLE)])
def test_a_wrong_call_gets_one_sentence(function, fields, error, words):
    with pytest.raises(error, match=words) as caught:
        function(**fields)
    assert "\n" not in str(caught.value)
    raised = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert Path(raised).is_relative_to(Path(fem.__file__).parent), "said by somebody below us"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FreeEnergyMixerConfig)])
def test_a_field_of_another_type_is_refused_by_its_name(field):
    with pytest.raises(ValueError, match=f"^(each of )?{field} must"):
        config(**{field: (1, "x")})


def test_a_prior_of_ones_own_must_say_what_it_costs(monkeypatch):
    """A configuration asks the class, before anything abstract could be built."""
    monkeypatch.setitem(PRIORS, "free", type("Free", (Prior,), {"name": "free", "read": lambda *inputs: None}))
    with pytest.raises(NotImplementedError, match=r"static method widths\(config\)"):
        config(prior_type="free")
