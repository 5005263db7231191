"""Run by torchrun with "heads" or "rows": models that processes share by heads, or whose rows they share, against one
process that has all of it."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import lively, small_config
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from fem import PRIORS, replace_attention
from fem.models import FEMForCausalLM
from fem.models.context import context_parallel, own_part
from fem.models.loss import IGNORED, next_tokens

warnings.filterwarnings("ignore")
VOCABULARY, TIME = 56, 24
BY_HEADS = {
    "softmax": {"mixer": {"use_conv": False}},
    "conditioner and grouped keys": {"num_key_value_heads": 4},
    "slim gates": {"mixer": {"use_conv": False, "gate_rank": 4}},
    "one gate a head": {"mixer": {"gate_rank": 0}},
    "split values": {"mixer": {"use_conv": False, "gate_rank": 4, "free_share": 0.5}},
    "gla and a window": {"layer_priors": ["gla", {"prior_type": "softmax", "window": 4}]},
} | {name: {"prior_type": name} for name in ("linear", "rnn_softmax", "rnn_decay", "mamba")}
REPLACED = {"replaced": {}, "replaced, slim gates": {"gate_rank": 4}}
BY_ROWS = {f"{name}, {'with' if conv else 'without'} conditioner": {"prior_type": name, "mixer": {"use_conv": conv}}
           for name in PRIORS for conv in (True, False)}  # fmt: skip
BY_ROWS |= {
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
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 8}
    return lively(FEMForCausalLM(small_config(**sizes | fields)), size=0.1)


def replaced(fields: dict) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2, intermediate_size=96)
    return lively(replace_attention(AutoModelForCausalLM.from_config(config), **fields), size=0.1)


def draw(time: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, time), generator=torch.Generator().manual_seed(1))


def step(model, ids, engine: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, the loss, and one step of gradient descent."""
    model.set_attn_implementation(engine)
    with torch.no_grad():
        logits = model(ids).logits
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return logits, loss.detach()


def by_heads(name: str, engine: str, scratch: Path) -> dict:
    one, folder = replaced(REPLACED[name]) if name in REPLACED else model(BY_HEADS[name]), scratch / name
    if dist.get_rank() == 0:
        one.save_pretrained(folder)
    dist.barrier()
    dealt = DistributedConfig(tp_size=dist.get_world_size())
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=dealt)
    ids = draw(11)
    (logits, loss), (split_logits, split_loss) = step(one, ids, engine), step(split, ids, engine)
    whole = {key: getattr(x, "full_tensor", lambda x=x: x)() for key, x in split.state_dict().items()}
    local = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in split.parameters())
    return {
        "logits": (logits - split_logits).abs().max().item(),
        "loss": (loss - split_loss).abs().item(),
        "weights": max((whole[key] - x).abs().max().item() for key, x in one.state_dict().items()),
        "same names": whole.keys() == one.state_dict().keys(),
        "share": local / sum(p.numel() for p in one.parameters()),
    }


def rows(kind: str) -> dict[str, torch.Tensor]:
    """Two rows: plain, or padded on either side, or of documents whose borders are not those of the parts."""
    given = {"input_ids": draw(TIME)}
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


def by_rows(fields: dict, kind: str, mesh, checkpointing: bool = False) -> dict:
    one, given = model({"hidden_size": 32, "num_attention_heads": 4} | fields), rows(kind)
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
    mesh, scratch = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",)), Path(sys.argv[2])
    if sys.argv[1] == "heads":
        cases = [(name, "exact") for name in BY_HEADS]
        cases += [(name, "sdpa") for name in ("softmax", "slim gates", "split values", *REPLACED)]
        found = {f"{name}, {engine}": by_heads(name, engine, scratch) for name, engine in cases}
    else:
        found = {name: by_rows(fields, "plain", mesh) for name, fields in BY_ROWS.items()}
        for kind in ("padded", "documents"):
            for name in ("softmax", "gla", "rnn_softmax", "mamba"):
                found[f"{name}, {kind}"] = by_rows({"prior_type": name}, kind, mesh)
        found["checkpointing"] = by_rows(BY_ROWS["hybrid"], "plain", mesh, checkpointing=True)
    if dist.get_rank() == 0:
        (scratch / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
