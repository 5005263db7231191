"""Find the self-attentions of a model, build their replacements, and put these in their places."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn

from fem.config import FreeEnergyMixerConfig
from fem.mixer import FreeEnergyMixer
from fem.models.surgery import multihead, timm
from fem.models.surgery.head import LAMBDA_INIT, FreeEnergyHead
from fem.models.surgery.site import CrossAttention, Refused, Site
from fem.prior_table import PRIORS, ROTARY

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # float8 holds weights, but computes nothing
DECIDED = (
    *("n_embd", "n_head", "n_kv_head", "fem_dim", "fem_ratio", "qk_dim", "p_t_to_fem_ratio", "causal", "window"),
    *("bias", "dropout", "use_rope", "rope_theta", *ROTARY, "normalize", "mamba_normalize", "decay", "ssm_rank"),
)
OTHER_READS = ("use_conv", "free_share", "value_logexp_cap")


def apply(
    model: nn.Module, prior_type: str, preserve: bool, layers: list[int] | None, config: dict, self_attentions=None
) -> nn.Module:
    """`replace_attention`, but the call is not noted in the model's config.

    self_attentions: of the model that a noted call was made on; ValueError where that was a part of this one.
    """
    sites = _chosen(model, layers, self_attentions)
    compare = {path: site.compare for path, site in sites.items() if preserve and site.compare}
    if compare:  # models of transformers, which may not be installed
        from fem.models.surgery.proof import disagreements

        if reasons := disagreements(model, compare):
            raise ValueError(f"{type(model).__name__} cannot be replaced: {'; '.join(reasons)}.")
    build = _head if preserve else _mixer
    parts = {
        path: build(site, prior_type, config).to(_home(site.weight, model)).train(site.module.training)
        for path, site in sites.items()
    }
    places = list(model.named_modules(remove_duplicate=False))  # an attention may stand at several
    for path, site in sites.items():
        module = site.graft(parts[path]) if preserve else site.swap(parts[path])
        if path:
            for place in (place for place, held in places if held is site.module):
                model.set_submodule(place, module)
        else:
            model = module
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False
    return model


def _head(site: Site, prior_type: str, config: dict) -> FreeEnergyHead:
    if prior_type != "softmax":
        raise ValueError(
            f"preserve=True keeps the softmax prior of the original, got prior_type={prior_type!r}; "
            "pass preserve=False for a fresh mixer of that prior."
        )
    for name, value in config.items():
        if name in DECIDED or (name in OTHER_READS and value):
            what = "is set by the original" if name in DECIDED else "changes what the original computes"
            raise ValueError(f"{name} {what}, got {value!r}; leave it out, or pass preserve=False.")
    if config.get("use_lse", False) and not config.get("use_temperature", True):
        raise ValueError(
            "use_lse without use_temperature drops the original's mean; leave it out or pass preserve=False."
        )
    start = {"use_conv": False, "use_rope": False}  # queries and keys come as the original has turned them
    start |= {"lambda_init": LAMBDA_INIT} if config.get("use_temperature", True) else {"use_lse": False}
    return FreeEnergyHead(FreeEnergyMixerConfig(**site.fields | start | config))


def _mixer(site: Site, prior_type: str, config: dict) -> FreeEnergyMixer:
    if site.fresh is None:
        raise ValueError(
            f"{type(site.module).__name__} is called in a way that a fresh mixer cannot take; pass preserve=True."
        )
    for name, others in {"n_embd": (), "causal": (True,)}.items():  # a call or its mask may be causal
        if config.get(name, site.fresh[name]) not in (site.fresh[name], *others):
            raise ValueError(
                f"{name} is set by the original to {site.fresh[name]!r}, got {config[name]!r}; leave it out."
            )
    fields = site.fresh | config
    unread = {"n_kv_head", "window", "rope_theta"} - {*getattr(PRIORS.get(prior_type), "uses", ())}
    if fields["n_head"] != site.fresh["n_head"]:
        unread.add("n_kv_head")  # it belongs to the original's heads
    if not fields["use_rope"] or fields.get("rope_frequencies") is not None:
        unread.add("rope_theta")
    fields = {name: value for name, value in fields.items() if name in config or name not in unread}
    return FreeEnergyMixer(FreeEnergyMixerConfig.matched(prior_type=prior_type, **fields))


def _home(weight: Tensor, model: nn.Module) -> Tensor:
    """A tensor whose device and dtype new parameters take: the weight; where that is quantised, others' dtype."""
    if weight.dtype in FLOATS:
        return weight
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.dtype in FLOATS)
    return torch.empty((), dtype=next(dtypes, None), device=weight.device)


def _chosen(model: nn.Module, layers: list[int] | None, before: int | None) -> dict[str, Site]:
    """The sites to replace, by their path in the model; `before`: how many a model had whose layers these were."""
    sites, crossed, unknown = survey(model)
    if before is not None and (len(sites) > before or (layers is not None and len(sites) < before)):
        raise ValueError(
            f"the free energy was put into a part with {before} self-attentions, and {type(model).__name__} has "
            f"{len(sites)}; build the original, replace that part and load_state_dict, or replace the whole by "
            "layers=[...]."
        )
    if not sites and any(isinstance(module, FreeEnergyMixer) for module in model.modules()):
        raise ValueError(
            f"model must have attention to replace, got {type(model).__name__}, which is built of Free Energy Mixers."
        )
    if not sites or (unknown and layers is None):
        reasons = "; ".join([*unknown, *crossed]) or "no attention was found in it"
        raise ValueError(
            f"{type(model).__name__} cannot be replaced: {reasons}. Pass the part that holds GPT-2, Llama, BERT or ViT "
            "attention or nn.MultiheadAttention, name layers=[...] to replace the others, or build the model on fem."
        )
    wanted = range(len(sites)) if layers is None else layers
    for index in wanted:
        if isinstance(index, bool) or not isinstance(index, int) or not -len(sites) <= index < len(sites):
            raise ValueError(
                f"layers must be indices below {len(sites)}, the number of self-attentions, got {index!r}."
            )
    chosen = [list(sites)[index] for index in sorted({index % len(sites) for index in wanted})]
    for path in chosen:
        if sites[path] is None:
            raise ValueError(
                f"model must hold its original attention, got {path or 'the model itself'!r}, which was replaced "
                "before; load the original anew, or name the others by layers=[...]."
            )
    return {path: sites[path] for path in chosen}


def survey(model: nn.Module) -> tuple[dict[str, Site | None], list[str], list[str]]:
    """All self-attentions of the model by path, None for a replaced one; why each other attention is none of them: the
    cross-attentions, and those that are unknown."""
    families = [multihead, timm]
    if find_spec("transformers"):
        from fem.models.surgery import pretrained

        families.append(pretrained)
    modules = dict(model.named_modules())
    sites, crossed, unknown = {}, [], []
    for path, module in modules.items():
        if not _is_attention(module) or any(_is_attention(part) for part in module.modules() if part is not module):
            continue
        parent = modules[path.rpartition(".")[0]] if path else None
        try:
            sites[path] = _site(families, module, path, parent)
        except Refused as reason:
            kind = crossed if isinstance(reason, CrossAttention) else unknown
            kind.append(f"{path or 'it'} ({type(module).__name__}): {reason}")
    return sites, crossed, unknown


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") or isinstance(module, nn.MultiheadAttention)


def _site(families: list[ModuleType], module: nn.Module, path: str, parent: nn.Module | None) -> Site | None:
    if any(isinstance(part, (FreeEnergyHead, FreeEnergyMixer)) for part in module.children()):
        return None
    for family in families:
        site = family.find(module, path.rpartition(".")[2], parent)
        if site is not None:
            return site
    raise Refused("this kind of attention is unknown here")
