"""torchtitan's configurations for FEM: a debug model and the paper's language models, by form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from fem.models.presets import preset
from fem.optim import decayed_names
from fem.train.recipe import RECIPES, TrainRecipe
from fem.train.titan.data import TokenRows
from fem.train.titan.model import FEMDecoder, FEMStateDictAdapter
from fem.train.titan.parallel import parallelize, pipeline

# `fem train`'s recipes; the micro-batch of one GPU, and whether its blocks are computed again in the backward pass.
SIZES = {
    "debug": (TrainRecipe(max_steps=20, warmup_steps=2, context=128, batch_size=4), 2, False),
    "paper_340m": (RECIPES["paper-340m"], 8, True),
    "paper_1_3b": (RECIPES["paper-1.3b"], 2, True),
}
PRIORS = {"": "sm", "_gla": "gla", "_hybrid": "gla"}  # hybrid: three layers of GLA, one of softmax, over and over
STARTS = ("", "_slim", "_split")
ENDS = ("", "_untied", "_float8")  # untied: for pipelines, whose ends lie on different devices


class NoTokenizer(BaseTokenizer):
    """torchtitan asks for a tokenizer, which `TokenRows` does not need: it reads tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError("the rows are tokens already.")

    decode = get_vocab_size = encode


def trainer(size: str, prior: str, start: str, end: str) -> Trainer.Config:
    """The recipe of this size for this form of FEM; of the debug model float8 is emulated."""
    recipe, micro, recompute = SIZES[size]
    name = f"fem-{PRIORS[prior]}{start.replace('_', '-')}-{recipe.preset.rpartition('-')[2]}"
    further = {"tie_word_embeddings": end != "_untied"}
    if prior == "_hybrid":
        further["layer_priors"] = preset(name).num_hidden_layers // 4 * [*3 * ["gla"], "softmax"]
    model = FEMDecoder.Config(fields=preset(name, **further).to_dict())
    if end == "_float8":
        model = Float8LinearConverter.Config(emulate=size == "debug").build().convert(model)
    loss = CrossEntropyLoss.Config(global_vocab_size=model.fields["vocab_size"])
    return Trainer.Config(
        model_spec=ModelSpec(
            name="fem",
            flavor=size + prior + start + end,
            model=model,
            parallelize_fn=parallelize,
            pipelining_fn=pipeline,
            post_optimizer_build_fn=None,
            state_dict_adapter=FEMStateDictAdapter,
        ),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        tokenizer=NoTokenizer.Config(),
        dataloader=TokenRows.Config(seed=recipe.seed, documents=recipe.documents),
        optimizer=OptimizersContainer.Config(param_groups=groups(model, recipe)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=recipe.warmup_steps, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=micro,
            global_batch_size=recipe.batch_size,
            seq_len=recipe.context,
            steps=recipe.max_steps,
            max_norm=recipe.clip,
            mixed_precision_param=recipe.dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", context_parallel_load_balancer=None),
        checkpoint=CheckpointManager.Config(interval=recipe.save_steps),
        activation_checkpoint=FullAC.Config() if recompute else None,
        metrics=MetricsProcessor.Config(log_freq=1 if size == "debug" else recipe.log_steps),
    )


def groups(model: FEMDecoder.Config, recipe: TrainRecipe) -> list[ParamGroupConfig]:
    """The two groups of `fem.parameter_groups`, told apart by the names of those that do not decay."""
    with torch.device("meta"):
        built = FEMDecoder(model)
    decayed = set(decayed_names(built))
    kept = {_pattern(name) for name, _ in built.named_parameters() if name not in decayed}
    adamw = {"lr": recipe.learning_rate, "betas": (0.9, recipe.beta2)}
    return [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": decay})
        for pattern, decay in (("|".join(sorted(kept)), 0.0), (".*", recipe.weight_decay))
    ]


def _pattern(name: str) -> str:
    """The same parameter of any layer, checkpointed or not."""
    exact = re.escape(name)
    return "^" + re.sub(r"^layers\\\.\d+\\\.", r"layers\\.\\d+\\.(_checkpoint_wrapped_module\\.)?", exact) + "$"


for _name in product(SIZES, PRIORS, STARTS, ENDS):
    globals()["".join(_name)] = partial(trainer, *_name)
