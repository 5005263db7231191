"""`fem finetune`: does FEM help a trained model? It is trained further, as it is and with FEM in its attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fem.models import replace_attention
from fem.models.surgery.head import FreeEnergyHead
from fem.provenance import provenance
from fem.tables import markdown_table, show_table
from fem_research.common.blocks import count_parameters
from fem_research.common.loops import descend
from fem_research.common.paired import by_seed, shown
from fem_research.lm.settings import ARCHITECTURES, ATTENTION, FIELDS, FinetuneRecipe
from fem_research.lm.text import Corpus, build_corpus, source_name
from fem_research.runs.run import check_output, command_line, open_run, progress
from fem_research.runs.tables import write_page, write_table


def build_model(recipe: FinetuneRecipe, vocabulary: int) -> nn.Module:
    """The original, with random weights."""
    text = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    torch.manual_seed(recipe.seed)
    if recipe.architecture == "gpt2":
        sizes = {
            "n_embd": recipe.width,
            "n_layer": recipe.layers,
            "n_head": recipe.heads,
            "n_positions": recipe.context,
        }
        model = GPT2LMHeadModel(GPT2Config(**text, **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
        model.loss_type = "ForCausalLM"  # which transformers takes too, but with a word that breaks the bar
        return model
    sizes = {"num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads, "hidden_size": recipe.width}
    grouped = {"num_key_value_heads": recipe.heads // 2, "intermediate_size": 8 * recipe.width // 3}
    return LlamaForCausalLM(LlamaConfig(**text, **sizes, **grouped, max_position_embeddings=recipe.context))


def parameter_groups(model: nn.Module, rate: float, awakening: float) -> list[dict]:
    """Parameters for an optimiser: lambda and beta of a replaced attention learn `awakening` times as fast.

    The gradient of W_lambda has the factor sigmoid'(lambda_init) = 5e-5, so that at the usual rate lambda hardly moves,
    and AdamW's usual eps of 1e-8 is as large as the root of the second moment that it is added to.
    """
    fast = {id(p) for m in model.modules() if isinstance(m, FreeEnergyHead) for p in m.temperature_parameters()}
    kept = {"params": [p for p in model.parameters() if id(p) not in fast], "lr": rate}
    boosted = {"params": [p for p in model.parameters() if id(p) in fast], "lr": awakening * rate, "eps": 1e-12}
    return [kept, boosted] if fast else [kept]


def train(
    model: nn.Module, corpus: Corpus, groups: list[dict], steps: int, batch: int, seed: int, advance: Callable[[], None]
) -> nn.Module:
    """`steps` of AdamW on training rows in an order that depends only on `seed`; returns the model in eval mode."""
    rows, order = corpus.train["input_ids"], torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    rise_and_fall = lambda step: min(1, step / 20 + 0.05) * 0.5 * (1 + math.cos(math.pi * step / steps))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rise_and_fall)
    model.train()
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (batch,), generator=order)]
        descend(model(input_ids=ids, labels=ids).loss, optimizer, schedule, clip=1.0)
        advance()
    return model.eval()


def train_original(recipe: FinetuneRecipe, corpus: Corpus, advance: Callable[[], None] = lambda: None) -> nn.Module:
    original = build_model(recipe, len(corpus.tokenizer))
    groups = parameter_groups(original, recipe.learning_rate, recipe.awakening)
    return train(original, corpus, groups, recipe.steps, recipe.batch, recipe.seed, advance)


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, rows: int = 256) -> float:
    """The loss on held-out rows, in nats per token."""
    blocks = corpus.validation["input_ids"][:rows]
    losses = [model(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in blocks.split(32)]
    return sum(losses) / len(blocks)


def finetune(recipe: FinetuneRecipe, corpus: Corpus, advance: Callable[[], None] = lambda: None) -> dict:
    """Every mixer's {"parameters", "before", "after"}: its loss before the further training, and after it by order."""
    original = train_original(recipe, corpus, advance)
    starts = {
        mixer: original if FIELDS[mixer] is None else replace_attention(copy.deepcopy(original), **FIELDS[mixer])
        for mixer in recipe.mixer_names
    }
    losses: dict = {
        mixer: {"parameters": count_parameters(start), "before": validate(start, corpus), "after": []}
        for mixer, start in starts.items()
    }
    for run in range(recipe.runs):
        for mixer, start in starts.items():
            model = copy.deepcopy(start)
            groups = parameter_groups(model, recipe.further_learning_rate, recipe.awakening)
            train(model, corpus, groups, recipe.further_steps, recipe.batch, recipe.seed + 1 + run, advance)
            losses[mixer]["after"].append(validate(model, corpus))
    return losses


def rows(found: dict) -> list[dict]:
    """A row per mixer: loss before, mean and single losses after, and how far they are below attention's."""
    attention = found[ATTENTION]["after"]
    return [
        {"mixer": mixer, "parameters": own["parameters"], "before": own["before"], "after, mean": mean(own["after"])}
        | {"after, by order": by_seed(own["after"], ".4f")}
        | {"below attention, paired": "" if mixer == ATTENTION else shown(attention, own["after"], digits=4)}
        for mixer, own in found.items()
    ]


def run(recipe: FinetuneRecipe, output: Path) -> dict:
    """The comparison, written to `output`; returns what results.json holds."""
    check_output(output, "finetune", recipe)
    build_model(recipe, recipe.vocabulary)  # an error here comes before the text is read
    corpus = build_corpus(recipe.text, recipe.vocabulary, recipe.context)
    with open_run(output, "finetune", recipe) as under_way, progress() as bars:
        further = len(recipe.mixer_names) * recipe.runs * recipe.further_steps
        bar = bars.add_task(recipe.architecture, total=recipe.steps + further)
        losses = finetune(recipe, corpus, lambda: bars.advance(bar))
        table = rows(losses)
        write_table(under_way.folder, "table", table)
        write_page(
            under_way.folder,
            f"FEM in a {ARCHITECTURES[recipe.architecture]} that was trained without it",
            f"Blocks: {recipe.layers}, of width {recipe.width}; {recipe.steps} steps of {recipe.batch} x "
            f"{recipe.context} tokens of {source_name(recipe.text)}; then "
            f"{recipe.further_steps} further steps of the model as it is and "
            "of copies after `replace_attention(preserve=True)`, on the same rows in the same order. L: free energy, "
            "T: temperature gate (lambda), G: outer gate; /r4: gates of rank 4. lambda starts near 0, and lambda and "
            f"beta learn {recipe.awakening:g} times as fast. Validation loss in nats per token; paired: order by "
            "order, ± the standard error.",
            markdown_table(table),
            provenance(command_line("finetune", recipe, FinetuneRecipe())),
        )
        results = under_way.finish({"finetune": losses})
    show_table(f"{recipe.architecture}: validation loss, nats per token", table)
    return results
