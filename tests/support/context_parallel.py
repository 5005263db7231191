"""Run by torchrun: models whose rows are split over the processes, against one process that reads whole rows."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import lively
from torch.distributed.device_mesh import init_device_mesh

from fem import PRIORS
from fem.models import FEMConfig, FEMForCausalLM
from fem.models.context import context_parallel, own_part
from fem.models.loss import IGNORED, next_tokens

warnings.filterwarnings("ignore")
TIME = 24
CASES = {f"{name}, {'with' if conv else 'without'} conditioner": {"prior_type": name, "mixer": {"use_conv": conv}}
         for name in PRIORS for conv in (True, False)}  # fmt: skip
CASES |= {
    "grouped keys and a window": {"num_key_value_heads": 2, "mixer": {"window": 7, "use_conv": False}},
    "hybrid": {"layer_priors": ["gla", "softmax", "mamba"], "num_hidden_layers": 3},
    "decay per channel": {"prior_type": "gla", "mixer": {"decay": "channel"}},
    "the mean alone, not normalised": {
        "prior_type": "gla",
        "mixer": {"use_temperature": False, "use_lse": False, "normalize": False},
    },
    "the free energy alone": {"prior_type": "rnn_decay", "mixer": {"use_temperature": False, "use_lse": True}},
    "split values": {"layer_priors": ["linear", "softmax"], "mixer": {"free_share": 0.5}},
    "capped": {"layer_priors": ["linear", "softmax"], "mixer": {"value_logexp_cap": 2.0}},
}


def model(fields: dict) -> FEMForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return lively(FEMForCausalLM(FEMConfig(**{**sizes, "intermediate_size": 16, **fields})), size=0.1)


def rows(kind: str) -> dict[str, torch.Tensor]:
    """Two rows: plain, or padded on either side, or of documents whose borders are not those of the parts."""
    of = torch.Generator().manual_seed(1)
    given = {"input_ids": torch.randint(1, 40, (2, TIME), generator=of)}
    if kind == "padded":
        mask = torch.ones(2, TIME, dtype=torch.long)
        mask[0, :13], mask[1, 15:], mask[1, 3] = 0, 0, 0
        given["attention_mask"] = mask
    if kind == "documents":
        given["segment_ids"] = torch.tensor([[0] * 5 + [1] * 14 + [0] * 5, [3] * 12 + [4] * 12])
    return given


def learn(model: FEMForCausalLM, given: dict, targets: torch.Tensor, items: int) -> tuple[torch.Tensor, list]:
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits
    model.train()(**given, shift_labels=targets, num_items_in_batch=items).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.eval()
    return logits, gradients


def compare(fields: dict, kind: str, mesh, checkpointing: bool = False) -> dict:
    one, given = model(fields), rows(kind)
    if checkpointing:
        one.gradient_checkpointing_enable()
    targets = next_tokens(given["input_ids"])
    if kind == "padded":
        targets = targets.masked_fill(given["attention_mask"] == 0, IGNORED)
    items = int((targets != IGNORED).sum())
    wanted, learnt = learn(one, given, targets, items)
    part = {name: own_part(x, mesh) for name, x in given.items()}
    with context_parallel(one, mesh):
        logits, gradients = learn(one, part, own_part(targets, mesh), items)
    for gradient in gradients:
        dist.all_reduce(gradient)
    seen = own_part(given.get("attention_mask", torch.ones(2, TIME)), mesh).bool()
    off = torch.zeros(2)
    if seen.any():
        off[0] = (logits - own_part(wanted, mesh))[seen].abs().max()
    largest = max(gradient.abs().max() for gradient in learnt)
    off[1] = max((one - other).abs().max() for one, other in zip(gradients, learnt, strict=True)) / largest
    dist.all_reduce(off, dist.ReduceOp.MAX)
    return {"logits": off[0].item(), "gradients": off[1].item()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    found = {name: compare(fields, "plain", mesh) for name, fields in CASES.items()}
    for kind in ("padded", "documents"):
        for name in ("softmax", "gla", "rnn_softmax", "mamba"):
            found[f"{name}, {kind}"] = compare({"prior_type": name}, kind, mesh)
    found["checkpointing"] = compare(CASES["hybrid"], "plain", mesh, checkpointing=True)
    if dist.get_rank() == 0:
        Path(sys.argv[1], "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
