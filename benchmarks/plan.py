"""What the paper's language models would cost on 8, 64 and 512 GPUs: writes research/results/checks/plan.{md,json}.

make card && PYTHONPATH=.:research .card/run benchmarks/plan.py       # about a minute of one core
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import card
import torch
from measure import save

from fem import parameter_groups
from fem.models import FEMForCausalLM
from fem.tables import markdown_table
from fem_research.plan.cost import REACHED, Job, advice, cache_bytes, fits, longest, memory, messages, prediction, wires
from fem_research.plan.model import FORMS, block_of, config_of, kept, saved, weights

SIZES, GPUS, CONTEXTS, CACHES = ("340m", "1.3b"), (8, 64, 512), (4096, 131072), (4096, 32768, 131072)
SOFTMAX = ("full", "slim", "split")
COUNTED = json.loads(Path("research/results/checks/titan_cpu.json").read_text())["results"]["collectives"]
LENGTH = 2048  # tokens of the row on which activations are checked

NOTE = """Everything here is counted or predicted on a CPU; **no GPU has run any of it**, and times are predictions.
Memory, bytes and cache are those of `fem plan`, which takes other sizes, cards and splits;
its formulas stand in `research/fem_research/plan/cost.py` and below. Cards: H100 SXM, 80 GB. A step has the
paper's 0.5M tokens. Form: the softmax prior with the paper's gates (full), slim ones or split values, GLA, and
plain attention; all of the same number of parameters.

## Memory of a GPU

1.3B parameters on 64 GPUs, two rows of 4096 tokens at a time, GB:

{memory}
Weights, moments and gradients are float32 shards of FSDP2; gathered are the bfloat16 weights in use. Kept:
what autograd keeps for the backward pass, with and without computing blocks again. Longest row: of doublings, one at
a time and not shared; GPUs that share it hold as many times its tokens.

## 8, 64 and 512 GPUs

One row at a time, blocks computed again. Where a step has fewer rows than there are GPUs, several of them
share every layer (tensor parallel) or a row (context parallel). "At best" is the roofline; "likely" supposes
{reached:.0%} of it for arithmetic and memory, which is an assumption.

{jobs}
All of them fit. With nothing computed again these do not, and the plan says what to change:

{unfit}

## What the serving cache holds

MB of one row by its length, bfloat16, all layers, counted from the state of a layer as on a card, in the exact form
([in an engine](../../../docs/serving.md) keys and values are equally wide, so that slim gates hold more):

{caches}
## How it is worked out

* Parameters: counted on the device `meta`; shards as FSDP2 cuts them, by the first dimension, padded.
* AdamW: two float32 numbers a parameter, beside float32 weights and gradients: 16 bytes a parameter over all shards
  (the accounting of ZeRO, [Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), with float32 gradients).
* Activations: all blocks of memory that autograd keeps of one block, in bfloat16, counted on this CPU as the
  difference of a row of 128 and one of 64 tokens; with recomputation the inputs of all blocks and all of one ([Chen
  et al. 2016](https://arxiv.org/abs/1604.06174)). Norms are counted as a card's kernel keeps them. Beside it below:
  what the same block keeps on the [card that is not there](../../../docs/card.md), an H100 without its arithmetic.
  There slim gates widen queries and keys to the values', and plain attention keeps its output in bfloat16, which a CPU
  keeps in float32.
* Operations: 6 N + 3 T sum(d_qk + 2 d_v) a token, d_v once where values are split, as `fem train` counts its MFU
  ([Kaplan et al. 2020](https://arxiv.org/abs/2001.08361), with causal pairs); a third more where blocks are computed
  again.
* Messages: FSDP2 gathers every block twice and the embeddings, which are the head, three times in each pass, and
  scatters every gradient once (the head's twice); tensor parallelism sums the outputs of two maps of a block and
  the gradients of the inputs of each of its split maps. GPUs that share a row gather keys, values
  and three integers a token of every softmax layer, and scatter gradients of keys and values. Equal to the byte to
  what torchtitan did on torch's fake backend ([page](titan_cpu.md)), sums over its layouts below.
* Time: the slowest of arithmetic at the card's peak, memory at its bandwidth and FSDP's messages, which overlap;
  messages of tensor and context parallelism are added. A ring moves (n - 1) / n of the bytes ([NCCL's bus
  bandwidth](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)). Peaks and bandwidths: vendors'
  data sheets.

## What was checked here

On the preset `tiny` (four blocks of width 128); bytes kept of one block of `340m`, on a row of {length} tokens."""


def memories() -> list[dict]:
    rows = []
    gb = lambda *sizes: f"{sum(sizes) / 1e9:.2f}"  # noqa: E731
    for form in FORMS:
        plain, again = (memory(Job(form=form, micro=2, recompute=r)) for r in (False, True))
        shards = gb(*(again[name] for name in ("weights", "optimiser", "gradients")))
        rows.append(
            {"form": form, "weights, moments, gradients": shards, "gathered": gb(again["gathered"])}
            | {"logits": gb(again["logits"]), "kept": gb(plain["activations"])}
            | {"kept, computed again": gb(again["activations"]), "in all": gb(*plain.values())}
            | {"in all, computed again": gb(*again.values())}
            | {"longest row": f"{longest(Job(form=form, recompute=False)) // 1024}k"}
            | {"longest row, computed again": f"{longest(Job(form=form)) // 1024}k"}
        )
    return rows


def jobs() -> tuple[list[dict], list[dict]]:
    """The table of all jobs, and what the plan says of those that do not fit with nothing computed again."""
    rows, unfit = [], []
    for size, form, context, gpus in product(SIZES, SOFTMAX, CONTEXTS, GPUS):
        job = _dealt(size, form, context, gpus)
        told, sent, by = prediction(job), messages(job), wires(job)
        over = {wire: sum(sent[kind] for kind in sent if by[kind] == wire) / 1e9 for wire in ("NVLink", "network")}
        name = {"model": size, "form": form, "context": f"{context // 1024}k", "GPUs": gpus}
        rows.append(
            name
            | {"share a layer": job.tensor, "share a row": job.rows_over}
            | {"GB of a GPU": f"{sum(memory(job).values()) / 1e9:.1f}"}
            | {f"GB a step over {wire}": f"{sent:.1f}" for wire, sent in over.items()}
            | {"s, at best": f"{told['step']:.3f}", "MFU, at best": f"{told['utilisation']:.0%}"}
            | {"s, likely": f"{told['likely step']:.3f}"}
            | {"B tokens a day, likely": f"{told['likely tokens a day'] / 1e9:,.0f}"}
        )
        print(rows[-1], flush=True)
        if not fits(kept_whole := replace(job, recompute=False)):
            unfit.append(name | {"what the plan says": advice(kept_whole)})
    return rows, unfit


def _dealt(size: str, form: str, context: int, gpus: int) -> Job:
    """The job with as little splitting as its rows allow."""
    splits = [(t, c) for c in (1, 2, 4, 8, 16, 32, 64) for t in (1, 2, 4, 8) if gpus % (t * c) == 0]
    for tensor, rows_over in sorted(splits, key=lambda s: s[0] * s[1]):
        try:
            job = Job(size=size, form=form, context=context, gpus=gpus, tensor=tensor, rows_over=rows_over)
        except ValueError:
            continue
        if fits(job):
            return job
    raise ValueError(f"no split fits {size}, {form}, at {context} on {gpus} GPUs.")


def caches() -> list[dict]:
    mb = lambda *of: f"{cache_bytes(*of) / 1e6:,.0f}"  # noqa: E731
    return [
        {"model": size, "form": form} | {f"{tokens // 1024}k": mb(size, form, tokens) for tokens in CACHES}
        for size in SIZES
        for form in FORMS
    ]


def checks() -> list[dict]:
    rows = []
    for form in FORMS:
        config = config_of("tiny", form)
        torch.manual_seed(0)
        model = FEMForCausalLM(config)
        ids = torch.randint(0, 99, (1, 128))
        planned, built = sum(w.count for w in weights("tiny", form)), sum(p.numel() for p in model.parameters())
        rows.append(_check("parameters", form, planned, built))
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.1))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        moments = [x for s in optimizer.state.values() for name, x in s.items() if name != "step"]
        rows.append(_check("bytes of AdamW's moments", form, 8 * planned, sum(x.nbytes for x in moments)))
        block = block_of("340m", form).cuda()
        x = torch.randn(1, LENGTH, config_of("340m", form).hidden_size, dtype=torch.bfloat16, device="cuda")
        rows.append(_check("bytes kept by a block", form, LENGTH * kept("340m", form)[0], saved(block, x)))
        for kind in messages(Job(form=form)):
            layouts = [row for row in COUNTED if row["form"] == form]
            planned, counted = (sum(row[f"{kind}, {how}"] for row in layouts) for how in ("planned", "counted"))
            if counted:
                rows.append(_check(f"bytes of messages: {kind}", form, planned, counted))
    return rows


def _check(what: str, form: str, planned: int, counted: int) -> dict:
    return {"what": what, "form": form, "planned": planned, "counted": counted} | {
        "error": f"{planned / counted - 1:+.1%}" if planned != counted else "0"
    }


def main() -> None:
    every, unfit = jobs()
    found = {"memory": memories(), "jobs": every, "unfit": unfit, "caches": caches()}
    rows = checks()
    tables = {name: markdown_table(table) for name, table in found.items()}
    note = NOTE.format(**tables, reached=REACHED, length=LENGTH)
    save("research/results/checks/plan", "What a training would cost", found | {"checks": rows}, rows, note)


if __name__ == "__main__":
    torch.set_num_threads(1)
    card.pose()
    main()
