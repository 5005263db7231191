"""How several processes share one training: FSDP2 under the Trainer, rows in parts, layers by their heads."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh

from fem.models import FEMForCausalLM
from fem.train.recipe import TrainRecipe

FSDP = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
DATA = "dp_shard_cp"  # accelerate's name for the processes that FSDP2 shards over


def shard(accelerator: Accelerator, settings: dict, mesh: DeviceMesh | None) -> None:
    """Let `accelerator` shard with the arithmetic of ddp: float32 weights and sums of gradients, under autocast.

    mesh: that of `heads_and_data`, where layers are split; their parts are sharded over the first dimension alone.
    accelerate itself would cast weights and gradients to bfloat16, beta included. It shards on a fixed list of devices,
    on which CPUs are missing although gloo supports them (`AcceleratorState.__init__` in accelerate 1.15).
    """
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin.mixed_precision_policy = None
    if mesh is not None:  # accelerate is not told of the other dimension: it would split plain weights over it, too
        state.parallelism_config, state.device_mesh = ParallelismConfig(dp_shard_size=mesh[DATA].size()), mesh
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # the next training in this process would read it


def parts_of_rows(recipe: TrainRecipe) -> DeviceMesh | None:
    """The processes that share rows with this one; None where each reads whole rows."""
    if recipe.context_parallel == 1:
        return None
    ranks = _ranks().view(-1, recipe.context_parallel, recipe.tensor_parallel)
    return DeviceMesh.from_group(_own_group(ranks.transpose(1, 2).flatten(0, 1), recipe), _device())


def heads_and_data(recipe: TrainRecipe) -> DeviceMesh | None:
    """DATA: the processes with the same heads as this one; "tensor": those that share its layers and read the same
    tokens, its neighbours. None where each has whole layers."""
    if recipe.tensor_parallel == 1:
        return None
    ranks = _ranks().view(-1, recipe.tensor_parallel)
    groups = [_own_group(ranks.T, recipe), _own_group(ranks, recipe)]
    return DeviceMesh.from_group(groups, _device(), ranks, mesh_dim_names=(DATA, "tensor"))


def split_by_heads(model: FEMForCausalLM, mesh: DeviceMesh) -> None:
    """Split a whole model over mesh["tensor"] by its config's plan; what stays whole gets the same gradients there.

    The Trainer is not told: it refuses to resume models that were split when they were loaded.
    """
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan = model._expand_parallel_plan(model.tp_plan)
    except (ImportError, AttributeError):
        raise ValueError("tensor_parallel needs transformers 5.23 or newer.") from None
    for name in model.all_tied_weights_keys:
        plan.pop(name, None)
    apply_tensor_parallelism(model, mesh["tensor"], plan)
    model.tie_weights()
    # It would warn at every checkpoint that weights split twice are gathered in two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _ranks() -> torch.Tensor:
    return torch.arange(dist.get_world_size())


def _own_group(groups: torch.Tensor, recipe: TrainRecipe) -> dist.ProcessGroup:
    """This process's group of those in the rows of `groups`."""
    timeout = timedelta(seconds=recipe.comm_timeout)
    return dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)[0]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
