"""The Hyena operator (Poli and others, arXiv 2302.10866), which is in no library that is still kept."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

HORIZON = 2048  # tokens over which a filter's clock runs from 0 to 1
BANDS = 1  # pairs of waves in the positions; with the clock 3 numbers, as in the authors' code
FAST, SLOW, TARGET = 0.3, 1.5, 0.01  # the window falls to `TARGET` at such shares of the horizon, by channel
SHIFT = 0.05  # what the window falls to in the end is not 0


class FilterMap(nn.Linear):
    """A map that makes filters. Weight decay leaves it alone, as in the authors' code."""

    undecayed = ("weight",)


class ImplicitFilter(nn.Module):
    """h_t = Window(t) FFN(PositionalEncoding(t)), `filters` of them, for t = 0 .. T - 1.                    (Eq. 7)

        PositionalEncoding(t) = [t, cos(2 pi k t), -sin(2 pi k t)]_k       t in units of the horizon, k = 1 .. BANDS
        FFN: two hidden layers of sines                  Window(t) = exp(-alpha t) + SHIFT, alpha by filter

    The clock does not depend on the length of the sequence: a longer one continues the same filter.
    """

    def __init__(self, filters: int, hidden: int = 64):
        super().__init__()
        sizes = (1 + 2 * BANDS, hidden, hidden)
        self.maps = nn.ModuleList(FilterMap(into, hidden) for into in sizes)
        self.frequency = nn.Parameter(torch.ones(hidden))
        self.last = FilterMap(hidden, filters, bias=False)
        rates = torch.linspace(-math.log(TARGET) / SLOW, -math.log(TARGET) / FAST, filters)
        self.register_buffer("alpha", rates)

    def forward(self, time: int) -> Float[Tensor, "t f"]:
        clock = torch.arange(time, device=self.alpha.device)[:, None] / HORIZON
        waves = 2 * math.pi * clock * torch.arange(1, BANDS + 1, device=clock.device)
        h = torch.cat([clock, waves.cos(), -waves.sin()], -1).to(self.last.weight.dtype)
        for layer in self.maps:
            h = (self.frequency * layer(h)).sin()
        return self.last(h) * ((-self.alpha * clock).exp() + SHIFT)


class Hyena(nn.Module):
    """y = W_O z^(N+1), of the recurrence of order N:                                            (Definition 3.1)

        [x^1, .., x^N, v] = short_convolution(W x)        causal, three taps, every channel by itself
        z^1 = v,    z^(n+1)_t = x^n_t (sum_{i <= t} h^n_{t-i} z^n_i + bias^n z^n_t)

    The long convolutions are computed by the fast Fourier transform, in float32. Positions are the filters'. The
    authors' code has N - 1 long convolutions and gates before each; MAD's is that code with a wider inside.
    """

    undecayed = ("bias",)

    def __init__(self, width: int, order: int = 2):
        super().__init__()
        self.width, self.order = width, order
        total = (order + 1) * width
        self.project, self.output = nn.Linear(width, total), nn.Linear(width, width)
        self.short = nn.Conv1d(total, total, 3, padding=2, groups=total)
        self.filter = ImplicitFilter(order * width)
        self.bias = nn.Parameter(torch.randn(order, width))

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        time = x.shape[1]
        *gates, z = self.short(self.project(x).mT)[..., :time].split(self.width, 1)
        filters = self.filter(time).T.unflatten(0, (self.order, self.width))
        for gate, h, bias in zip(gates, filters, self.bias):
            z = gate * (convolved(z, h) + bias[:, None] * z)
        return self.output(z.mT)


def convolved(z: Float[Tensor, "b d t"], h: Float[Tensor, "d t"]) -> Float[Tensor, "b d t"]:
    """sum_{i <= t} h_{t-i} z_i, padded with zeros to twice the length, so that no end meets the beginning."""
    size = 2 * z.shape[-1]
    wide = torch.promote_types(z.dtype, torch.float32)
    with torch.autocast(z.device.type, enabled=False):
        product = torch.fft.rfft(z.to(wide), size) * torch.fft.rfft(h.to(wide), size)
        return torch.fft.irfft(product, size)[..., : z.shape[-1]].to(z.dtype)
