"""The state of a mixer: what it remembers between two calls."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Int
from torch import Tensor

CACHED = ("key", "value")  # tokens of a cache, in the dtype of the layer's input; all other sums are float32 at least
# Fields that no state depends on: how the layer starts, what it does after the read, which implementation reads.
NOT_IN_STATES = frozenset(
    [
        *("prior_type", "fem_ratio", "p_t_to_fem_ratio", "mamba_normalize", "dropout", "use_outer_gate", "gate_rank"),
        *("lambda_init", "backend", "softmax_backend"),
    ]
)
_SLACK = 1.125  # a view is copied where the storage that it keeps alive has more than this many times its bytes


@dataclass(frozen=True)
class CachePosition:
    """The place of each row of a batch after the tokens seen so far.

    position: the position that the next kept token of the row's document takes; 0 before the row's first kept token.
    document: how many documents ended in the row.
    segment: the segment id of the row's last kept token; meaningful once there was one.
    """

    position: Int[Tensor, " b"]
    document: Int[Tensor, " b"]
    segment: Int[Tensor, " b"]

    @classmethod
    def zero(cls, batch: int, device: torch.device | str) -> CachePosition:
        none = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(position=none, document=none, segment=none)


PLACE = tuple(field.name for field in fields(CachePosition))  # which torch.compile does not list


@dataclass(frozen=True)
class MixerState:
    """The memory of one mixer layer: what its prior and its conditioner carry to the next token.

    Every tensor has the batch first. A layer never changes a state in place: it returns a new one. `torch.save` writes
    it and `torch.load` reads it; `state_dict` is for other formats, such as safetensors.
    """

    layer: str  # the configuration of the layer that wrote it, "name=value, .."; layers of another kind refuse it
    dtype: torch.dtype  # of the layer's input
    memory: dict[str, Tensor]  # the prior's own
    conditioner: Tensor | None  # the conditioner's hidden state, (B, H_c)
    cache_position: CachePosition

    def _named(self) -> dict[str, Tensor]:
        memory = {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        hidden = {} if self.conditioner is None else {"conditioner": self.conditioner}
        place = {f"cache_position.{name}": getattr(self.cache_position, name) for name in PLACE}
        return memory | hidden | place

    @staticmethod
    def _of(layer: str, dtype: torch.dtype, tensors: dict[str, Tensor]) -> MixerState:
        memory = {name.removeprefix("memory."): x for name, x in tensors.items() if name.startswith("memory.")}
        position = CachePosition(*(tensors[f"cache_position.{name}"] for name in PLACE))
        return MixerState(layer, dtype, memory, tensors.get("conditioner"), position)

    def _map(self, change) -> MixerState:
        return self._of(self.layer, self.dtype, {name: change(tensor) for name, tensor in self._named().items()})

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.cache_position.position.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.cache_position.position.device

    @property
    def nbytes(self) -> int:
        """Bytes that the state keeps in memory."""
        storages = [tensor.untyped_storage() for tensor in self.tensors()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def compact(self) -> MixerState:
        """The same state, its tensors no longer views of much larger ones (of a prompt's activations, say)."""
        pins = lambda x: x.untyped_storage().nbytes() > _SLACK * x.nbytes  # noqa: E731
        if torch.compiler.is_compiling() or not any(map(pins, self.tensors())):
            return self
        return self._map(lambda tensor: tensor.clone() if pins(tensor) else tensor)

    def reorder(self, index: Int[Tensor, " rows"]) -> MixerState:
        """The state of the rows `index`, in that order; rows may repeat or be left out (beam search).

        Raises TypeError unless index is a tensor of integers, ValueError unless it is a list of rows of this batch.
        """
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
            got = f"dtype {index.dtype}" if isinstance(index, Tensor) else f"a {type(index).__name__}"
            raise TypeError(f"index must be a tensor of row numbers, int64 or int32, got {got}.")
        if index.ndim != 1:
            raise ValueError(f"index must have shape (rows,), got {tuple(index.shape)}.")
        if index.is_cpu and not torch.compiler.is_compiling() and bool(((index < 0) | (index >= self.batch)).any()):
            raise ValueError(f"index must name rows from 0 to {self.batch - 1}, got {index.tolist()}.")
        return self._map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def tensors(self) -> list[Tensor]:
        """All tensors of the state, in one order for every state of a layer."""
        return list(self._named().values())

    def clone(self) -> MixerState:
        """The same state in tensors of its own."""
        return self._map(torch.clone)

    def detach(self) -> MixerState:
        """The same state without its history, for truncated backpropagation."""
        return self._map(torch.Tensor.detach)

    def to(self, target: torch.device | torch.dtype | str) -> MixerState:
        """The same state on another device, or for a layer of another floating dtype.

        Positions and document numbers stay integers, sums stay float32 at least: only cached keys and values become
        bfloat16 or float16. Raises TypeError on a dtype that is not floating, and on anything but a device or dtype;
        ValueError on float16 for a packed softmax state, whose exp(beta v) leaves its range.
        """
        if not isinstance(target, torch.dtype | torch.device | str):
            raise TypeError(f"target must be a device or a dtype of torch, such as torch.float32, got {target!r}.")
        if not isinstance(target, torch.dtype):
            device = as_device("target", target)
            return self._map(lambda tensor: tensor.to(device))
        if not target.is_floating_point or target.itemsize < 2:
            raise TypeError(f"a state can be cast to a floating dtype of 16 bits or more, got {target}.")
        if target == torch.float16 and any(name.endswith("shift") for name in self._named()):
            raise ValueError(
                f"a softmax state of {self.dtype} on a CPU holds exp(beta v), which has no range in float16; read the "
                "tokens again with the float16 layer, or keep the dtype."
            )
        sums = torch.promote_types(target, torch.float32)
        cast = {
            name: x.to(target if name.endswith(CACHED) else sums) if x.is_floating_point() else x
            for name, x in self._named().items()
        }
        return self._of(self.layer, target, cast)

    def state_dict(self) -> dict[str, Tensor]:
        """The state as a flat dict of tensors, for safetensors and the like; `from_state_dict` reads it."""
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self._named().items()}
        layer, names = (torch.tensor(list(text.encode()), dtype=torch.uint8) for text in (self.layer, _listed(tensors)))
        return {"layer": layer, "names": names, "dtype": torch.empty(0, dtype=self.dtype), **tensors}

    @classmethod
    def from_state_dict(cls, tensors: dict[str, Tensor]) -> MixerState:
        """The state that `state_dict` wrote. Raises ValueError on missing, additional and changed tensors."""
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            got = type(tensors).__name__
            raise TypeError(f"tensors must be the dict of tensors that MixerState.state_dict returned, got {got}.")
        for name in ("layer", "names", "dtype"):
            if name not in tensors:
                raise ValueError(f"tensors must be what MixerState.state_dict returned, got none named {name!r}.")
        if tensors["layer"].dtype != torch.uint8:
            got = f"'layer' of {tensors['layer'].dtype}"
            raise ValueError(
                f"tensors must hold what MixerState.state_dict returned, got {got}; MixerState.to casts a state."
            )
        layer, names = (bytes(tensors[name].tolist()).decode() for name in ("layer", "names"))
        contents = {name: tensor for name, tensor in tensors.items() if name not in ("layer", "names", "dtype")}
        listed, present = (dict(x.split(" ", 1) for x in text.splitlines()) for text in (names, _listed(contents)))
        for name in sorted(listed.keys() | present.keys()):
            if listed.get(name) != present.get(name):
                got = f"{name!r} of {present[name]}" if name in present else f"none named {name!r}"
                raise ValueError(f"tensors must hold what MixerState.state_dict returned, got {got}.")
        if len(devices := {str(tensor.device) for tensor in contents.values()}) > 1:
            raise ValueError(f"tensors must be on one device, got {' and '.join(sorted(devices))}; use MixerState.to.")
        return cls._of(layer, tensors["dtype"].dtype, contents)

    def check(self, layer: str, x: Tensor) -> None:
        """Raise ValueError unless the state fits a layer of this kind and its input x, (B, T, D)."""
        if self.layer != layer:
            got, wanted = (dict(item.partition("=")[::2] for item in kind.split(", ")) for kind in (self.layer, layer))
            differing = [name for name in wanted if got.get(name) != wanted[name]]
            shown = lambda kind: ", ".join(f"{name}={kind.get(name)}" for name in differing)  # noqa: E731
            raise _foreign("layer", shown(got), shown(wanted))
        if self.batch != x.shape[0]:
            raise _foreign("batch size", self.batch, x.shape[0])
        if self.dtype != x.dtype:
            raise _foreign("input dtype", self.dtype, x.dtype)
        if self.device != x.device:
            raise _foreign("device", self.device, x.device)


def as_device(name: str, value: torch.device | str | int) -> torch.device:
    """The value as a torch.device. Raises ValueError where it names none."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"{name} must be a device of torch, such as 'cuda', got {value!r}.") from None


def _listed(tensors: dict[str, Tensor]) -> str:
    """A line for each tensor: its name, its shape and its dtype."""
    return "\n".join(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())


def kind_of(config, prior: str) -> str:
    """The prior and every field of a layer's configuration that its states depend on, "name=value, ..."."""
    named = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in NOT_IN_STATES}
    written = lambda value: ";".join(map(str, value)) if isinstance(value, tuple) else value  # noqa: E731
    return ", ".join(f"{name}={written(value)}" for name, value in ({"prior": prior} | named).items())


def _foreign(what: str, got, wanted) -> ValueError:
    """The error for a state of another layer, batch size, dtype or device (`what`)."""
    return ValueError(
        f"state belongs to another {what}: it has {got}, this call has {wanted}; "
        "pass the state that this layer returned for the same rows, or state=None to start anew."
    )


torch.serialization.add_safe_globals([MixerState, CachePosition])
