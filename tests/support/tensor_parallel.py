"""Run by torchrun: logits, loss and a training step of models split over the processes, against one process."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import lively
from transformers.distributed import DistributedConfig

from fem.models import FEMConfig, FEMForCausalLM

warnings.filterwarnings("ignore")
FAMILIES = {
    "softmax": {"mixer": {"use_conv": False}},
    "conditioner and grouped keys": {"num_key_value_heads": 4},
    "slim gates": {"mixer": {"use_conv": False, "gate_rank": 4}},
    "one gate a head": {"mixer": {"gate_rank": 0}},
    "split values": {"mixer": {"use_conv": False, "gate_rank": 4, "free_share": 0.5}},
    "gla and a window": {"layer_priors": ["gla", {"prior_type": "softmax", "window": 4}]},
    "linear": {"prior_type": "linear"},
    "rnn_softmax": {"prior_type": "rnn_softmax"},
    "rnn_decay": {"prior_type": "rnn_decay"},
    "mamba": {"prior_type": "mamba"},
}


def model(fields: dict):
    torch.manual_seed(0)
    sizes = {"vocab_size": 56, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    return lively(FEMForCausalLM(FEMConfig(**{**sizes, "intermediate_size": 32, **fields})), size=0.1)


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


def compare(name: str, engine: str, scratch: Path) -> dict:
    one, folder = model(FAMILIES[name]), scratch / name.replace(" ", "_")
    if dist.get_rank() == 0:
        one.save_pretrained(folder)
    dist.barrier()
    split = FEMForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=dist.get_world_size()))
    ids = torch.randint(1, 56, (2, 11), generator=torch.Generator().manual_seed(1))
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scratch = Path(sys.argv[1])
    cases = [(name, "exact") for name in FAMILIES]
    cases += [(name, "sdpa") for name in ("softmax", "slim gates", "split values")]
    found = {f"{name}, {engine}": compare(name, engine, scratch) for name, engine in cases}
    if dist.get_rank() == 0:
        (scratch / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
