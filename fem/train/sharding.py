"""FSDP2 under the Trainer."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

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
