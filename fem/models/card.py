"""The model card of saved weights: how to load them, and what the model is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedModel

from fem.extras import how_to_install
from fem.models.arguments import check_language_model

TEMPLATE = """---
library_name: transformers
pipeline_tag: text-generation
tags: [free-energy-mixer, fem, {priors}]
---

# {name}

A language model whose layers are Free Energy Mixers (Lu & Yang, ICLR 2026): every channel of a head picks its own
token by a free energy over the values.

```python
import fem.models  # registers the architecture; {install}
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

| | |
|---|---|
{rows}
"""


def write_model_card(model: PreTrainedModel, folder: str | Path, results: Mapping[str, object] | None = None) -> Path:
    """Write README.md, the model card, beside the weights that save_pretrained left in `folder`, and return its path.

    results: what was measured, such as {"validation loss (nats)": 3.21}, one row of the card's table each.
    """
    check_language_model(model)
    config, folder = model.config, Path(folder)
    priors = [mixer.prior_type for mixer in config.mixer_configs()]
    layers = ", ".join(f"{len(list(same))} {prior}" for prior, same in groupby(priors))
    facts = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "layers, by prior": layers,
        "width, heads": f"{config.hidden_size}, {config.num_attention_heads}",
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings or "unlimited",
        **(results or {}),
    }
    card = TEMPLATE.format(
        name=folder.name,
        install=how_to_install("lm"),
        priors=", ".join(dict.fromkeys(priors)),
        rows="\n".join(f"| {fact} | {value} |" for fact, value in facts.items()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    path.write_text(card, encoding="utf-8")
    return path
