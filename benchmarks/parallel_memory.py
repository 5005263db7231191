"""Memory per process when heads (tensor parallel) or rows (context parallel) are split over 1, 2 and 4 processes.

OMP_NUM_THREADS=1 python benchmarks/parallel_memory.py       # writes research/results/checks/parallel_cpu.{json,md}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from measure import save
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig

from fem.models import FEMConfig, FEMForCausalLM
from fem.models.context import context_parallel, own_part
from fem.models.loss import next_tokens
from fem_research.common.measure import resident

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}
TIME, ROWS, STEPS = 512, 1, 2
PRIORS = {"softmax": {"mixer": {"use_conv": False}}, "gla": {"prior_type": "gla"}}
MEASURED = ("weights and optimiser", "kept for the backward pass", "peak of a step")
WAYS = ("tensor", "context", "context, recomputed")


class Kept:
    """Bytes that a forward pass keeps for the backward pass, without weights; every block of memory counts once."""

    def __init__(self, model):
        self.weights = {storage(weight).data_ptr() for weight in model.parameters()}
        self.blocks: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(self, x):
        block = storage(x)
        if block.data_ptr() not in self.weights:
            self.blocks[block.data_ptr()] = (
                block.nbytes(),
                x,
            )  # keeping the tensor alive keeps its address from being reused
        return x

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.blocks.values())


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def storage(x):
    return local(x).untyped_storage()


def measure(folder: str, way: str) -> dict[str, int]:
    """Bytes of weights and AdamW's state, of what a forward pass keeps, and of what a training step adds at most."""
    ranks = dist.get_world_size()
    split = {"distributed_config": DistributedConfig(tp_size=ranks)} if way == "tensor" and ranks > 1 else {}
    model = FEMForCausalLM.from_pretrained(folder, **split).train()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.randint(4096, (ROWS, TIME), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "shift_labels": next_tokens(ids)}
    if way != "tensor":
        given = {name: own_part(x, mesh) for name, x in given.items()}
    if way == "context, recomputed":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    kept, nbytes = Kept(model), 0
    with nullcontext() if way == "tensor" else context_parallel(model, mesh):
        for step in range(STEPS):
            if step == STEPS - 1:
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            before = resident("VmRSS")
            with saved_tensors_hooks(kept.pack, lambda x: x) if step == 0 else nullcontext():
                loss = model(**given, num_items_in_batch=ROWS * (TIME - 1)).loss
            nbytes, kept.blocks = (kept.nbytes or nbytes), {}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peak = resident("VmHWM") - before
    state = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    held = sum(local(x).nbytes for x in [*model.parameters(), *state])
    return dict(zip(MEASURED, (held, nbytes, peak)))


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for prior, fields in PRIORS.items():
            torch.manual_seed(0)
            FEMForCausalLM(FEMConfig(**SIZES, **fields)).save_pretrained(Path(scratch, prior))
        for processes in (1, 2, 4):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            # the allocator returns every large block to the system when it is freed
            how = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
            subprocess.run([*torchrun, "--nproc-per-node", str(processes), __file__, scratch], check=True, env=how)
            results[processes] = json.loads(Path(scratch, "found.json").read_text())
    rows = []
    for prior, way in product(PRIORS, WAYS):
        for processes, ranks in results.items():
            most = {name: max(rank[f"{prior}, {way}"][name] for rank in ranks) for name in MEASURED}
            shown = {name: f"{nbytes / 2**20:,.0f}" for name, nbytes in most.items()}
            rows.append({"prior": prior, "split": way, "processes": processes, **shown})
    sizes = "{num_hidden_layers} layers of width {hidden_size}, {num_attention_heads} heads, {vocab_size} entries"
    of = {(row["prior"], row["split"], row["processes"]): row for row in rows}
    alone, heads = (of["softmax", "tensor", processes] for processes in (1, 4))
    whole, cut = (of["softmax", "context", processes] for processes in (1, 4))
    weights, kept, _ = MEASURED
    note = (
        f"Over four processes split heads leave {heads[weights]} of {alone[weights]} MiB of weights and optimiser and "
        f"{heads[kept]} of {alone[kept]} of what is kept for the backward pass; split rows leave {cut[kept]} of "
        f"{whole[kept]} of the latter (softmax).\n\n"
        f"MiB of the process that holds most, over gloo on a CPU, float32: {sizes.format(**SIZES)}, {ROWS} row of "
        f"{TIME} tokens, AdamW; seed 0. Tensor: heads are split (`tp_plan`), every process reads whole rows. Context: "
        "rows are split (`context_parallel`), every process has all weights; recomputed: with gradient checkpointing. "
        "Kept for the backward pass: every block of memory that autograd saves in a forward pass, counted exactly; "
        "softmax layers keep the keys and values of all parts up to their own. Peak of a step: by how much the "
        "process's resident memory rises in the second step, gradients, gloo's buffers and what the allocator keeps "
        "included; 60 MiB of it are gradients, where all weights are. Made by `python benchmarks/parallel_memory.py`."
    )
    save("research/results/checks/parallel_cpu", "Memory of split models", results, rows, note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        dist.init_process_group("gloo")
        folder, found = Path(sys.argv[1]), [None] * dist.get_world_size()
        own = {f"{prior}, {way}": measure(str(folder / prior), way) for prior, way in product(PRIORS, WAYS)}
        dist.all_gather_object(found, own)
        if dist.get_rank() == 0:
            (folder / "found.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    else:
        main()
