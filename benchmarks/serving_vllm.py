"""Do servers generate the same greedy tokens as `generate` from the same checkpoints, on a CPU?

make test-vllm          # builds an environment of its own and writes research/results/checks/serving_vllm.{json,md}
.venv-vllm/bin/python benchmarks/serving_vllm.py --blank        # only the rows that the page leaves blank
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PAGE = "research/results/checks/serving_vllm"
VOCABULARY, NEW, SEED = 512, 16, 0
LENGTHS = (1, 2, 5, 17, 63, 64, 65, 130, 257, 500)
SHARED = 96  # tokens that the prompts of prefix caching begin with
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES = {  # name: the model's fields, vLLM's options
    "8 at once, prefix caching": ({}, {"max_num_seqs": 8, "enable_prefix_caching": True}),
    "grouped keys (2 of 4 heads), a window of 32 in one layer of two": (
        {"num_key_value_heads": 2, "layer_priors": [{"prior_type": "softmax", "window": 32}, "softmax"]},
        {"max_num_seqs": 8},
    ),
    "chunked prefill of 64 tokens, no prefix caching": (
        {},
        {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": False,
        },
    ),
    "one request at a time": ({}, {"max_num_seqs": 1, "enable_prefix_caching": False}),
    "slim gates": ({"mixer": {"use_conv": False, "gate_rank": 8}}, {"max_num_seqs": 8}),
    "two processes, each with half of the heads": ({}, {"max_num_seqs": 8, "tensor_parallel_size": 2}),
    "two processes, grouped keys, slim gates": (
        {"num_key_value_heads": 2, "mixer": {"use_conv": False, "gate_rank": 8}},
        {"max_num_seqs": 8, "tensor_parallel_size": 2},
    ),
}
SPLIT = {"use_conv": False, "gate_rank": 8, "free_share": 0.5}
CASES["split values"] = ({"mixer": SPLIT}, {"max_num_seqs": 8, "enable_prefix_caching": True})
CASES["two processes, split values"] = ({"mixer": SPLIT}, {"max_num_seqs": 8, "tensor_parallel_size": 2})
STATES = {"max_num_seqs": 8, "hf_overrides": {"architectures": ["FEMStatesForCausalLM"]}}
CASES |= {
    f"states of {name}": ({"prior_type": name, "mixer": {"use_conv": False}}, STATES)
    for name in ("linear", "gla", "rnn_softmax", "rnn_decay", "mamba", "mamba_interactive")
}
CASES["states of gla and of the conditioner, chunked prefill of 64 tokens"] = (
    {"prior_type": "gla", "mixer": {}},
    STATES | {"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
)
CASES["a hybrid: gla with the conditioner, then softmax with a window of 32"] = (
    {"layer_priors": [{"prior_type": "gla", "use_conv": True}, {"prior_type": "softmax", "window": 32}]},
    STATES,
)
CASES["softmax with the conditioner"] = ({"mixer": {}}, STATES)
CASES["softmax with the conditioner and split values"] = ({"mixer": {"free_share": 0.5}}, STATES)
CASES["states of gla with split values"] = (
    {"prior_type": "gla", "mixer": {"use_conv": False, "free_share": 0.5}},
    STATES,
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def prompts() -> list[list[int]]:
    """Prompts of 1 to 500 tokens, and four with the same beginning."""
    import torch

    of = torch.Generator().manual_seed(SEED)
    draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=of).tolist()  # noqa: E731
    beginning = draw(SHARED)
    return [draw(n) for n in LENGTHS] + [beginning + draw(n) for n in (1, 8, 20, 40)]


def write_checkpoint(folder: Path, fields: dict) -> list[list[int]]:
    """Save a model of random weights and its tokenizer; returns what transformers' `generate` writes with it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from fem.models import FEMConfig, FEMForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    config = FEMConfig(
        **{"intermediate_size": 128, "max_position_embeddings": 1024, "mixer": {"use_conv": False}, **SIZES, **fields}
    )
    model = FEMForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        return [
            model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)).long(), **how)[0, len(p) :].tolist()
            for p in prompts()
        ]


def in_vllm(folder: str, options: dict) -> list[list[list[int]]]:
    """What vLLM writes, twice, so that the second pass finds the first one's cache. Call it in a process of its own."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=640, seed=SEED, **options)
    how = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    runs = [llm.generate(asked, how, use_tqdm=False) for _ in range(2)]
    return [[list(done.outputs[0].token_ids) for done in run] for run in runs]


def through_vllm_serve(folder: str) -> list[list[int]]:
    """What `vllm serve` answers to one request for completions, in OpenAI's format, of all prompts."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", folder, "--max-num-seqs", "8"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "640"]
    body = {"prompt": prompts(), "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(command, folder) as ask:
        choices = ask(body)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def through_transformers_serve(folder: str) -> list[list[int]]:
    """What `transformers serve` with continuous batching answers to a request for each prompt, 8 at a time."""
    command = [str(Path(sys.executable).with_name("transformers")), "serve", folder, "--trust-remote-code"]
    command += ["--attn-implementation", "sdpa"]
    command += ["--continuous-batching", "--cb-num-blocks", "128", "--cb-max-batch-tokens", "256", "--device", "cpu"]
    with serving(command, folder) as ask, ThreadPoolExecutor(8) as pool:
        body = {"max_tokens": NEW, "temperature": 0}
        found = pool.map(lambda prompt: ask({**body, "prompt": " ".join(f"w{i}" for i in prompt)}), prompts())
        return [[int(word[1:]) for word in answer["choices"][0]["text"].split()] for answer in found]


@contextmanager
def serving(command: list[str], folder: str):
    """A local server while the block runs; yields a function that asks it for completions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"

    def ask(body: dict) -> dict:
        data = json.dumps({"model": folder, **body}).encode()
        asked = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(asked, timeout=300))

    with tempfile.TemporaryFile() as log:
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)
        try:
            for _ in range(600):
                if server.poll() is not None or answers(f"{address}/health"):
                    break
                time.sleep(1)
            yield ask
        except OSError as error:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)}\n{log.read().decode()[-3000:]}") from error
        finally:
            server.terminate()
            server.wait()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=1).close()
    except OSError:
        return False
    return True


SERVERS = {
    "`vllm serve`, 14 prompts in one request over HTTP": through_vllm_serve,
    "`transformers serve --continuous-batching`, 14 requests, 8 at once": through_transformers_serve,
}


def main(blank: bool) -> int:
    """Run every case, or those that the page leaves blank; the page is written after each."""
    rows = {name: row(name, None, None) for name in [*CASES, *SERVERS]}
    if blank:
        known = json.loads(Path(f"{PAGE}.json").read_text(encoding="utf-8"))["results"]["rows"]
        rows |= {one["server"]: one for one in known if one["server"] in rows}
    with tempfile.TemporaryDirectory() as scratch:
        written = {}
        for name in [name for name, found in rows.items() if found["of"] is None]:
            fields, options = CASES.get(name, ({}, None))
            model = json.dumps(fields)
            if model not in written:
                folder = Path(scratch, f"model{len(written)}")
                written[model] = str(folder), write_checkpoint(folder, fields)
            folder, wanted = written[model]
            passes = [SERVERS[name](folder)] if name in SERVERS else in_a_process(name, folder, options)
            report(rows, name, wanted, passes)
    return any(row["equal"] != row["of"] for row in rows.values())


def in_a_process(name: str, folder: str, options: dict) -> list[list[list[int]]]:
    asked = [sys.executable, __file__, json.dumps([folder, options])]
    done = subprocess.run(asked, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: vLLM failed.\n{done.stderr[-3000:]}")
    # Two processes of vLLM write to its log until they end.
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("[[[")][-1])


def report(rows: dict[str, dict], name: str, wanted: list[list[int]], passes: list[list[list[int]]]) -> None:
    from importlib.metadata import version

    from measure import save

    rows[name] = row(name, wanted, passes)
    versions = {package: version(package) for package in ("vllm-cpu", "transformers")}
    equal, of = (sum(row[name] or 0 for row in rows.values()) for name in ("equal", "of"))
    note = (
        f"{equal} of {of} continuations are those of transformers' own `generate`, token by token.\n\n"
        "Greedy tokens of vLLM over its stock paged attention, and of `transformers serve`, against transformers' "
        f"`generate` in the exact form, from the same checkpoints: 2 layers of width 128 and 4 heads, random weights "
        f"(seed {SEED}), float32, on a CPU, {NEW} new tokens for each of {len(prompts())} prompts: lengths "
        f"{', '.join(map(str, LENGTHS))}, and four that begin with the same {SHARED} tokens. vLLM runs all prompts "
        "twice, the second time over the first's blocks where prefix caching is on. Made by `make test-vllm`; blank is "
        f"what was not run. {', '.join(f'{package} {number}' for package, number in versions.items())}."
    )
    results = {"versions": versions, "cases": CASES, "rows": list(rows.values())}
    save(PAGE, "FEM in servers", results, list(rows.values()), note)


def row(name: str, wanted: list[list[int]] | None, passes: list[list[list[int]]] | None) -> dict:
    if wanted is None:
        return {"server": name, "equal": None, "of": None}
    pairs = [(got, want) for one in passes for got, want in zip(one, wanted, strict=True)]
    return {"server": name, "equal": sum(got == want for got, want in pairs), "of": len(pairs)}


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--blank"]):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        print("\n" + json.dumps(in_vllm(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main(blank=len(sys.argv) > 1))
