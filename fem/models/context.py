"""Context parallelism: each process holds one part of every row, and reads all parts up to its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from fem.conditioner import TimeDecayConditioner
from fem.mixer import FreeEnergyMixer
from fem.models.engines.attention import EXACT
from fem.models.modeling import FEMForCausalLM, FEMModel
from fem.ops.common.read import Read
from fem.ops.common.tokens import Tokens, read_tokens
from fem.ops.softmax.softmax_read import softmax_read
from fem.priors import OperatorPrior, Prior
from fem.priors.softmax import SoftmaxPrior
from fem.state import CachePosition, MixerState


def own_part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's part of a tensor that every process has whole: token ids (B, T), targets, masks, segment ids.

    Raises ValueError where the parts would not be of one length.
    """
    if x.shape[1] % mesh.size():
        raise ValueError(f"{x.shape[1]} tokens cannot be cut into {mesh.size()} equal parts; pad or cut the rows.")
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


@contextmanager
def context_parallel(model: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Within this context a call takes the process's part of every row, and returns its part of the result.

    model: a `FreeEnergyMixer`, `FEMModel` or `FEMForCausalLM` in its exact form, of the same weights everywhere.
    mesh: of one dimension; the parts lie in its order and have one length (`own_part`). Softmax layers gather keys and
    values; states of scans and of the conditioner are handed from process to process, their gradients the other way.
    Gradients of weights are those of this part's loss: to be summed over the mesh, as data parallel does. The loss
    takes shift_labels, as the target of a part's last token lies in the next; documents are segment_ids.
    Raises ValueError on a prior without a state, causal=False, an engine's form, labels, position_ids and caches.
    """
    mixers = [module for module in model.modules() if isinstance(module, FreeEnergyMixer)]
    _check_model(model, mixers)
    ring = _Ring(mesh)
    with ExitStack() as undo:
        undo.enter_context(model.register_forward_pre_hook(_check_call, with_kwargs=True))
        for mixer in mixers:
            undo.enter_context(mixer.register_forward_pre_hook(ring.go_on, with_kwargs=True))
            if mixer.conditioner is not None:
                undo.enter_context(mixer.conditioner.register_forward_pre_hook(ring.take_hidden))
                undo.enter_context(mixer.conditioner.register_forward_hook(ring.give_hidden))
            read = ring.read_gathered if isinstance(mixer.prior, SoftmaxPrior) else ring.read_handed_on
            mixer.prior.read = partial(read, mixer.prior)
            undo.callback(delattr, mixer.prior, "read")
        yield


def _check_model(model: nn.Module, mixers: list[FreeEnergyMixer]) -> None:
    if not isinstance(model, (FreeEnergyMixer, FEMModel, FEMForCausalLM)):
        raise ValueError(
            f"model must be a FreeEnergyMixer, FEMModel or FEMForCausalLM, got a {type(model).__name__}, which may mix "
            "tokens elsewhere than in its mixers."
        )
    for mixer in mixers:
        if isinstance(mixer.prior, OperatorPrior):
            raise ValueError("an operator prior has no state to hand on, so its rows cannot be split.")
        if isinstance(mixer.prior, SoftmaxPrior) and mixer.prior.reads_otherwise():
            raise ValueError(
                f"{type(mixer.prior).__name__} reads keys and values in a way of its own, so its rows cannot be split."
            )
        if not mixer.config.causal:
            raise ValueError("causal=False reads what comes after as well; only rows of causal layers can be split.")


def _check_call(model: nn.Module, args: tuple, kwargs: dict) -> None:
    if isinstance(model, FreeEnergyMixer):
        return
    if model.config._attn_implementation != EXACT:
        raise ValueError(
            f"context_parallel reads in the exact form, got attn_implementation={model.config._attn_implementation!r}; "
            'call model.set_attn_implementation("exact") first.'
        )
    given = dict(zip(inspect.signature(model.forward).parameters, args)) | kwargs
    if given.get("labels") is not None:
        raise ValueError(
            "labels cannot be shifted within a part of a row; pass shift_labels=own_part(next_tokens(ids), mesh)."
        )
    for name in ("position_ids", "cu_seq_lens_q"):
        if given.get(name) is not None:
            raise ValueError(f"{name} cannot be given where rows are split; mark documents by segment_ids.")


class _Ring:
    """Messages between neighbouring processes, and the hooks and reads of a model's parts that send and receive them.

    In the forward pass they all go to the next process, in the backward pass to the previous one: no two wait for each
    other, and a process computes its next layer while the next process computes this one.
    """

    def __init__(self, mesh: DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim}; take one by its name, mesh['context'].")
        self.mesh, self.group, self.rank = mesh, mesh.get_group(), mesh.get_local_rank()
        self.first, self.last = self.rank == 0, self.rank == mesh.size() - 1

    def send(self, x: Tensor, step: int) -> None:
        dist.send(x.contiguous(), group=self.group, group_dst=self.rank + step)

    def receive(self, into: Tensor, step: int) -> Tensor:
        dist.recv(into, group=self.group, group_src=self.rank + step)
        return into

    def gather(self, x: Tensor) -> Tensor:
        """All parts of x (B, T, ..) up to this one; in the backward pass what processes ask of a part is added up."""
        row = DTensor.from_local(x, self.mesh, [Shard(1)]).full_tensor(grad_placements=[Partial()])
        return row[:, : (self.rank + 1) * x.shape[1]]

    def take(self, like: list[Tensor]) -> list[Tensor]:
        """Receive tensors of these shapes from the previous process."""
        flat = _Take.apply(_learning(), torch.cat([x.detach().flatten() for x in like]), self)
        return [part.view_as(x).to(x.dtype) for part, x in zip(flat.split([x.numel() for x in like]), like)]

    def give(self, tensors: list[Tensor], *outputs: Tensor) -> tuple[Tensor, ...]:
        """Send the tensors to the next process; returns the outputs, whose backward receives the tensors' gradients."""
        return _Give.apply(_learning(), self, torch.cat([x.flatten() for x in tensors]), *outputs)

    def go_on(self, mixer: FreeEnergyMixer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A call that begins at the positions and in the documents where the previous process ended."""
        call = dict(zip(("x", "attention_mask", "segment_ids", "state", "return_state"), args)) | kwargs
        if call.pop("state", None) is not None or call.pop("return_state", False):
            raise ValueError("rows that are split keep no cache; call with use_cache=False, or without a state.")
        x = call["x"]
        cache_position = CachePosition.zero(x.shape[0], x.device)
        if not self.first:
            cache_position = CachePosition(*self.receive(cache_position.position.new_empty(3, x.shape[0]), -1))
        if not self.last:
            marks = call.get("attention_mask"), call.get("segment_ids")
            _, after = read_tokens(tuple(x.shape[:2]), x.device, *marks, cache_position)
            self.send(torch.stack([after.position, after.document, after.segment]), 1)
        return (), call | {"state": MixerState(mixer.kind, x.dtype, {}, None, cache_position)}

    def take_hidden(self, conditioner: TimeDecayConditioner, args: tuple) -> tuple | None:
        if self.first:
            return None
        x, tokens, _ = args
        with torch.no_grad():
            _, like = conditioner.forward(x[:, :1], _first(tokens))
        return x, tokens, *self.take([like])

    def give_hidden(self, conditioner: TimeDecayConditioner, args: tuple, output: tuple[Tensor, Tensor]) -> tuple:
        h, hidden = output
        return output if self.last else (*self.give([hidden], h), hidden)

    def read_handed_on(self, prior: Prior, features, v, beta, tokens, memory, free_values=None) -> tuple[Read, dict]:
        """`Prior.read` that starts from the memory of the previous process, and hands its own on to the next."""
        read, before = partial(type(prior).read, prior), {}
        if not self.first:
            with torch.no_grad():  # one token shows which tensors a memory has, and their shapes
                free = None if free_values is None else free_values[:, :1]
                _, like = read(features[:, :1], v[:, :1], beta, _first(tokens), {}, free)
            before = dict(zip(like, self.take(list(like.values()))))
        result, after = read(features, v, beta, tokens, before, free_values)
        if not self.last:
            outputs = self.give(list(after.values()), *(x for x in result if x is not None))
            result = Read(*outputs, *[None] * (beta is None))
        return result, {}

    def read_gathered(self, prior: SoftmaxPrior, features, v, beta, tokens, _, free_values=None) -> tuple[Read, dict]:
        """`SoftmaxPrior.read` of the own queries over the keys and values of all parts up to this one."""
        q, k = prior.queries_and_keys(features, tokens.position)
        parts = [k, v] if free_values is None else [k, v, free_values]
        gathered = self.gather(torch.cat(parts, -1))
        keep = torch.ones_like(tokens.document) if tokens.keep is None else tokens.keep
        keep, document = self.gather(torch.stack([keep, tokens.document], -1)).unbind(-1)
        k, v, *free = gathered.split([part.shape[-1] for part in parts], -1)
        options = {"window": prior.config.window, "backend": prior.config.backend}
        return softmax_read(q, k, v, beta, *free, tokens=Tokens(keep.bool(), None, document, None), **options), {}


class _Take(Function):
    @staticmethod
    def forward(ctx, learning: Tensor, into: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        return ring.receive(torch.empty_like(into), -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.ring.send(grad, -1)
        return None, None, None


class _Give(Function):
    @staticmethod
    def forward(ctx, learning: Tensor, ring: _Ring, x: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ring, ctx.like = ring, x.to("meta")
        ring.send(x, 1)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        grad = torch.empty_like(ctx.like, device=grads[0].device)
        return None, None, ctx.ring.receive(grad, 1), *grads


def _learning() -> Tensor:
    """An input that makes autograd call `backward` on both sides of a message, even where one needs no gradient."""
    return torch.zeros((), requires_grad=True)


def _first(tokens: Tokens) -> Tokens:
    return Tokens(*(None if x is None else x[..., :1] for x in vars(tokens).values()))
