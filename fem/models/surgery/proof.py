"""Run a model on a few random tokens and compare every attention with its replacement, before anything changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from logging import INFO, WARNING

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

TOKENS, STEPS, SAMPLES, GRID = 8, 64, 4000, (4, 4)
logger = logging.get_logger(__name__)


def disagreements(model: nn.Module, compare: dict[str, Callable]) -> list[str]:
    """Objections of each attention that runs to its replacement; `compare`: by path, a forward hook that returns one.

    Where the whole does not reach an attention, the models inside it run by themselves: the tower that sees pictures,
    for instance. What still has not run, as on the meta device and with a flash kernel, is not compared, and
    transformers' log says so. The model's mode, weights and random numbers stay what they are.
    """
    waiting, reasons, failed = set(compare), {}, ""

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        waiting.discard(path)
        if (reason := compare[path](module, args, kwargs, output)) is not None:
            reasons[path] = f"{path or 'it'} ({type(module).__name__}): {reason}"

    modules = dict(model.named_modules())
    with ExitStack() as undo:
        for path in compare:
            undo.enter_context(modules[path].register_forward_hook(partial(note, path), with_kwargs=True))
        for module in modules.values():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        for name, part in modules.items():
            inside = f"{name}." if name else ""
            if not isinstance(part, PreTrainedModel) or not any(path.startswith(inside) for path in waiting):
                continue
            try:
                if inputs := _example(part):
                    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                        part(**inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                failed = f"; on random inputs {type(part).__name__} says {type(error).__name__}: {error}"
    if waiting:
        said = "%d of %d attentions of %s are replaced without being run and compared before%s."
        logger.log(WARNING if failed else INFO, said, len(waiting), len(compare), type(model).__name__, failed)
    return list(reasons.values())


def _example(model: PreTrainedModel) -> dict[str, Tensor | bool] | None:
    """Random tokens, a picture or a sound for a model of transformers; None where it cannot run on them."""
    config, name, inputs = model.config, model.main_input_name, {}
    takes, draw = inspect.signature(model.forward).parameters, torch.Generator().manual_seed(0)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if config._attn_implementation not in ("sdpa", "eager") or on_meta:
        return None
    if words := getattr(config.get_text_config(), "vocab_size", None):
        ids = torch.randint(words, (1, TOKENS), generator=draw, device="cpu").to(model.device)
        inputs |= {key: ids for key in ("input_ids", "decoder_input_ids") if key in takes}
    if "grid_thw" in takes:  # one picture, as a row for each of its patches
        name, inputs["grid_thw"] = next(iter(takes)), torch.tensor([[1, *GRID]], device=model.device)
    if name != "input_ids" and (shape := _shape(config, name, "grid_thw" in inputs)):
        inputs[name] = torch.randn(shape, generator=draw, device="cpu").to(model.device, model.dtype)
    if name not in inputs:
        return None
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})


def _shape(config: PreTrainedConfig, name: str, patched: bool) -> tuple[int, ...] | None:
    """The shape of a picture, of its patches, of frequencies over time or of a sound, where the config says it."""
    size = lambda field, default=None: getattr(config, field, default)  # noqa: E731
    side, steps, patch = size("image_size"), size("max_source_positions"), size("patch_size")
    if patched:
        depth = size("in_channels", 3) * size("temporal_patch_size", 2)
        return (math.prod(GRID), depth * patch**2) if isinstance(patch, int) else None
    shapes = {
        "pixel_values": (1, size("num_channels", 3), *(side if isinstance(side, (list, tuple)) else (side, side))),
        "input_features": (1, size("num_mel_bins"), 2 * steps) if steps else (1, STEPS, size("num_mel_bins")),
        "input_values": (1, SAMPLES),
    }
    shape = shapes.get(name, (None,))
    return shape if all(isinstance(length, int) for length in shape) else None
