"""A read as sums that a linear kernel gives, and back.

    sums = kernel([v | e | 1])        e = exp(beta (f - c))        w = sums_1
    log-weight = p + log w        mean = sums_v / w        F = c + log(sums_e / w) / beta

A memory is itself a read: what each of its n cells has kept, of that weight, mean and free energy. It enters a kernel
as the sums that it stands for, relative to the shifts p of log-weights and c of values, and leaves it in the same way,
so that what was summed before is never out of range of what comes. e is at most 1 and what underflows is below e^-87 of
it: a sum above e^-60 has lost less than its rounding, and what is below is in doubt. No gradient goes through a shift,
on which a read does not depend. Sums are (.., n, d_v), (.., n, d_f) and (.., n, w), p (.., n or 1, w) and c
(.., 1, d_f), where w is 1 or, where every channel has weights of its own, the number of channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fem.ops.common.precision import LEAST_PROVEN
from fem.ops.common.read import LOG_ZERO, NO_WEIGHT, Terms, beside

LIGHT = 30.0  # log-weights up to here need no shift


class Shift(NamedTuple):
    """The logarithm p of the weights, and the values c, that sums are relative to, and a middle m of the values.

    beta's gradient is a difference of sums of (f - c) e and (F - c), which are larger the higher c is; with m in the
    place of c it is the same, and loses fewer digits.
    """

    weight: Float[Tensor, "*n 1"]
    value: Float[Tensor, "*1 df"]
    middle: Float[Tensor, "*1 df"]

    def about(self, f: Tensor, beta: Tensor, *time: int) -> Shift:
        """The shift with the mean of the values as their middle, where beta has a gradient."""
        return self._replace(middle=f.detach().mean(time, keepdim=True)) if beta.requires_grad else self

    def exponent(self, f: Tensor, beta: Tensor) -> Tensor:
        """beta (f - c), whose derivative by beta is f - m."""
        return torch.addcmul(beta.detach() * (self.middle - self.value), f - self.middle, beta)

    def energy(self, log_ratio: Tensor, beta: Tensor) -> Tensor:
        """F = c + log(R) / beta, whose derivative by beta is (m - F) / beta where R's is sum p (f - m) e."""
        return self.middle + (log_ratio + beta.detach() * (self.value - self.middle)) / beta


class Sums(NamedTuple):
    """sum_i w_i v_i, sum_i w_i e_i and sum_i w_i."""

    value: Tensor
    energy: Tensor
    weight: Tensor

    @classmethod
    def split(cls, sums: Tensor, beta: Tensor) -> Sums:
        """Of sums of [v | e | 1], one weight for all channels."""
        return cls(*sums.split_with_sizes([sums.shape[-1] - beta.shape[-1] - 1, beta.shape[-1], 1], -1))


def shift_for(memory: Terms, highest: Tensor, heaviest: Tensor, beta: Tensor, light: float = LIGHT) -> Shift:
    """A shift by which the sums of the memory, and of tokens that are no higher and no heavier, are about 1 at most."""
    with torch.no_grad():
        top = torch.maximum(memory.log_weight.amax(-2, keepdim=True), heaviest)
        weight = torch.where(top.abs() > light, top, 0)
        weight = torch.where(top > NO_WEIGHT, weight, 0)
        before = beside(memory.log_weight, beta)
        lead = memory.free_energy + (before - beside(weight, beta)).clamp_max(0) / beta
        lead = torch.where(before > NO_WEIGHT, lead, -torch.inf)
        value = torch.maximum(lead.amax(-2, keepdim=True), highest)
        value = torch.where(value > -torch.inf, value, 0)
        return Shift(weight, value, value)


def entering(memory: Terms, shift: Shift, beta: Tensor) -> Sums:
    """The sums that a memory stands for."""
    relative = memory.log_weight - shift.weight
    weight = relative.exp()
    energy = (beside(relative, beta) + shift.exponent(memory.free_energy, beta)).exp()
    return Sums(beside(weight, memory.mean) * memory.mean, energy, weight)


@torch.no_grad()
def suspect(sums: Sums, floor: Tensor | float = 1.0) -> Bool[Tensor, ""]:
    """Whether any weight or energy is so small, or so large, that digits may be lost; `leaving` says of which.

    floor: about how much a row of items of weight 1 would weigh.
    """
    _, energy, weight = sums
    lightest, heaviest = weight.aminmax()
    lowest = torch.minimum(energy.amin(), lightest) if energy.numel() else lightest
    most = torch.maximum(heaviest, floor.amax()) if isinstance(floor, Tensor) else heaviest.clamp_min(floor)
    return ~((lowest >= LEAST_PROVEN[weight.dtype] * most.clamp_min(1)) & (heaviest < torch.inf))


def leaving(
    sums: Sums, shift: Shift, beta: Tensor, floor: Tensor | float = 1.0, suspected: bool = True
) -> tuple[Terms, Bool[Tensor, "*n w"] | None]:
    """The read that sums stand for, and which of its weights are in doubt; None: none is. Those read 0.

    floor, suspected: as `suspect` takes and answers. Waits for the device where they are suspected.
    """
    value, energy, weight = sums
    doubt = _doubtful(energy, weight, floor, LEAST_PROVEN[weight.dtype]) if suspected else None
    if doubt is not None:
        weight, value = torch.where(doubt, 1, weight), torch.where(beside(doubt, value), 0, value)
        energy = torch.where(beside(doubt, energy), 1, energy)
    log_weight = weight.log() + shift.weight
    free_energy = shift.energy((energy / beside(weight, energy)).log(), beta)
    if doubt is not None:
        log_weight = torch.where(doubt, LOG_ZERO, log_weight)
        free_energy = torch.where(beside(doubt, free_energy), 0, free_energy)
    return Terms(log_weight, value / beside(weight, value), free_energy), doubt


@torch.no_grad()
def _doubtful(energy: Tensor, weight: Tensor, floor: Tensor | float, least: float) -> Tensor | None:
    doubt = ~((weight > 0) & (weight >= least * floor) & (weight < torch.inf))
    if energy.numel():
        lowest = energy.amin(-1, keepdim=True) if weight.shape[-1] == 1 else energy
        doubt |= ~(lowest >= least * torch.maximum(weight, torch.as_tensor(floor)))
    return doubt if bool(doubt.any()) else None
