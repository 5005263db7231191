"""Does torchtitan train FEM as plain PyTorch does, on a CPU: losses, weights, tokens, and after kill -9?

make test-titan          # builds an environment of its own and writes research/results/titan_cpu.{json,md}
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

PAGE = "research/results/titan_cpu"
STEPS, CONTEXT, BATCH, MICRO, SEED, NEW = 20, 128, 4, 2, 0, 16
RATE, DECAY, BETA2 = 1e-3, 0.1, 0.95  # those of the recipe `debug`
PROMPT = list(range(7, 19))
TOLERANCE = 1e-5  # of the loss, in nats; sums of float32 in another order differ by about 1e-6 where nothing grows
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
ULP = 2.0**-24  # half the distance of neighbouring numbers of float32, relative: what one rounding does to a weight
CASES = {  # name: configuration, processes, further arguments
    "softmax, one process": ("debug", 1, ()),
    "softmax, two shards (FSDP2)": ("debug", 2, ()),
    "softmax, heads over two (tensor parallel)": ("debug", 2, ("--parallelism.tensor-parallel-degree", "2")),
    "slim, two shards, blocks computed again": ("debug_slim", 2, ("activation-checkpoint:full",)),
    "slim, heads over two": ("debug_slim", 2, ("--parallelism.tensor-parallel-degree", "2")),
    "GLA, two shards": ("debug_gla", 2, ()),
}
COUNTED = [  # form, GPUs, tensor parallel, blocks computed again; a batch of 2 rows on each GPU
    *(("full", 8, 1, False), ("full", 64, 1, True), ("slim", 8, 1, True), ("gla", 8, 1, False)),
    *(("full", 2, 2, False), ("slim", 8, 2, True), ("gla", 16, 4, False)),
]
PRESETS = {"debug": "fem-sm-tiny", "debug_slim": "fem-sm-slim-tiny", "debug_gla": "fem-gla-tiny"}

NOTE = """torchtitan 0.3.0 trains a model of 1.3M parameters (preset `tiny`, float32) for 20 steps from the
safetensors of a `FEMForCausalLM`, over gloo, by its own trainer, data loader, checkpoints and our plan
(`fem.train.titan`). Beside it, a loop of plain PyTorch on the same rows. Loss: the largest difference over
all steps, in nats; the promise is 1e-5, or twice what plain training itself differs by after every starting
weight has been moved by one rounding of float32 (the next column): the ReLU of GLA's features makes more of
a rounding. Weights: of what torchtitan saved last, read by `from_pretrained`. Tokens: 16 greedy ones, by
`generate` from those files and by torchtitan's own model.

Bytes of all collectives of one forward and backward pass, the second (2 rows of 128 tokens on each GPU,
bfloat16 weights, float32 gradients), counted on torch's fake backend under torchtitan, and as `fem plan`
plans them:

{table}
torchtitan's `transformers_modeling_backend`, given a FEM checkpoint as it is, stops while it builds the
model: `AttributeError: 'Config' object has no attribute 'mixer_configs'` (it hands the model a
configuration of its own with the fields of ours and none of the methods). Beyond that it replaces every
model's attention by FlexAttention over keys and values, knows no gates, no conditioner and no scans, and
starts weights by the names of Llama's parts. So FEM is a torchtitan model of its own. torch 2.13 lacks
`torch.distributed.set_timeout`, which torchtitan 0.3.0 calls after its first step; `fem.train.titan`
supplies it. Not run: pipelines, `torch.compile`, float8, any GPU.

`make test-titan` writes this page. The trainings took {minutes} minutes on two cores that other work shared; the time
of the installation is not in them."""


def write_tokens(folder: Path) -> None:
    """Documents of noisy repetitions, as `fem train` writes them."""
    folder.mkdir()
    random = np.random.default_rng(SEED)
    count = CONTEXT * 256
    period = np.resize(random.integers(1, 300, 64), count)
    tokens = np.where(random.random(count) < 0.2, random.integers(1, 300, count), period).astype(np.uint32)
    ends = np.sort(random.choice(np.arange(1, count), 200, replace=False))
    tokens[ends - 1] = 0
    tokens.tofile(folder / "tokens.bin")
    np.save(folder / "ends.npy", ends)


def plain(start: Path, tokens: Path, moved: float = 0.0) -> tuple[list[float], torch.nn.Module]:
    """Losses of the same rows in a loop of plain PyTorch, and the model after it.

    moved: by how much each starting weight is changed at random, relative to it.
    """
    from fem import parameter_groups
    from fem.models import FEMForCausalLM
    from fem.train.packing import Share, ShuffledRows, TokenFile

    model = FEMForCausalLM.from_pretrained(start).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + moved * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=RATE, betas=(0.9, BETA2))
    file = TokenFile.open(tokens)
    rows = iter(ShuffledRows(file, CONTEXT, file.rows(CONTEXT), Share(BATCH, BATCH), 42))
    losses = []
    for _ in range(STEPS):
        batch = [next(rows) for _ in range(BATCH)]
        loss = model(**{name: torch.stack([row[name] for row in batch]) for name in batch[0]}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.eval()


def command(start: Path, tokens: Path, out: Path, config: str, processes: int, further: tuple[str, ...]) -> list[str]:
    options = {
        "dump-folder": out,
        "dataloader.dataset-path": tokens,
        "lr-scheduler.warmup-steps": 0,
        "lr-scheduler.decay-ratio": 0.0,  # a constant rate
        "checkpoint.interval": 5,
        "checkpoint.initial-load-path": start,
        "training.steps": STEPS,
    }
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *(__file__, "worker", "--module", "fem.train.titan", "--config", config, "--checkpoint.enable"),
        *("--checkpoint.initial-load-in-hf", "--checkpoint.last-save-in-hf"),
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        *further,
    ]


def worker() -> None:
    """torchtitan's trainer, which also appends its losses to steps.jsonl, and its greedy tokens at the end."""
    sys.argv.pop(1)
    from fem.train.titan import cpu

    cpu.find_cpu()
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    log, close = MetricsProcessor.log, Trainer.close
    out = Path(sys.argv[sys.argv.index("--dump-folder") + 1])
    first = os.environ["RANK"] == "0"
    (out / f"{os.getpid()}.pid").touch()

    def logged(self, step, loss, *args, **kwargs):
        if first:
            with open(out / "steps.jsonl", "a") as file:
                print(json.dumps([step, loss]), file=file, flush=True)
        return log(self, step, loss, *args, **kwargs)

    def closed(self):
        model, ids = self.model_parts[0].eval(), list(PROMPT)
        with torch.no_grad():
            for _ in range(NEW):
                h = model(torch.tensor([ids]))
                logits = model.lm_head(h) if model._skip_lm_head else h
                logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
                ids.append(int(logits[0, -1].argmax()))
        if first:
            (out / "tokens.json").write_text(json.dumps(ids))
        return close(self)

    MetricsProcessor.log, Trainer.close = logged, closed
    main()


def losses_of(out: Path) -> dict[int, float]:
    return dict(map(json.loads, (out / "steps.jsonl").read_text().splitlines()))


def compare(name: str, out: Path, reference: list[float], trained: torch.nn.Module) -> dict:
    """How far a finished run is from plain training; from_pretrained reads what torchtitan saved last."""
    from fem.models import FEMForCausalLM

    folder = out / "checkpoint" / f"step-{STEPS}"
    trained.config.save_pretrained(folder)
    read = FEMForCausalLM.from_pretrained(folder).eval()
    steps = losses_of(out)
    weights = zip(read.parameters(), trained.parameters(), strict=True)
    greedy = lambda model: model.generate(  # noqa: E731
        torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    return {
        "run": name,
        "loss": max(abs(steps[step] - loss) for step, loss in enumerate(reference, 1)),
        "weights": max(float((a - b).abs().max()) for a, b in weights),
        "same tokens": json.loads((out / "tokens.json").read_text()) == greedy(read),
    }


def run(arguments: list[str], kill_after: int | None = None) -> float:
    """Seconds of the run; with `kill_after`, kill -9 to all its processes once that step is logged."""
    out = Path(arguments[arguments.index("--dump-folder") + 1])
    out.mkdir(exist_ok=True)
    begin = time.monotonic()
    with open(out / "log.txt", "a") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
        while kill_after is not None and process.poll() is None:
            if (out / "steps.jsonl").exists() and kill_after in losses_of(out):
                for file in out.glob("*.pid"):  # torchrun gives each process a session of its own
                    os.kill(int(file.stem), signal.SIGKILL)
                process.kill()
            time.sleep(0.05)
        code = process.wait()
    if code != (0 if kill_after is None else -signal.SIGKILL):
        sys.exit(f"error: {' '.join(arguments)} ended with {code}:\n{(out / 'log.txt').read_text()[-4000:]}")
    return time.monotonic() - begin


def count() -> None:
    """Print the bytes of the collectives of one pass under torchtitan, on torch's fake backend, beside the plan's."""
    from fem.train.titan import cpu

    cpu.find_cpu()
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.utils import set_spmd_backend

    from fem.train.titan import config_registry
    from fem_research.plan.cost import Job, messages

    names = dict(zip(("allgather", "reduce_scatter", "all_reduce"), KINDS))

    class Collectives(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = dict.fromkeys(KINDS, 0)

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            kind = next((kind for part, kind in names.items() if "c10d" in str(op) and part in str(op)), None)
            if kind is not None:
                tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
                self.found[kind] += max(x.nbytes for x in tensors)
            return op(*args, **(kwargs or {}))

    for form, gpus, tensor, recompute in COUNTED:
        os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(gpus)}
        dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
        set_spmd_backend("partial_dtensor")
        trainer = getattr(config_registry, {"full": "debug", "slim": "debug_slim", "gla": "debug_gla"}[form])()
        trainer.parallelism.tensor_parallel_degree = tensor
        trainer.training.mixed_precision_param = "bfloat16"
        spec = trainer.model_spec
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(trainer.parallelism, gpus),
            training=trainer.training,
            parallelism=trainer.parallelism,
            compile_config=trainer.compile,
            ac_config=FullAC.Config() if recompute else None,
            dump_folder="",
        )
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_states()
        loss = trainer.loss.build(compile_config=trainer.compile)
        loss.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        rows = torch.randint(0, 99, (MICRO, CONTEXT))
        for _ in range(2):  # torchtitan's loss changes, in the first pass, when FSDP frees the head again
            with Collectives() as pass_:
                loss(model(rows), rows, torch.tensor(rows.numel()))[0].backward()
        batch = {"context": CONTEXT, "micro": MICRO, "tokens": MICRO * CONTEXT * gpus // tensor}
        job = Job(size="tiny", form=form, gpus=gpus, tensor=tensor, recompute=recompute, **batch)
        planned = {kind: messages(job)[kind] for kind in KINDS}
        print(json.dumps({"counted": pass_.found, "planned": planned}))
        dist.destroy_process_group()


def counted() -> list[dict]:
    """The table of the collectives."""
    done = subprocess.run([sys.executable, __file__, "count"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {done.stderr[-4000:]}")
    rows = []
    for job, line in zip(COUNTED, (line for line in done.stdout.splitlines() if line.startswith("{")), strict=True):
        found = json.loads(line)
        named = dict(zip(("form", "GPUs", "tensor parallel", "blocks computed again"), job))
        rows.append(named | {f"{k}, {w}": found[w][k] for k in KINDS for w in ("counted", "planned")})
    return rows


def main() -> None:
    from measure import save

    from fem.models import FEMForCausalLM
    from fem.models.presets import preset
    from fem.runs.tables import markdown_table

    begin, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        write_tokens(at / "tokens")
        reference, control = {}, {}
        messages = counted()
        for config, name in PRESETS.items():
            torch.manual_seed(SEED)
            FEMForCausalLM(preset(name)).save_pretrained(at / config)
            reference[config] = plain(at / config, at / "tokens")
            losses, _ = plain(at / config, at / "tokens", ULP)
            control[config] = max(abs(a - b) for a, b in zip(losses, reference[config][0]))
        for number, (name, (config, processes, further)) in enumerate(CASES.items()):
            out = at / str(number)
            seconds = run(command(at / config, at / "tokens", out, config, processes, further))
            found = compare(name, out, *reference[config])
            results.append(found | {"rounding": control[config], "seconds": round(seconds)})
            print(results[-1], flush=True)
        out, config = at / "killed", "debug_slim"
        run(command(at / config, at / "tokens", out, config, 2, ()), kill_after=12)
        shutil.copy(out / "steps.jsonl", out / "before.jsonl")
        seconds = run(command(at / config, at / "tokens", out, config, 1, ()))
        name = "slim, two shards, kill -9 after step 12, on with one process from step 10"
        found = compare(name, out, *reference[config])
        results.append(found | {"rounding": control[config], "seconds": round(seconds)})
        again = [json.loads(line)[0] for line in (out / "steps.jsonl").read_text().splitlines()]
        again = again[len((out / "before.jsonl").read_text().splitlines()) :]
        print(results[-1], again, flush=True)
    wrong = [r["run"] for r in results if r["loss"] > max(TOLERANCE, 2 * r["rounding"]) or not r["same tokens"]]
    wrong += [row for row in messages if any(row[f"{k}, counted"] != row[f"{k}, planned"] for k in KINDS)]
    rows = [
        {
            "run": r["run"],
            "loss, largest difference": f"{r['loss']:.1e}",
            "of one rounding": f"{r['rounding']:.1e}",
            "weights, largest difference": f"{r['weights']:.1e}",
            "same greedy tokens": "yes" if r["same tokens"] else "NO",
            "s": str(r["seconds"]),
        }
        for r in results
    ]
    note = NOTE.format(minutes=round((time.monotonic() - begin) / 60), table=markdown_table(messages))
    save(PAGE, "FEM in torchtitan, on a CPU", {"runs": results, "collectives": messages}, rows, note)
    if wrong or again[0] != 11:
        sys.exit(f"error: other losses, tokens, bytes or another step than promised: {wrong}, {again}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"worker": worker, "count": count}.get("".join(sys.argv[1:2]), main)()
