"""How torchtitan splits a FEM model over devices: heads (tensor parallel), then shards of weights (FSDP2)."""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.tensor_parallel import NoParallel

from fem.models.context import context_parallel
from fem.train.titan.model import FEMDecoder


def parallelize(
    model: FEMDecoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
) -> FEMDecoder:
    """Split heads by `base_model_tp_plan` and rows by parts, checkpoint and compile each block, shard what is left."""
    if parallel_dims.tp_enabled:
        split_heads(model, parallel_dims.get_mesh("tp"))
    if parallel_dims.cp_enabled:
        split_rows(model, parallel_dims.get_mesh("cp"))
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gradients are summed, which gloo can do, too
    return model


def pipeline(model: FEMDecoder, **kwargs) -> tuple:
    """torchtitan's pipeline by blocks, whose trainer hands over the parts of a batch: torch 2.13 takes the batch."""
    schedule, *rest = pipeline_llm(model, **kwargs)
    step = schedule.step

    def step_of_parts(*, arg_mbs: list | None, kwarg_mbs: list, target_mbs: list | None, **options) -> None:
        inputs = [torch.cat(parts) for parts in zip(*arg_mbs or ())]
        marks = {name: torch.cat([part[name] for part in kwarg_mbs]) for name in kwarg_mbs[0]}
        step(*inputs, **marks, target=None if target_mbs is None else torch.cat(target_mbs), **options)

    if "arg_mbs" not in inspect.signature(step).parameters:
        schedule.step = step_of_parts
    return schedule, *rest


def split_heads(model: FEMDecoder, mesh: DeviceMesh) -> None:
    """Split mixers and SwiGLUs by `base_model_tp_plan` and the vocabulary by its entries; all else is computed alike.

    Raises ValueError on a model whose mixers have no heads to split.
    """
    plan = model.config.fem.base_model_tp_plan
    if not any(".mixer." in name for name in plan):
        raise ValueError("tensor_parallel_degree must be 1 for a prior whose heads share what is learnt.")
    styles = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel(), "local_params": OwnHeads()}
    split = {name: styles[style] for name, style in plan.items() if not name.endswith(".theta")}
    split["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate())
    split["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    replicated = {
        name: NoParallel(use_local_output=True)
        for name, part in model.named_modules()
        if any(True for _ in part.parameters(recurse=False)) and re.sub(r"\.\d+\.", ".*.", name) not in split
    }
    parallelize_module(model, mesh, split | replicated)
    model.tie()


def split_rows(model: FEMDecoder, mesh: DeviceMesh) -> None:
    """Let the processes of the mesh share every row from now on."""
    model.sharing, model.for_good = mesh, ExitStack()
    for block in model.layers.values():
        model.for_good.enter_context(context_parallel(block.mixer, mesh))


class OwnHeads(ParallelStyle):
    """A module without input, such as beta, of whose rows each process has those of its heads."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def split(name, part, mesh):
            for key, value in list(part.named_parameters(recurse=False)):
                part.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))

        return distribute_module(module, mesh, split, None, lambda module, output, mesh: output.to_local())
