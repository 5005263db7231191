"""How several processes share one training: FSDP2 under the Trainer, and rows in parts."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh

from fem.train.recipe import TrainRecipe

FSDP = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}


def shard(accelerator: Accelerator, settings: dict) -> None:
    """Let `accelerator` shard with the arithmetic of ddp: float32 weights and sums of gradients, under autocast.

    accelerate itself would cast weights and gradients to bfloat16, beta included. It shards on a fixed list of devices,
    on which CPUs are missing although gloo supports them (`AcceleratorState.__init__` in accelerate 1.15).
    """
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin.mixed_precision_policy = None
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # the next training in this process would read it


def parts_of_rows(recipe: TrainRecipe) -> DeviceMesh | None:
    """The processes that share rows with this one; None where each reads whole rows."""
    if recipe.context_parallel == 1:
        return None
    groups = torch.arange(dist.get_world_size()).view(-1, recipe.context_parallel).tolist()
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=recipe.comm_timeout))
    return DeviceMesh.from_group(group, "cuda" if torch.cuda.is_available() else "cpu")
