"""Commands of other libraries on a FEM checkpoint, as users type them, in processes that do not import fem."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from clients.programs import client

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
START_SECONDS = 300
TASK = """task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1.0}}
"""


@client("lm_eval", "`lm_eval --model hf --model_args pretrained=PATH,trust_remote_code=True`")
def _(folder: Path) -> str:
    text = "some words, and others."
    (folder / "tasks").mkdir()
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    (folder / "tasks" / "letters.yaml").write_text(TASK.format(data=folder / "text.jsonl"), encoding="utf-8")
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "letters", "--device", "cpu"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--include_path", folder / "tasks"]
    done = subprocess.run(
        [*command, "--output_path", folder / "out"], env=os.environ | OFFLINE, text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    record = json.loads(next((folder / "out").rglob("results*.json")).read_text(encoding="utf-8"))
    found = record["results"]["letters"]["bits_per_byte,none"]
    return f"bits per byte {found:.4f}, the model's own {_bits(folder, text):.4f}"


def _bits(folder: Path, text: str) -> float:
    """log2 p of the text behind the end-of-text token, over its bytes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    row = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.no_grad():
        log_p = model(row[:, :-1]).logits.double().log_softmax(-1).gather(2, row[:, 1:, None]).sum()
    return -float(log_p) / torch.log(torch.tensor(2.0)).item() / len(text.encode())


@client("transformers", "`transformers serve PATH --trust-remote-code`, one completion over HTTP")
def _(folder: Path) -> str:
    with _served(folder) as address:
        body = {"model": str(folder), "prompt": "a text", "max_tokens": 6, "temperature": 0}
        found = json.loads(_fetch(f"{address}/v1/completions", body))["choices"][0]["text"]
    generate = transformers.pipeline("text-generation", str(folder), do_sample=False, return_full_text=False)
    expected = generate("a text", max_new_tokens=6)[0]["generated_text"]
    return f"{found!r}, `generate` writes {expected!r}"


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of a server of the model, while it runs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--trust-remote-code"]
    command += ["--device", "cpu", "--dtype", "float32", "--port", str(port)]
    with open(folder / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, env=os.environ | OFFLINE, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                _fetch(f"http://localhost:{port}/health")
                break
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "server.log").read_text(encoding="utf-8").strip()[-300:])
            time.sleep(0.5)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait()


def _fetch(address: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        return answer.read()
