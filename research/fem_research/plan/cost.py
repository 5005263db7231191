"""Bytes and seconds of a step on one GPU: what is counted, what crosses wires, and what the roofline allows."""

from __future__ import annotations

from dataclasses import replace

from fem.train.throughput import training_flops
from fem_research.plan.model import cache, config_of, kept, style_of, weights
from fem_research.plan.settings import CARDS, Job

NODE = 8  # GPUs of a machine, which NVLink joins
USABLE = 0.9  # of a card's memory: what CUDA, NCCL and the allocator take is not counted; an assumption
REACHED = 0.4  # of the roofline's speed, in `likely`: an assumption, as nobody has measured FEM on these cards
CHUNKS = 8  # in which torchtitan's loss makes the logits of a row (ChunkedLossWrapper.num_chunks)


def memory(job: Job) -> dict[str, int]:
    """Bytes of the GPU that holds most, by what they are.

    weights, gradients: 4 bytes a number of the shard; optimiser: AdamW's two moments, 8 bytes. gathered: bfloat16
    weights of the head, embeddings and two blocks (FSDP gathers one ahead), and the float32 gradients of a block before
    they are scattered. activations: `kept` bytes a token of every block; with recompute the input of every block and
    all of one block. Under tensor parallelism what belongs to heads and SwiGLU shrinks, and a sixth of the softmax
    block's (inputs of norms and maps, read whole by each) does not: it is counted as if it did not shrink at all.
    logits: a chunk of the loss, in bfloat16 and float32, with its gradient.
    """
    held = weights(job.size, job.form, job.tensor)
    shard = sum(w.shard(job.shards) for w in held)
    config = config_of(job.size, job.form)
    block = sum(w.count for w in held if w.name.startswith("model.layers.0."))
    ends = sum(w.count for w in held if not w.name.startswith("model.layers."))
    block_bytes, input_bytes = kept(job.size, job.form)
    layers = config.num_hidden_layers
    whole = 10 * config.hidden_size  # bytes a token: residual stream, two norms' inputs and outputs, in bfloat16
    block_bytes = whole + (block_bytes - whole) // job.tensor
    tokens = job.here
    activations = tokens * (layers * input_bytes + block_bytes if job.recompute else layers * block_bytes)
    return {
        "weights": 4 * shard,
        "optimiser": 8 * shard,
        "gradients": 4 * shard,
        "gathered": 2 * (ends + 2 * block) + 4 * block,
        "activations": activations,
        "logits": tokens // CHUNKS * config.vocab_size // job.tensor * (2 + 4 + 4),
    }


def fits(job: Job) -> bool:
    return sum(memory(job).values()) <= USABLE * CARDS[job.card].memory


def longest(job: Job) -> int:
    """The longest row that fits one at a time on the same GPUs, of doublings of 1024 tokens or, from there, the next
    multiple of rows_over; 0: none."""
    first = job.rows_over * -(-1024 // job.rows_over)
    lengths = (first << k for k in range(16))
    rows = (replace(job, context=t, micro=1, tokens=t * job.groups) for t in lengths)
    return max((row.context for row in rows if fits(row)), default=0)


def advice(job: Job) -> str:
    """One sentence: whether the job fits, and the least change after which it does."""
    need, card = sum(memory(job).values()) / 1e9, CARDS[job.card].memory / 1e9
    if fits(job):
        return f"It needs {need:.1f} GB of {card:.0f} on each GPU, and fits."
    halves = [job.micro >> k for k in range(job.micro.bit_length())]
    changes = [{"recompute": again, "micro": micro} for again in (job.recompute, True) for micro in halves]
    changes += [changes[-1] | {"tensor": t} for t in (2, 4, 8)]
    changes += [changes[-1] | {"tensor": 1, "rows_over": c} for c in (2, 4, 8, 16, 32)]
    for change in changes:
        try:
            other = replace(job, **change)
        except ValueError:
            continue
        if fits(other):
            said = ", ".join(f"{name}={value}" for name, value in change.items() if getattr(job, name) != value)
            then = sum(memory(other).values()) / 1e9
            return (
                f"It needs {need:.1f} GB of {card:.0f} on each GPU and does not fit: with {said} it needs {then:.1f}."
            )
    return f"It needs {need:.1f} GB of {card:.0f} on each GPU, and no change of these fits it: take more GPUs."


def messages(job: Job) -> dict[str, int]:
    """Bytes of the whole tensors of all collectives in a step, as the GPU's group sees them.

    all-gather: bfloat16 weights, in a pass every block twice (forward, backward), and the embeddings, which are the
    head, three times (forward, loss, backward). reduce-scatter: float32 gradients, of every block once, of the weights
    of the head twice (of the loss, of the embeddings). all-reduce (tensor): see `_tensor_messages`. rows: keys,
    values and two integers a token (mask, document) of softmax layers, gathered in the forward pass (and
    again where blocks are recomputed), gradients of keys and values summed and scattered in the backward pass; the
    states that scans hand to a neighbour are small and not counted.
    """
    held = weights(job.size, job.form, job.tensor)
    config = config_of(job.size, job.form)
    blocks = sum(w.shard(job.shards) for w in held if w.name.startswith("model.layers.")) * job.shards
    head = next(w.shard(job.shards) for w in held if w.name == "model.embed_tokens.weight") * job.shards
    ends = sum(w.shard(job.shards) for w in held if not w.name.startswith("model.layers.")) * job.shards
    found = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0, "rows": 0}
    if job.shards > 1:
        found["all-gather"] = job.passes * 2 * (2 * blocks + 3 * ends)
        found["reduce-scatter"] = job.passes * 4 * (blocks + head + ends)
    if job.tensor > 1:
        found["all-reduce"] = job.passes * _tensor_messages(job)
    if job.rows_over > 1:
        softmax = [m for m in config.mixer_configs() if m.prior_type == "softmax"]
        pairs = sum(m.kv_heads * (m.key_width + m.value_width) for m in softmax) // job.tensor
        token = 2 * pairs * (2 + job.recompute) + 2 * 8 * len(softmax) * (1 + job.recompute)
        found["rows"] = job.passes * job.micro * job.context * token
    return found


def wires(job: Job) -> dict[str, str]:
    """The wire of each kind of `messages`: the slowest that its group of GPUs needs."""
    spans = dict.fromkeys(("all-gather", "reduce-scatter"), job.gpus)
    spans |= {"all-reduce": job.tensor, "rows": job.tensor * job.rows_over}
    return {kind: "NVLink" if span <= NODE else "network" for kind, span in spans.items()}


def _tensor_messages(job: Job) -> int:
    """Bytes of the all-reduces of a pass: outputs of row-parallel maps and embeddings in the forward pass (of blocks
    twice where they are recomputed), gradients of the inputs of every column-parallel map in the backward pass, and
    three float32 numbers a token in the loss."""
    config = config_of(job.size, job.form)
    outputs = inputs = 0
    for weight in weights(job.size, job.form):
        style = style_of(weight.name, config)
        if not weight.name.startswith("model.layers.") or len(weight.shape) == 1 or weight.name.endswith("theta"):
            continue
        outputs += weight.shape[0] if style == "rowwise" else 0
        inputs += weight.shape[1] if style == "colwise" else 0
    ends = 2 * config.hidden_size
    return job.here * (2 * (outputs * (1 + job.recompute) + inputs + ends) + 3 * 4)


def flops_per_token(job: Job) -> int:
    """As `fem train` counts its utilisation: without recomputation."""
    count = sum(w.count for w in weights(job.size, job.form))
    return training_flops(count, config_of(job.size, job.form), job.context)


def prediction(job: Job) -> dict[str, float]:
    """Seconds of a step at best (the roofline), and what follows from them. Nothing of it is measured.

    arithmetic: operations over the card's peak, a third more where blocks are recomputed. memory: weights read in
    bfloat16 three times a pass, the shard's weights, moments and gradients once read and once written, and what is
    kept for the backward pass once written and once read (twice where recomputed). A GPU does the slower of the two.
    Collectives move (n - 1) / n of their bytes, all-reduces twice that, by `_link`; FSDP's overlap with the arithmetic,
    those of tensor and context parallelism do not.
    """
    card, sent = CARDS[job.card], messages(job)
    held = weights(job.size, job.form, job.tensor)
    tokens = job.tokens / job.gpus
    arithmetic = tokens * flops_per_token(job) * (4 / 3 if job.recompute else 1) / card.flops
    block_bytes, _ = kept(job.size, job.form)
    layers = config_of(job.size, job.form).num_hidden_layers
    moved = job.passes * 3 * 2 * sum(w.count for w in held) + 2 * 16 * sum(w.shard(job.shards) for w in held)
    moved += job.passes * job.here * layers * block_bytes // job.tensor * 2 * (2 if job.recompute else 1)
    memory_time = moved / card.bandwidth
    ring = lambda n: (n - 1) / n  # noqa: E731
    fsdp = (sent["all-gather"] + sent["reduce-scatter"]) * ring(job.shards) / _link(job, job.gpus)
    exposed = 2 * sent["all-reduce"] * ring(job.tensor) / _link(job, job.tensor)
    exposed += sent["rows"] * ring(job.rows_over) / _link(job, job.tensor * job.rows_over)
    best = max(arithmetic, memory_time, fsdp) + exposed
    likely = max(max(arithmetic, memory_time) / REACHED, fsdp) + exposed
    return {
        "arithmetic": arithmetic,
        "memory": memory_time,
        "sharding": fsdp,
        "splitting": exposed,
        "step": best,
        "utilisation": tokens * flops_per_token(job) / card.flops / best,
        "likely step": likely,
        "likely tokens a day": 86400 / likely * job.tokens,
    }


def _link(job: Job, span: int) -> float:
    """Bytes a second of a ring over neighbours among `span` GPUs: NVLink, or, beyond a machine, the ports of those of
    its GPUs that belong to one ring, as NCCL's rings enter a machine by every port."""
    card = CARDS[job.card]
    return card.nvlink if span <= NODE else min(card.nvlink, NODE // min(job.tensor, NODE) * card.network)


def cache_bytes(size: str, form: str, tokens: int) -> int:
    """Bytes of the state that serving keeps for one row after so many tokens, in bfloat16."""
    stays, grows = cache(size, form)
    return stays + grows * tokens
