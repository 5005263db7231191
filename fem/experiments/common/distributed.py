"""The end of a training by several processes."""

from __future__ import annotations

import gc

import torch.distributed as dist


def end_process_group() -> None:
    """End the process group that a Trainer began, if there is one. Call it once the Trainer is out of reach.

    gloo's threads free the tensors of the works they did, for which they need Python's lock; the group's destructor
    holds that lock while it waits for the threads, and an exit without it may abort in them. The handle of a barrier
    keeps all works before it: as long as this function has the handle, nothing is left for the threads to free.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    last = dist.barrier(async_op=True)
    last.wait()
    dist.destroy_process_group()
