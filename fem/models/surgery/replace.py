"""Replace the attention of a model in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from fem.arguments import check_flags
from fem.checks import unknown_field
from fem.config import MIXER_FIELDS
from fem.models.surgery.graft import apply, survey


def replace_attention(
    model: nn.Module,
    prior_type: str = "softmax",
    *,
    preserve: bool = True,
    layers: Iterable[int] | None = None,
    **config,
) -> nn.Module:
    """Turn the self-attention of `model` into Free Energy Mixers, in place, and return the model; of a lone attention,
    the module that takes its place.

        attention: o_t = W_O mean_t         FEM: o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))     (Eq. 11)

    preserve=True keeps q, k, v, o, their parameters and their names, and adds lambda, beta and g under `free_energy`.
    They start at lambda = 5e-5 (lambda_init = -10) and g = 1, so the model computes what it did, and fine-tuning turns
    it into FEM. The original's masks, rotary embeddings, caches and `generate` stay at work; dropout of the attention's
    weights falls on the mixed output instead. It needs prior_type="softmax", the prior that was there.
    This is checked first: a transformers model runs once on 8 random tokens, a random picture or a random sound, and so
    do the models inside it whose attention it did not reach, which costs these forwards with each attention computed
    twice; an attention that would compute something else is refused by name. Nothing is checked on the meta device,
    with flash attention, or for other inputs, and transformers' log says how many attentions that are. Calls under
    flex_attention are refused.
    preserve=False puts a fresh FreeEnergyMixer of any prior in place, with 4 D^2 linear weights
    (FreeEnergyMixerConfig.matched), causal where the original is, rotated at its rope_theta without its scaling. Give
    causal=True where only the calls are causal (CLIP's text); a call that says otherwise than the mixer is refused.

    Replaced: what reads through transformers' attention functions (research/results lists the model types),
    timm's ViT, and nn.MultiheadAttention as self-attention, by itself or in nn.TransformerEncoder/DecoderLayer.
    Cross-attention beside self-attention stays as it is. layers: indices of the self-attentions to replace, in the
    order of model.modules(); None: all. config: fields of FreeEnergyMixerConfig, where the original does not decide.

    Make the optimizer afterwards, or it lacks the new parameters. Those of lambda and beta have tiny gradients at first
    and need some 30 times the original's rate (FreeEnergyHead.temperature_parameters). A transformers model, and each
    inside a model of another kind, notes the call in its config: save it with save_pretrained, load it with an Auto
    class or `fem.models.load_replaced`; its original class refuses such a folder. Where only the body of a model was
    replaced, load_replaced opens what the whole saves; so a body notes the call in a config that other models may
    share: give these a copy. Any other model, and a part of one: build, replace, load_state_dict.

    Raises ValueError on attention that cannot be replaced, by name, on a model with adapters, on layers out of range or
    replaced before, and on fields that the original decides; TypeError on unknown fields.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {model!r}; load it first, by from_pretrained for instance.")
    if hasattr(model, "peft_config"):
        raise ValueError(
            "model must be replaced before it gets adapters, as these save none of the free energy: call "
            "replace_attention first, then get_peft_model with modules_to_save=['beta', 'inner'] in its config."
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "model must be replaced before its weights are split over processes: replace and save it, then load it "
            "with tp_plan, or shard it."
        )
    for name in config.keys() - MIXER_FIELDS:
        raise unknown_field("replace_attention", name, config[name], ["preserve", "layers", *sorted(MIXER_FIELDS)])
    check_flags(preserve=preserve)
    layers = list(layers) if isinstance(layers, Iterable) else layers
    if layers is not None and (
        not isinstance(layers, list) or len(set(map(repr, layers))) != len(layers) or not layers
    ):
        raise ValueError(f"layers must be a list of indices, each once, or None for all, got {layers!r}.")
    saved = list(dict.fromkeys(_saved_by_themselves(model)))
    if layers is not None and saved and saved[0] is not model:
        raise ValueError(
            f"layers must be indices within the part that is saved, got {layers} of the whole model; call "
            f"replace_attention on its {type(saved[0]).__name__}."
        )
    config = {name: value.item() if getattr(value, "shape", None) == () else value for name, value in config.items()}
    model = apply(model, prior_type, preserve, layers, config)
    call = {"prior_type": prior_type, "preserve": preserve, "layers": layers, "config": config}
    for part in saved:
        from fem.models.surgery.checkpoint import record

        sites, _, _ = survey(part)
        record(part, call | {"self_attentions": len(sites)})
    return model


def _saved_by_themselves(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost transformers models in it, which may be itself."""
    if hasattr(module, "save_pretrained") and hasattr(getattr(module, "config", None), "save_pretrained"):
        yield module
        return
    for part in module.children():
        yield from _saved_by_themselves(part)
