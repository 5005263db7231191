"""Tiny trainings for the tests. As a script, RECIPE OUTPUT RESUME DEATH as JSON: one that may kill itself."""

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path

import torch

WORDS = ["sun", "moon", "river", "stone", "bird", "leaf"]


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


def assert_same_run(one, other, step):
    assert losses(one) == losses(other)
    a, b = weights(one, step), weights(other, step)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main(recipe, output, resume, death):
    """death: ["step", n], at the end of this step; ["save", n], while it is saved, after the optimiser's state;
    ["room", n], no death, but from step 10 on no file may grow beyond n bytes, as on a full disk; or None."""
    torch.set_num_threads(1)
    from fem.train import metrics, trainer, training
    from fem.train.recipe import TrainRecipe

    if death is not None:
        place, step = death
        owner, name = (
            (trainer.TextTrainer, "_save_rng_state") if place == "save" else (metrics.MetricsCallback, "on_step_end")
        )
        method = getattr(owner, name)

        def dying(self, *args, **given):
            state = args[1] if place != "save" else self.state
            if place == "room":
                if state.global_step == 10:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (step, step))
                return method(self, *args, **given)
            return die() if state.global_step == step else method(self, *args, **given)

        setattr(owner, name, dying)
    training.run(TrainRecipe(**recipe), Path(output), resume)
    assert not torch.distributed.is_initialized(), "its threads block or abort some of the exits"


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
