"""Other libraries, each tried on a small FEM model: a line of result, or its error message.

Their commands run as users type them, in processes that do not import fem.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from clients.survey import said
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from fem.models import LORA, FEMConfig, FEMForCausalLM, replace_attention

LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:"
ANY = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
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
Client = Callable[[Path], str]
CLIENTS: dict[str, tuple[str, Client]] = {}


def client(library: str, item: str) -> Callable[[Client], Client]:
    """Registers a function that tries a library on the folder of a saved model and returns a line for the page."""
    return lambda act: CLIENTS.setdefault(item, (library, act))[1]


def run_clients() -> list[dict[str, str]]:
    """A row per item: its library, the version, and the result."""
    rows = []
    for item, (library, act) in CLIENTS.items():
        torch._dynamo.reset()  # an export after another would take the first one's batch for fixed
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder))
            try:
                result = act(Path(folder))
            except Exception as error:
                result = f"fails: {said(error)[:160]}"
        try:
            found = version(library)
        except PackageNotFoundError:
            found, result = "", ""  # not installed here, so not run
        rows.append({"library": library, "version": found, "item": item, "result": result})
    return rows


def small(**fields) -> FEMForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": len(LETTERS)}
    return FEMForCausalLM(
        FEMConfig(**sizes, max_position_embeddings=64, pad_token_id=0, eos_token_id=0, **fields)
    ).eval()


def save(folder: Path) -> None:
    """A small model and a tokenizer of letters."""
    small().save_pretrained(folder)
    spelling = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    spelling.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=spelling, pad_token="a", eos_token="a")
    tokenizer.save_pretrained(folder)


def ids() -> Tensor:
    return torch.randint(1, len(LETTERS), (2, 9), generator=torch.Generator().manual_seed(0))


@client("transformers", "pipeline('text-generation')")
def _(folder: Path) -> str:
    text = transformers.pipeline("text-generation", str(folder))("a text", max_new_tokens=4)[0]["generated_text"]
    return f"{len(text) - 6} letters"


@client("peft", "LoraConfig(**LORA)")
def _(folder: Path) -> str:
    import peft

    model = peft.get_peft_model(small(), peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    model(input_ids=ids(), labels=ids()).loss.backward()
    return f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} trained parameters"


@client("bitsandbytes", "`BitsAndBytesConfig(load_in_8bit=True)`, with LoRA")
def _(folder: Path) -> str:
    import peft

    quantised = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised)
    maps = sum(type(module).__name__ == "Linear8bitLt" for module in model.modules())
    off = (model(ids()).logits - small()(ids()).logits).abs().max().item()
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), peft.LoraConfig(**LORA))
    model(input_ids=ids(), labels=ids()).loss.backward()
    return f"{maps} maps in 8 bits, logits off by {off:.0e}"


@client("trl", "SFTTrainer on a path, packed without padding")
def _(folder: Path) -> str:
    import trl
    from datasets import Dataset

    options = {"output_dir": folder / "out", "max_steps": 2, "report_to": [], "use_cpu": True, "bf16": False}
    arguments = trl.SFTConfig(**options, padding_free=True, max_length=None, logging_steps=1, save_strategy="no")
    data = Dataset.from_dict({"text": ["some words to learn.", "others, too."] * 8})
    trainer = trl.SFTTrainer(str(folder), args=arguments, train_dataset=data)
    trainer.train()
    return f"loss {trainer.state.log_history[0]['loss']}"


@client("trl", "RewardTrainer on AutoModelForSequenceClassification")
def _(folder: Path) -> str:
    import trl
    from datasets import Dataset

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    options = {"output_dir": folder / "out", "max_steps": 2, "report_to": [], "use_cpu": True, "bf16": False}
    arguments = trl.RewardConfig(**options, max_length=16, logging_steps=1, save_strategy="no")
    data = Dataset.from_dict({"chosen": ["good words."] * 16, "rejected": ["bad ones."] * 16})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = trl.RewardTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return f"loss {trainer.state.log_history[0]['loss']}"


@client("lm_eval", "HFLM on the path of a replaced Llama")
def _(folder: Path) -> str:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    original = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(LETTERS), **sizes))
    model = replace_attention(original, lambda_init=0.0)
    model.save_pretrained(folder)
    harness = HFLM(pretrained=str(folder), device="cpu")
    request = Instance("loglikelihood", {}, ("a text", " and more"), 0)
    found = harness.loglikelihood([request], disable_tqdm=True)[0][0]
    row = torch.tensor([harness.tok_encode("a text and more")])
    expected = model(row[:, :-1]).logits.log_softmax(-1)[0].gather(1, row[0, 1:, None])[-9:].sum().item()
    return f"log-likelihood {found:.4f}, the model's own {expected:.4f}"


@client("onnx", "torch.onnx.export (dynamo) at any length, softmax and gla priors")
def _(folder: Path) -> str:
    import onnxruntime

    worst, path = 0.0, folder / "model.onnx"
    for prior in ("softmax", "gla"):
        model, kinds = small(prior_type=prior), {"input_ids": {1: ANY[1]}, "use_cache": None}
        options = {"kwargs": {"use_cache": False}, "dynamo": True, "verbose": False, "dynamic_shapes": kinds}
        with torch.no_grad():
            torch.onnx.export(model, (ids(),), path, **options)
        session = onnxruntime.InferenceSession(path)
        for row in (ids(), ids()[:, :4]):
            found = session.run(None, {session.get_inputs()[0].name: row.numpy()})[0]
            worst = max(worst, float((torch.tensor(found) - model(row).logits).abs().max()))
    return f"onnxruntime's logits within {worst:.1e} of torch"


@client("torch", "torch.export at any length, softmax prior, for inference")
def _(folder: Path) -> str:
    model, kinds = small(), {"input_ids": ANY, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (ids(),), {"use_cache": False}, dynamic_shapes=kinds, strict=False)
        found = [program.module()(row, use_cache=False).logits for row in (ids(), ids()[:1, :4])]
        errors = [(a - model(row).logits).abs().max() for a, row in zip(found, (ids(), ids()[:1, :4]))]
    own = [node for node in program.graph.nodes if str(node.target).startswith("fem")]
    return f"logits within {max(errors):.1e}, {len(own)} operators of fem in the graph"


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
