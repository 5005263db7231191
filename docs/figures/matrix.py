"""Which prior can do what, found by trying: the table of docs/limits.md.

python docs/figures/matrix.py
"""

from __future__ import annotations

import torch

from fem import PRIORS, FreeEnergyMixer, FreeEnergyMixerConfig
from fem.tables import markdown_table

TIME = {"softmax": "T²"}


def layer(prior: str, **fields) -> FreeEnergyMixer:
    return FreeEnergyMixer(FreeEnergyMixerConfig(n_embd=32, n_head=4, prior_type=prior, **fields)).eval()


def works(attempt) -> bool:
    try:
        attempt()
    except (ValueError, TypeError):
        return False
    return True


def streams(prior: str) -> None:
    x, mixer = torch.randn(2, 7, 32), layer(prior)
    whole, (first, state) = mixer(x), mixer(x[:, :4], return_state=True)
    rest, _ = mixer(x[:, 4:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=1e-4, atol=1e-5)


def packs(prior: str) -> None:
    x, mixer = torch.randn(1, 7, 32), layer(prior)
    ids, mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), torch.ones(1, 7, dtype=torch.bool)
    packed = mixer(x, attention_mask=mask, segment_ids=ids)
    torch.testing.assert_close(packed[:, 3:], mixer(x[:, 3:]), rtol=1e-4, atol=1e-5)


def served(prior: str) -> tuple[bool, bool]:
    """Whether vLLM serves it, by its attention or in its slots for states, and transformers' continuous batching."""
    from fem.models import FEMConfig
    from fem.models.engines.obstacles import obstacle, obstacle_to_states

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 8}
    config = FEMConfig(prior_type=prior, mixer={"use_conv": False}, **sizes)
    by_attention = obstacle(config) is None
    return by_attention or obstacle_to_states(config) is None, by_attention


def row(prior: str) -> dict[str, str]:
    x = torch.randn(1, 5, 32)
    by_vllm, by_batching = served(prior)
    can = {
        "stream": works(lambda: streams(prior)),
        "both directions": works(lambda: layer(prior, causal=False)(x)),
        "padding, documents": works(lambda: packs(prior)),
        "window": works(lambda: layer(prior, window=3)(x)),
        "grouped heads": works(lambda: layer(prior, n_kv_head=2)(x)),
        "vLLM": by_vllm,
        "batching": by_batching,
    }
    answers = {what: "yes" if it_can else "" for what, it_can in can.items()}
    return {"prior": f"`{prior}`", "cost": TIME.get(prior, "T"), **answers}


def table() -> str:
    return markdown_table([row(prior) for prior in PRIORS])


if __name__ == "__main__":
    print(table(), end="")
