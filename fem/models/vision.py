"""The image classifier: DeiT with a Free Energy Mixer in the place of its attention, for transformers."""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from fem.checks import finite_number
from fem.config import FreeEnergyMixerConfig, build_config
from fem.mixer import FreeEnergyMixer
from fem.models.configuration import CheckedConfig, check_names
from fem.models.modeling import FEMPreTrainedModel
from fem.models.presets import TRANSFORMER, narrowed_mlp
from fem.optim import AsksNoDecay

POOLINGS = ("cls", "mean")
SIZES = {  # the fields that are positive integers, and what may stand in their place
    **dict.fromkeys(("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers"), ()),
    "num_attention_heads": (),
    "intermediate_size": (None,),
}


@no_type_check  # the tests' shape checks take a constructor's arguments from the fields, but transformers' has more
class FEMImageConfig(CheckedConfig, PreTrainedConfig):
    """Sizes and mixers of a `FEMForImageClassification`. The defaults are DeiT-Tiny's; DeiT-Small has hidden_size 384
    and 6 heads.

    image_size, patch_size: side of the square images and of their patches, in pixels.
    prior_type: the prior of every layer, a key of `fem.PRIORS`; mixer: further fields of `FreeEnergyMixerConfig`.
    Mixers see the whole image (causal=False), without RoPE and with a conditioner in both directions, unless `mixer`
    says otherwise.
    A mixer has the linear weights of plain attention (`FreeEnergyMixerConfig.matched`), unless its fields name a width.
    intermediate_size: width of the MLP; None: 4 hidden_size, narrowed by as many parameters as the mixer has more than
    attention, so that the model has as many as DeiT.
    pooling: "cls" classifies by a class token, as DeiT; "mean" by the mean over patches, without such a token.
    drop_path_rate: how often, in training, the last block skips a branch for a sample; it grows linearly from 0 in the
    first block.

    Raises ValueError on sizes that no model can have, TypeError on unknown fields, its own and the mixers'.
    """

    model_type = "fem_image"
    auto_map = {  # noqa: RUF012
        "AutoConfig": "FEMImageConfig",
        "AutoModel": "FEMImageModel",
        "AutoModelForImageClassification": "FEMForImageClassification",
    }

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 192
    num_hidden_layers: int = 12
    num_attention_heads: int = 3
    intermediate_size: int | None = None
    prior_type: str = "softmax"
    mixer: dict | None = None
    pooling: str = "cls"
    drop_path_rate: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-6

    def __post_init__(self, **values):
        values.pop("auto_map", None)  # the class knows it
        self.refuse_unknown(values)
        self._check_sizes()
        built = self.mixer_config()
        if self.intermediate_size is None:
            attention = self._build({"prior_type": TRANSFORMER["prior_type"], **TRANSFORMER["mixer"]})
            excess, width = _parameters(built) - _parameters(attention), self.hidden_size
            self.intermediate_size = narrowed_mlp(4 * width, excess, 2 * width + 1, width)
        super().__post_init__(**values)

    def mixer_config(self) -> FreeEnergyMixerConfig:
        """The configuration of every layer's mixer."""
        return self._build({"prior_type": self.prior_type, **self.mixer})

    @property
    def num_tokens(self) -> int:
        """Tokens of an image: its patches, and the class token where there is one."""
        return (self.image_size // self.patch_size) ** 2 + (self.pooling == "cls")

    def _build(self, fields: dict) -> FreeEnergyMixerConfig:
        backwards = {"conv_bidirectional": True} if fields.get("use_conv", True) else {}
        encoder = {"n_embd": self.hidden_size, "n_head": self.num_attention_heads, "causal": False, "use_rope": False}
        return build_config(**encoder | backwards | fields)

    def _check_sizes(self):
        self.check_sizes(SIZES, ("layer_norm_eps", "initializer_range"))
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size must divide image_size = {self.image_size}, got {self.patch_size}.")
        check_names("mixer", self.mixer, {"n_embd", "n_head", "prior_type"})
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be {' or '.join(POOLINGS)}, got {self.pooling!r}.")
        if finite_number("drop_path_rate", self.drop_path_rate, 0.0, 1.0) == 1:
            raise ValueError(f"drop_path_rate must be below 1, got {self.drop_path_rate}.")
        if self.mixer.get("causal"):
            raise ValueError("mixer must leave causal False: an image has no future, got causal=True.")


def _parameters(mixer: FreeEnergyMixerConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in FreeEnergyMixer(mixer).parameters())


class PatchTokens(nn.Module):
    """z = [c, W x_1 + b, ..., W x_N + b] + positions, for the patches x_n of an image, row by row

    c: the class token, absent where the mean over patches is pooled. c and the positions start N(0, 0.02).
    """

    def __init__(self, config: FEMImageConfig):
        super().__init__()
        self.shape = (config.num_channels, config.image_size, config.image_size)
        self.std = config.initializer_range
        self.project = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.hidden_size)) if config.pooling == "cls" else None
        self.positions = nn.Parameter(torch.empty(1, config.num_tokens, config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.class_token, self.positions):
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=self.std)

    def forward(self, pixel_values: Float[Tensor, "b c h w"]) -> Float[Tensor, "b t d"]:
        if pixel_values.shape[1:] != self.shape:
            raise ValueError(
                f"pixel_values must have shape (batch, {', '.join(map(str, self.shape))}), "
                f"got {tuple(pixel_values.shape)}; resize the images, or build the model for their size."
            )
        x = self.project(pixel_values.to(self.project.weight.dtype)).flatten(2).mT
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions


class FEMImageBlock(GradientCheckpointingLayer):
    """x + Mixer(LayerNorm(x)), then x + MLP(LayerNorm(x))"""

    def __init__(self, config: FEMImageConfig, mixer: FreeEnergyMixerConfig, drop_path: float):
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mixer = FreeEnergyMixer(mixer)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(config.hidden_size, config.intermediate_size),
            nn.GELU(),
            nn.Linear(config.intermediate_size, config.hidden_size),
        )
        self.drop_path = nn.Dropout(drop_path)  # of whole branches: one number for each sample

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = x + self._kept(self.mixer(self.mixer_norm(x)))
        return x + self._kept(self.mlp(self.mlp_norm(x)))

    def _kept(self, branch: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """The branch; in training 0 for samples that drop it."""
        if not (self.training and self.drop_path.p):
            return branch
        return self.drop_path(branch.new_ones(len(branch), 1, 1)) * branch


class FEMImagePreTrainedModel(FEMPreTrainedModel):
    config_class = FEMImageConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["PatchTokens", "FEMImageBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": FEMImageBlock}  # noqa: RUF012

    @staticmethod
    def _no_engine(config: FEMImageConfig) -> str:
        return "the tokens of an image are read in both directions and never cached; leave out attn_implementation."


class FEMImageModel(FEMImagePreTrainedModel):
    """`PatchTokens`, `FEMImageBlock`s and a final LayerNorm: images (B, C, S, S) -> tokens (B, T, D).

    Raises ValueError on images of another size than config.image_size.
    """

    def __init__(self, config: FEMImageConfig):
        super().__init__(config)
        last = max(1, config.num_hidden_layers - 1)
        mixer = config.mixer_config()
        self.tokens = PatchTokens(config)
        self.layers = nn.ModuleList(
            FEMImageBlock(config, mixer, config.drop_path_rate * layer / last)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor, output_hidden_states: bool = False) -> BaseModelOutput:
        x = self.tokens(pixel_values)
        for block in self.layers:
            x = block(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class FEMForImageClassification(AsksNoDecay, FEMImagePreTrainedModel):
    """logits = W z + b, z the class token of a `FEMImageModel`, or the mean over its patches where config.pooling says.

    pixel_values (B, C, S, S), normalised. labels: classes (B,), or the probability of each (B, K) as mixup makes them;
    the loss is the cross-entropy, in nats, or what config.problem_type names: "regression" or
    "multi_label_classification", as transformers computes them. logits: (B, K), K = config.num_labels.

    Raises ValueError on images of another size than config.image_size, and on labels of a single class.
    """

    def __init__(self, config: FEMImageConfig):
        super().__init__(config)
        self.model = FEMImageModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs) -> ImageClassifierOutput:
        outputs = self.model(pixel_values, **kwargs)
        x = outputs.last_hidden_state
        logits = self.classifier(x[:, 0] if self.config.pooling == "cls" else x.mean(1))
        return ImageClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
        )

    def _loss(self, logits: Float[Tensor, "b k"], labels: Tensor) -> Float[Tensor, ""]:
        numbers = self.config.problem_type in ("regression", "multi_label_classification")
        if numbers and self.config.num_labels > 1 and labels.shape != logits.shape:
            raise ValueError(f"labels must have shape {tuple(logits.shape)}, got {tuple(labels.shape)}.")
        if numbers or hasattr(self, "_loss_function"):  # the latter is the user's own
            return self.loss_function(labels, logits.float(), self.config)
        if self.config.num_labels == 1:
            raise ValueError(
                'num_labels must be at least 2 to classify, got 1; problem_type="regression" fits numbers.'
            )
        return F.cross_entropy(logits.float(), labels if labels.is_floating_point() else labels.long())
