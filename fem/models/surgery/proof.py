"""Run a model once on a few random tokens and compare every attention with its replacement, before anything changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.utils import logging

TOKENS = 8
logger = logging.get_logger(__name__)


def disagreements(model: nn.Module, compare: dict[str, Callable]) -> list[str]:
    """Objections of each attention that runs to its replacement; `compare`: by path, a forward hook that returns one.

    Nothing is compared on the meta device, with a flash or flex kernel, or where the model needs other inputs than
    token ids or pictures; transformers' log says so. The model's mode, weights and random numbers stay what they are.
    """
    if not compare:
        return []
    if (inputs := _example(model)) is None:
        logger.info("%s is not run before its attention is replaced, so nothing is compared.", type(model).__name__)
        return []
    said, training = [], {module: module.training for module in model.modules()}

    def listen(path: str, hook: Callable) -> Callable:
        def note(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            reason = hook(module, args, kwargs, output)
            if reason is not None:
                said.append(f"{path or 'it'} ({type(module).__name__}): {reason}")

        return note

    modules = dict(model.named_modules())
    handles = [
        modules[path].register_forward_hook(listen(path, hook), with_kwargs=True) for path, hook in compare.items()
    ]
    try:
        model.eval()
        with torch.no_grad():
            model(**inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        told = "%s does not run on random inputs, so its attention is replaced without being compared: %s: %s"
        logger.warning(told, type(model).__name__, type(error).__name__, error)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    return said


def _example(model: nn.Module) -> dict[str, Tensor | bool] | None:
    """Random token ids or one random picture for a model of transformers; None where it cannot run on them."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in ("sdpa", "eager") or any(parameter.is_meta for parameter in model.parameters()):
        return None
    takes, draw = inspect.signature(model.forward).parameters, torch.Generator().manual_seed(0)
    if name == "input_ids" and getattr(config.get_text_config(), "vocab_size", None):
        ids = torch.randint(config.get_text_config().vocab_size, (1, TOKENS), generator=draw).to(model.device)
        inputs = {key: ids for key in ("input_ids", "decoder_input_ids") if key in takes}
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        inputs = {name: torch.randn(shape, generator=draw).to(model.device, model.dtype)}
    else:
        return None
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})
