"""FEM language models in torchtitan: `--module fem.train.titan --config debug` (`config_registry` lists the names)."""

import torch.distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 lacks the name, which torchtitan 0.3 calls after a step
    torch.distributed.set_timeout = _set_pg_timeout
