"""Tiny trainings for the tests."""

import json
import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

WORDS = ["sun", "moon", "river", "stone", "bird", "leaf"]


@contextmanager
def interrupted(monkeypatch, watch, step):
    """A training that a callback of this class stops after a step, as Ctrl-C does."""

    def stop(self, args, state, control, **_):
        if state.global_step == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(watch, "on_step_end", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def same(a, b):
    """Whether two lists of tensors are equal, bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def write_corpus(path, documents=120, seed=0):
    """JSON lines of made-up sentences, about a dozen per document."""
    draw = random.Random(seed)
    sentence = lambda w: f"the {w} sees the {WORDS[(WORDS.index(w) + 1) % 6]}."  # noqa: E731
    lines = [" ".join(map(sentence, draw.choices(WORDS, k=draw.randint(1, 24)))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def tiny(made_up, **changes):
    from fem.train.recipe import TrainRecipe

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 88}
    given = {
        "data": str(made_up),
        "model": json.dumps(sizes),
        "vocabulary": 300,
        "context": 24,
        "batch_size": 4,
        "max_steps": 12,
        "warmup_steps": 2,
        "save_steps": 5,
        "log_steps": 3,
        "eval_steps": 6,
        "validation_rows": 4,
        "keep": 9,
    }
    return TrainRecipe(**given | changes)


def losses(output):
    """The lines of metrics.jsonl, without times and memory."""
    lines = map(json.loads, (Path(output) / "metrics.jsonl").read_text().splitlines())
    told = ("step", "train_loss", "val_loss", "grad_norm", "learning_rate", "lambda_mean", "beta_mean")
    return [{name: line[name] for name in told if name in line} for line in lines]


def weights(output, step):
    from safetensors.torch import load_file

    return load_file(Path(output) / f"checkpoint-{step}" / "model.safetensors")


def assert_same_weights(one, other, step, within=0.0):
    torch.testing.assert_close(weights(one, step), weights(other, step), rtol=0, atol=within)


def assert_same_run(one, other, step):
    assert losses(one) == losses(other)
    assert_same_weights(one, other, step)


def argmax_continuation(model, ids, count):
    """The prompt, and the likeliest token so often."""
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, model(torch.tensor([ids])).logits[0, -1].argmax().item()]
    return ids


def save_random_model(path, texts, context):
    """A model of random weights, large enough that no two tokens are equally likely, beside its tokenizer."""
    from fem.models import FEMConfig
    from fem.train.model import build_model
    from fem.train.tokenizer import train_tokenizer

    torch.set_num_threads(1)
    tokenizer = train_tokenizer(texts, 300)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = FEMConfig(vocab_size=len(tokenizer), max_position_embeddings=context, **sizes, initializer_range=0.5)
    build_model(config, 0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
