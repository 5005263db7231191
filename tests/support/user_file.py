"""A user's file: what the README and the tutorial call, for `make types`."""

import torch
from torch import Tensor, nn

import fem
from fem import (
    PRIORS,
    FreeEnergyCrossMixer,
    FreeEnergyMixer,
    FreeEnergyMixerConfig,
    FreeEnergyPooling,
    MixerState,
    parameter_groups,
    replace_attention,
)
from fem.functional import softmax_read
from fem.models import FEMConfig, FEMForCausalLM, load_replaced
from fem.theory import effective_weights, free_energy, posterior

config = FreeEnergyMixerConfig.matched(n_embd=64, n_head=4, prior_type="softmax", gate_rank=4)
layer = FreeEnergyMixer(config)
x = torch.randn(2, 8, 64)
y: Tensor = layer(x)
z, state = layer(x, return_state=True)
s: MixerState = state
n: int = state.nbytes
step, state = layer(x[:, :1], state=state, return_state=True)
reading = layer.inspect(x)
w: Tensor | None = reading.posterior
report = layer.parameter_report()
ratio: float = report["ratio"]
model = FEMForCausalLM(FEMConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
# transformers 5.23 declares a protocol for `generate` that none of its own models meets, Llama's neither
ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20)  # type: ignore
out = model(input_ids=torch.tensor([[1, 2, 3]]))
loss = out.loss
optimizer = torch.optim.AdamW(parameter_groups(layer, 0.1), lr=1e-3)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mixer = FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=width, n_head=heads))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x)


p, v = torch.rand(3), torch.rand(3)
f: Tensor = free_energy(p, v, torch.tensor(2.0))
q: Tensor = posterior(p, v, torch.tensor(2.0))
e: Tensor = effective_weights(p, v, torch.tensor(0.5), torch.tensor(2.0))
read = softmax_read(torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2, 8), torch.ones(2, 8))
mean: Tensor = read.mean
names: list[str] = list(PRIORS)
pool = FreeEnergyPooling(n_embd=64, n_head=4, memory_dim=64)
cross = FreeEnergyCrossMixer(n_embd=64, n_head=4, memory_dim=64)
pooled: Tensor = pool(x)
host: nn.Module = replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)))
back = load_replaced("folder")
version: str = fem.__version__
