"""The learnt scalars of a read: its temperature beta, the inner gate lambda and the outer gate g."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.ops.common.backend import by_kernels, differentiated, transformed
from fem.ops.common.operator import again_differentiable
from fem.ops.common.precision import normed_softplus, softplus, upcast
from fem.ops.common.read import Read
from fem.optim import mark_undecayed
from fem.projection import Projection


class Temperature(nn.Module):
    """beta = softplus(theta + beta_max_init), theta starting at 0: the inverse temperature per channel, in nats per
    unit of v.                                                                                     (Section 2.3.2)
    """

    undecayed = ("theta",)

    def __init__(self, config: FreeEnergyMixerConfig, shape: tuple[int, ...]):
        super().__init__()
        self.start = config.beta_max_init
        self.theta = nn.Parameter(torch.empty(shape))
        self.reset_parameters()
        mark_undecayed(self)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.theta)

    def forward(self) -> Tensor:
        return softplus(self.theta, self.start)


class SlimProjection(nn.Module):
    """y = U (W x + W_c h) + b, U (width x rank): a map of low rank, which starts as spread as a full one.

    Where a model is split by heads over devices, U is split by its rows and W is whole on each.
    """

    def __init__(self, inputs: int, rank: int, width: int, bias: bool, context: int, start: float = 0.0):
        super().__init__()
        self.down = Projection(inputs, rank, bias=False, context=context)
        self.up = Projection(rank, width, bias, start=start, std=rank**-0.5)

    def forward(self, features: Float[Tensor, "*t f"]) -> Float[Tensor, "*t d"]:
        return self.up(self.down(features))


def first_map(gate: nn.Module) -> nn.Module:
    """The map of a gate that reads the features."""
    return gate.down if isinstance(gate, SlimProjection) else gate


class TwoLevelGate(nn.Module):
    """o_t = g_t * ((1 - lambda_t) mean_t + lambda_t F_t)                                              (Eq. 10, 11)

        lambda = sigmoid(W_lambda x)           g = RMSNorm_per_head(softplus(W_g x))

    Without temperature learning the read is F where the log-sum-exp is on, else the mean. Slim gates
    (`gate_rank`): W_lambda and W_g are products of two maps, or give one number per head; a norm over a head would
    undo that number, so g is then softplus(W_g x) / log 2.
    """

    def __init__(self, config: FreeEnergyMixerConfig):
        super().__init__()
        self.config = config
        self.per_head = config.gate_rank == 0
        self.inner = self._map(config.lambda_init) if config.learns_lambda else None
        self.outer = self._map(0.0) if config.use_outer_gate else None

    def _map(self, start: float) -> Projection | SlimProjection:
        config = self.config
        if config.gate_rank:
            sizes = (config.n_embd, config.gate_rank, config.fem_dim)
            return SlimProjection(*sizes, config.bias, config.context_width, start)
        width = config.n_head if self.per_head else config.fem_dim
        return Projection(config.n_embd, width, config.bias, config.context_width, start)

    def maps(self) -> list[nn.Module]:
        """Those of lambda and g that there are."""
        return [one for one in (self.inner, self.outer) if one is not None]

    def ignore_features(self) -> None:
        """Start with lambda = sigmoid(lambda_init) and g = 1 for every token.

        The weights start N(0, 1e-7) and not at 0, as DoRA divides by the norms of their rows.
        """
        for gate in self.maps():
            last = gate.up if isinstance(gate, SlimProjection) else gate
            last.std = 1e-7
            last.reset_parameters()

    def forward(self, features: Float[Tensor, "*t f"] | list[Tensor | None], read: Read) -> Float[Tensor, "*t h d"]:
        """o = g ((1 - lambda) mean + lambda F), of the features or of the gates' logits.                (Eq. 11)"""
        inner, outer = self.logits(features)
        if not self.per_head and by_kernels(*read, inner, outer, differentiable=True):
            from fem.ops.common.token_kernels import gated  # by Triton, which the library does not require

            return gated(self._mixed, *read, inner, outer, self.config.free_share is not None, self.config.eps)
        return self._mixed(*read, inner, outer)

    def factors(self, features: Float[Tensor, "*t f"]) -> tuple[Tensor | None, Tensor | None]:
        """lambda and g, (.., H, d_v) each, or (.., H, 1) of one number per head; None where the part is off."""
        inner, outer = self.logits(features)
        return self._lambda(inner), None if outer is None else self._gate(self._by_heads(outer))

    def _mixed(
        self, mean: Tensor, free_energy: Tensor | None, inner: Tensor | None, outer: Tensor | None
    ) -> Float[Tensor, "*t h d"]:
        """o, from the logits of lambda and g, by operations of PyTorch."""
        u = self._mix(mean, free_energy, self._lambda(inner))
        if outer is None:
            return u
        a = self._by_heads(outer)
        by_hand = differentiated(a, u) and not (self.per_head or torch.compiler.is_compiling() or transformed(a, u))
        return _Gated.apply(a, u, self.config.eps) if by_hand and a.dtype == u.dtype else self._gate(a).to(u.dtype) * u

    def logits(self, features: Float[Tensor, "*t f"] | list[Tensor | None]) -> list[Float[Tensor, "*t h_d"] | None]:
        if isinstance(features, list):  # they are known (`fem.joint_maps`)
            return features
        return [None if gate is None else gate(features) for gate in (self.inner, self.outer)]

    def _by_heads(self, logits: Float[Tensor, "*t h_d"]) -> Float[Tensor, "*t h d"]:
        return upcast(torch.unflatten(logits, -1, (-1, 1 if self.per_head else self.config.value_width)))

    def _lambda(self, logits: Float[Tensor, "*t h_d"] | None) -> Float[Tensor, "*t h d"] | None:
        return None if logits is None else self._by_heads(logits).sigmoid()

    def _gate(self, a: Float[Tensor, "*t h d"]) -> Float[Tensor, "*t h d"]:
        return F.softplus(a) / math.log(2) if self.per_head else normed_softplus(a, self.config.eps)

    def _mix(self, mean: Tensor, free_energy: Tensor | None, lambda_: Tensor | None) -> Float[Tensor, "*t h d"]:
        """u = (1 - lambda) mean + lambda F; of split values [mean, F]; else F, or the mean without it.       (Eq. 7)"""
        if free_energy is None:
            return mean
        if self.config.free_share is not None:
            return torch.cat([mean, free_energy], -1)
        return free_energy if lambda_ is None else torch.lerp(mean, free_energy, lambda_.to(mean.dtype))


class _Gated(torch.autograd.Function):
    """g u with its gradients by hand: on a CPU in seven tenths of autograd's time, and with one tensor fewer kept.

    g = r s, s = softplus(a), r = (mean s^2 + eps)^(-1/2)       ds = r (h - r^2 mean(h s) s), h = u do
    """

    @staticmethod
    def forward(ctx, a, u, eps):
        s = F.softplus(a)
        r = s.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(a, u, s, r)
        ctx.eps = eps
        return (s * u).mul_(r)

    @staticmethod
    def backward(ctx, grad):
        a, u, s, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *again_differentiable(lambda a, u: [normed_softplus(a, ctx.eps) * u], (a, u), [grad]), None
        h = grad * r
        du = h * s
        slope = (du.unsqueeze(-2) @ u.unsqueeze(-1))[..., 0].mul_(r).mul_(r)
        h.mul_(u).addcmul_(s, slope, value=-1 / s.shape[-1])
        return torch.ops.aten.softplus_backward(h, a, 1, 20), du, None
