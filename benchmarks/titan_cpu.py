"""Does torchtitan train FEM as plain PyTorch does, on a CPU: losses, weights, tokens, and after kill -9?

make test-titan          # builds an environment of its own and writes research/results/checks/titan_cpu.{json,md}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

PAGE = "research/results/checks/titan_cpu"
STEPS, CONTEXT, BATCH, MICRO, SEED, NEW = 20, 128, 4, 2, 0, 16
SPREAD = 0.2  # of the starting weights: at the models' own .02 all 16 greedy tokens after 20 steps are the same one
PROMPT = list(range(7, 19))
TOLERANCE = 1e-5  # of the loss, in nats; sums of float32 in another order differ by about 1e-6 where nothing grows
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "rows")
FLOAT32, FLOAT8 = 2.0**-24, 2.0**-4  # half the distance of neighbouring numbers, relative: what one rounding does
TENSOR, ROWS, BLOCKS = (f"--parallelism.{name}-parallel-degree" for name in ("tensor", "context", "pipeline"))
AGAIN = "activation-checkpoint:full"  # blocks are computed again in the backward pass; it ends the options
BEHIND = ("--checkpoint.async-mode", "async")  # checkpoints are written while the training goes on
CASES = {  # name: form, then processes and further arguments of a run, and of the one that goes on after kill -9
    "full, one process": ("", (1,)),
    "full, two shards of half of the heads (FSDP2, tensor parallel)": ("", (4, TENSOR, "2")),
    "untied, a pipeline of two, each of two shards": ("_untied", (4, BLOCKS, "2")),
    "slim, a row over two (context parallel)": ("_slim", (2, ROWS, "2")),
    "slim, two shards, blocks computed again, checkpoints in the background; kill -9 after step 12; on with four "
    "processes, heads over two": ("_slim", (2, *BEHIND, AGAIN), (4, *BEHIND, TENSOR, "2")),
    "split, heads over two": ("_split", (2, TENSOR, "2")),
    "split, one process, blocks compiled": ("_split", (1, "--compile.enable")),
    "GLA, two shards": ("_gla", (2,)),
    "GLA and softmax, a row over two, heads over two": ("_hybrid", (4, ROWS, "2", TENSOR, "2")),
    "full in float8 (emulated), two shards": ("_float8", (2,)),
}
COUNTED = [  # form, GPUs, GPUs of a layer, GPUs of a row, blocks computed again; a batch of 2 rows on each GPU
    *(("full", 8, 1, 1, False), ("full", 64, 1, 1, True), ("slim", 8, 1, 1, True), ("gla", 8, 1, 1, False)),
    *(("full", 2, 2, 1, False), ("slim", 8, 2, 1, True), ("split", 8, 2, 1, True), ("gla", 16, 4, 1, False)),
    *(("full", 2, 1, 2, False), ("slim", 8, 1, 4, True), ("split", 16, 2, 2, True), ("gla", 4, 1, 2, False)),
]
VLLM = Path(".venv-vllm")  # of `make test-vllm`; without it the page leaves the column blank
SERVED = ("", "_slim", "_split", "_gla")  # forms whose first checkpoint vLLM reads

NOTE = """torchtitan 0.3.0 trains a model of 1.3M parameters (configurations `debug...` of `fem.train.titan`,
float32) for 20 steps over gloo, by its own trainer and checkpoints; `fem train` does the same from the same
weights, on the same rows, at the same constant rate.

* loss: the largest difference of all steps, in nats; weights: of those that torchtitan saved last, read by
  `from_pretrained`. One rounding: by what `fem train` itself differs after every starting weight has been moved by
  one rounding of float32 (of float8 in the last row). The promise is a loss within 1e-5, or twice that of one
  rounding where it is larger.
* Weights differ most under GLA, whose features are ReLU(q) and ReLU(k): where one lies within a rounding of 0, its
  gradient is there or not, and AdamW makes a step of it. With softplus(50 x) / 50 in ReLU's place one rounding
  moves them by 2.6e-5 where it moved them by 1.2e-4 (starting weights of .02).
* tokens: 16 greedy ones by `generate` from torchtitan's files, {least} different ones at least, against torchtitan's
  own model (where a process has all of it), the model that `fem train` ended with, and vLLM (where it was run).
* The run that was killed went on with step {again}.
* float8: torchtitan's converter, by torchao, which emulates the products; maps of blocks whose sizes are multiples
  of 16. A card that knows float8 has not run it.

Bytes of all collectives of one forward and backward pass, the second (2 rows of 128 tokens on each GPU, or on
the GPUs of a row; bfloat16 weights, float32 gradients), counted on torch's fake backend under torchtitan, and
as `fem plan` plans them. rows: what the GPUs that share a row gather and scatter. The states that neighbours
hand on are not planned: of this model 33,792 bytes of a layer of GLA, 64 and 32 of positions and conditioner,
once forward and but for the positions once back.

{table}
torchtitan's `transformers_modeling_backend`, given a FEM checkpoint as it is, stops while it builds the
model: `AttributeError: 'Config' object has no attribute 'mixer_configs'` (it hands the model a
configuration of its own with the fields of ours and none of the methods). Beyond that it replaces every
model's attention by FlexAttention over keys and values, knows no gates, no conditioner and no scans, and
starts weights by the names of Llama's parts. So FEM is a torchtitan model of its own. torchtitan 0.3.0 is
written for a later torch than 2.13: `fem.train.titan` supplies `torch.distributed.set_timeout`, and joins the
parts of a batch that torchtitan hands to a pipeline, which torch 2.13 cuts itself. Not run: schedules other than
1F1B, any GPU.

`make test-titan` writes this page. It took {minutes} minutes on two cores that other work shared; installing
torchtitan takes about 3 minutes more, and is not in them."""


def write_texts(file: Path) -> None:
    """Documents of noisy repetitions."""
    random = np.random.default_rng(SEED)
    words = np.array([f"{n:x}" for n in range(300)])
    with open(file, "w") as texts:
        for _ in range(200):
            said = np.resize(random.integers(300, size=16), random.integers(20, 200))
            said = np.where(random.random(len(said)) < 0.2, random.integers(300, size=len(said)), said)
            print(json.dumps({"text": " ".join(words[said])}), file=texts)


def fem_train(start: Path, texts: Path, moved: float) -> tuple[list[float], torch.nn.Module]:
    """Losses of `fem train` from the weights in `start`, at a constant rate, and the model after it.

    moved: by how much each starting weight is changed at random, relative to it.
    """
    from fem.models import FEMForCausalLM
    from fem.train import train
    from fem.train.recipe import TrainRecipe

    def build(config, seed: int) -> torch.nn.Module:
        model = FEMForCausalLM.from_pretrained(start)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + moved * torch.randn_like(parameter))
        return model

    def constant(*given):
        return replace(arguments(*given), lr_scheduler_type="constant")

    out = Path(f"{start}-{moved}")
    sizes = {"data": str(texts), "vocabulary": 1024, "context": CONTEXT, "batch_size": BATCH, "max_steps": STEPS}
    arguments = train.training_arguments
    with mock.patch.multiple(train, build_model=build, training_arguments=constant):
        train.run(TrainRecipe(**sizes, warmup_steps=0, validation_rows=0, log_steps=1), out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    model = FEMForCausalLM.from_pretrained(out / f"checkpoint-{STEPS}").eval()
    return [line["train_loss"] for line in lines if "train_loss" in line], model


def titan(start: Path, out: Path, run: tuple, kill_after: int | None = None) -> None:
    """Train by the configuration named as `start`; `kill_after`: kill -9 to all processes once that step is logged."""
    processes, *further = run
    options = {
        "dump-folder": out,
        "dataloader.dataset-path": f"{start}-0/tokens",
        "lr-scheduler.warmup-steps": 0,
        "lr-scheduler.decay-ratio": 0.0,  # a constant rate
        "checkpoint.interval": 5,
        "checkpoint.initial-load-path": start,
        "training.steps": STEPS,
    }
    arguments = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *(__file__, "worker", "--module", "fem.train.titan", "--config", start.name, "--checkpoint.enable"),
        *("--checkpoint.initial-load-in-hf", "--checkpoint.last-save-in-hf"),
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        *further,
    ]
    out.mkdir(exist_ok=True)
    with open(out / "log.txt", "a") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
        while kill_after is not None and process.poll() is None:
            if kill_after in losses_of(out):
                for file in out.glob("*.pid"):  # torchrun gives each process a session of its own
                    os.kill(int(file.stem), signal.SIGKILL)
                process.kill()
            time.sleep(0.05)
        code = process.wait()
    if code != (0 if kill_after is None else -signal.SIGKILL):
        sys.exit(f"error: {' '.join(arguments)} ended with {code}:\n{(out / 'log.txt').read_text()[-4000:]}")


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
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (out / f"{os.getpid()}.pid").touch()

    def logged(self, step, loss, *args, **kwargs):
        if rank == world - world // self.parallel_dims.pp:  # the first that holds the end of the model
            with open(out / "steps.jsonl", "a") as file:
                print(json.dumps([step, loss]), file=file, flush=True)
        return log(self, step, loss, *args, **kwargs)

    def closed(self):
        if self.parallel_dims.pp > 1 or self.parallel_dims.cp > 1:  # no process has a whole model and whole rows
            return close(self)
        model, ids = self.model_parts[0].eval(), list(PROMPT)
        with torch.no_grad():
            for _ in range(NEW):
                h = model(torch.tensor([ids]))
                logits = model.lm_head(h) if model._skip_lm_head else h
                logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
                ids.append(int(logits[0, -1].argmax()))
        if rank == 0:
            (out / "tokens.json").write_text(json.dumps(ids))
        return close(self)

    MetricsProcessor.log, Trainer.close = logged, closed
    main()


def losses_of(out: Path) -> dict[int, float]:
    """The loss of every step, the last one where a step was made twice."""
    steps = out / "steps.jsonl"
    return dict(map(json.loads, steps.read_text().splitlines())) if steps.exists() else {}


def greedy(model: torch.nn.Module) -> list[int]:
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **how)[0].tolist()


def apart(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def compare(form: str, out: Path, plain: tuple, moved: tuple, serve: bool) -> dict:
    """How far a run is from `fem train`'s, beside `fem train` from weights that are `moved`, and whether all who have
    its weights write the tokens of `from_pretrained`."""
    from fem.models import FEMForCausalLM

    folder, (losses, trained) = out / "checkpoint" / f"step-{STEPS}", plain
    trained.config.save_pretrained(folder)
    read, steps = FEMForCausalLM.from_pretrained(folder).eval(), losses_of(out)
    written = {}
    if form != "_float8":  # whose model in torchtitan has other products than the one that reads its weights
        written = {"fem train": greedy(trained)}
        if (out / "tokens.json").exists():
            written["torchtitan"] = json.loads((out / "tokens.json").read_text())
    if serve and (VLLM / ".installed").exists():
        done = subprocess.run([VLLM / "bin/python", __file__, "vllm", folder], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        written["vLLM"] = json.loads(lines[-1]) if lines else done.stderr[-2000:]
        print(written["vLLM"])
    own = greedy(read)
    return {
        "loss": max(abs(steps[step] - loss) for step, loss in enumerate(losses, 1)),
        "loss, one rounding": max(abs(a - b) for a, b in zip(moved[0], losses, strict=True)),
        "weights": apart(read, trained),
        "weights, one rounding": apart(moved[1], trained),
        "tokens": {who: ids == own for who, ids in written.items()},
        "different tokens": len(set(own[len(PROMPT) :])),
    }


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

    names = {"allgather": "all-gather", "c10d::_reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}
    names |= {"all_gather_into_tensor": "rows", "reduce_scatter_tensor": "rows"}  # DTensor's own, of a row's parts

    class Collectives(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = dict.fromkeys(KINDS, 0)

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            kind = next((kind for part, kind in names.items() if "c10d" in op.name() and part in op.name()), None)
            if kind is not None:
                tensors = torch.utils._pytree.tree_leaves((args, result))
                self.found[kind] += max(x.nbytes for x in tensors if isinstance(x, torch.Tensor))
            return result

    for form, gpus, tensor, parts, recompute in COUNTED:
        os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(gpus)}
        dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
        set_spmd_backend("partial_dtensor")
        trainer = getattr(config_registry, "debug" if form == "full" else f"debug_{form}")()
        trainer.parallelism.tensor_parallel_degree = tensor
        trainer.parallelism.context_parallel_degree = parts
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
        rows = torch.randint(0, 99, (MICRO, CONTEXT // parts))
        places = torch.arange(CONTEXT // parts).expand_as(rows)
        for _ in range(2):  # torchtitan's loss changes, in the first pass, when FSDP frees the head again
            with Collectives() as pass_:
                loss(model(rows, places), rows, torch.tensor(rows.numel()))[0].backward()
        batch = {"context": CONTEXT, "micro": MICRO, "tokens": MICRO * CONTEXT * gpus // (tensor * parts)}
        split = {"tensor": tensor, "rows_over": parts, "recompute": recompute}
        planned = messages(Job(size="tiny", form=form, gpus=gpus, **split, **batch))
        row = {"form": form, "GPUs": gpus, "of a layer": tensor, "of a row": parts, "blocks computed again": recompute}
        for kind in KINDS:
            row |= {f"{kind}, counted": pass_.found[kind], f"{kind}, planned": planned[kind]}
        print(json.dumps(row))
        dist.destroy_process_group()


def in_vllm(folder: str) -> None:
    """Print the greedy tokens of vLLM. Called in its environment."""
    from serving_vllm import ENVIRONMENT, STATES

    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    stock = "_split" in folder  # paged attention serves a model without a conditioner, the others have states
    how = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}
    llm = LLM(model=folder, **how, **({} if stock else STATES))
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    print("\n" + json.dumps([*PROMPT, *done[0].outputs[0].token_ids]), flush=True)


def main() -> None:
    from measure import save

    from fem.train.titan import cpu

    cpu.find_cpu()
    from fem.models import FEMConfig, FEMForCausalLM
    from fem.tables import markdown_table
    from fem.train.titan import config_registry

    begin, results, references = time.monotonic(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        write_texts(at / "texts.jsonl")
        done = subprocess.run([sys.executable, __file__, "count"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {done.stderr[-4000:]}")
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        wrong = [row for row in messages if any(row[f"{k}, counted"] != row[f"{k}, planned"] for k in KINDS)]
        for number, (name, (form, *runs)) in enumerate(CASES.items()):
            start, out = at / f"debug{form}", at / f"{number}{form}"
            if first := form not in references:
                torch.manual_seed(SEED)
                fields = getattr(config_registry, f"debug{form}")().model_spec.model.fields
                FEMForCausalLM(FEMConfig(**fields | {"initializer_range": SPREAD})).save_pretrained(start)
                rounding = FLOAT8 if form == "_float8" else FLOAT32
                references[form] = [fem_train(start, at / "texts.jsonl", moved) for moved in (0, rounding)]
            seconds = time.monotonic()
            for run in runs:
                before = len((out / "steps.jsonl").read_text().splitlines()) if out.exists() else 0
                titan(start, out, run, None if run == runs[-1] else 12)
            found = {"run": name, "seconds": round(time.monotonic() - seconds)}
            found |= compare(form, out, *references[form], serve=first and form in SERVED)
            if before:
                found["went on with step"] = json.loads((out / "steps.jsonl").read_text().splitlines()[before])[0]
            results.append(found)
            far = found["loss"] > max(TOLERANCE, 2 * found["loss, one rounding"])
            if far or False in found["tokens"].values() or found.get("went on with step", 11) not in (6, 11):
                wrong.append(found)
            print(found, flush=True)
    said = {None: "", True: "yes", False: "NO"}
    rows = [
        {"run": r["run"]}
        | {name: f"{r[name]:.1e}" for name in ("loss", "loss, one rounding", "weights", "weights, one rounding")}
        | {f"tokens as {who}": said[r["tokens"].get(who)] for who in ("torchtitan", "fem train", "vLLM")}
        | {"s": str(r["seconds"])}
        for r in results
    ]
    note = NOTE.format(
        table=markdown_table(messages),
        minutes=round((time.monotonic() - begin) / 60),
        least=min(r["different tokens"] for r in results),
        again=next(r["went on with step"] for r in results if "went on with step" in r),
    )
    save(PAGE, "FEM in torchtitan, on a CPU", {"runs": results, "collectives": messages}, rows, note)
    if wrong:
        sys.exit(f"error: other losses, tokens, bytes or another step than promised: {wrong}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"worker": worker, "count": count, "vllm": lambda: in_vllm(sys.argv[2])}.get("".join(sys.argv[1:2]), main)()
