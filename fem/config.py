"""The configuration of one mixer layer: what it computes and how wide it is."""

from __future__ import annotations

import functools
import math
from dataclasses import MISSING, dataclass, fields, replace

from fem.checks import SMALLEST, finite_number, is_number, positive_int, unknown_field
from fem.prior_table import BACKENDS, known_priors

AUTHORS_BACKENDS = {"auto": "auto", "naive": "plain", "flash": "sdpa", **{name: name for name in BACKENDS}}
DECAYS = ("scalar", "head", "channel")
CONDITIONERS = ("scaled", "paper", "authors")
CONDITIONER_FIELDS = ("conv_hidden", "conv_form", "conv_norm_first", "conv_bidirectional")
MLPS = ("narrowed", "kept")  # beside a mixer with more parameters than attention: to make up for them, or as it is

WIDTHS = ("fem_dim", "qk_dim", "fem_ratio", "p_t_to_fem_ratio")
WHOLE = ("n_embd", "n_head", "ssm_rank")
WHOLE_OR_NONE = ("fem_dim", "qk_dim", "n_kv_head", "window", "conv_hidden")
# Heads from this width on get values in multiples of 8, where that moves the weights by this share at most.
_WIDE_HEAD, _FOR_EIGHTS = 48, 0.04
POSITIVE = ("fem_ratio", "p_t_to_fem_ratio", "eps", "rope_theta", "rope_factor", "value_logexp_cap")
RANGES = dict.fromkeys(POSITIVE, (SMALLEST, math.inf)) | {  # inclusive
    "free_share": (SMALLEST, 1.0),
    "beta_max_init": (-87.0, 1e30),  # softplus of it is a normal number of float32
    "lambda_init": (-math.inf, math.inf),
}


def _name_unknown_fields(cls):
    """Turn Python's TypeError on an unknown field into a sentence that names the nearest known one."""
    init, known = cls.__init__, [field.name for field in fields(cls)]

    @functools.wraps(init)
    def checked(self, *args, **values):
        if args:
            raise TypeError(
                f"{cls.__name__} takes its fields by name, such as n_embd=512, got {len(args)} without a name."
            )
        for name in values:
            if name not in known:
                raise unknown_field(cls.__name__, name, values[name], known)
        init(self, **values)
        if len(values) < len(known):  # a copy of a configuration names every field
            self._check_read(values)

    cls.__init__ = checked
    return cls


@_name_unknown_fields
@dataclass(frozen=True, kw_only=True)
class FreeEnergyMixerConfig:
    """Sizes, prior and switches of a `FreeEnergyMixer`.

        o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))                        (Eq. 11)

    n_embd: width D of the layer's input and output; n_head: heads H, a divisor of D.
    fem_dim: width d of the value path over all heads, or None for fem_ratio * D; qk_dim: width of the queries and
    of the keys over all heads, or None for p_t_to_fem_ratio * d / 2. Both round to whole heads (keys to even ones
    under RoPE). `matched` solves them for the parameters of plain attention instead.
    prior_type: a key of `fem.PRIORS`. n_kv_head and window belong to the softmax prior, decay to gla,
    ssm_rank to mamba. normalize=False leaves the score of a scan prior unnormalised.
    use_conv, use_lse, use_temperature, use_outer_gate: the paper's C, L, T, G. T needs L and switches it on; L without
    T reads F alone, at beta 1, or with keep_lambda=True mixes mean and F there by lambda, as the authors' file does.
    gate_rank: lambda and g come from full maps D x d (None, the paper's), from two maps D x r and r x d (r), or are
    one number per head (0). A slim gate leaves `matched` more width for the values.
    beta_max_init: beta starts at softplus(beta_max_init); lambda_init: bias of the lambda projection at the start.
    rope_theta: rotary plane j turns by theta^(-2 j / d_k) a position; rope_frequencies: by these instead, one for each
    of the d_k / 2 planes; rope_factor: what rotated queries and keys are multiplied by. Scaled angles need the two
    (`FEMConfig.rope_parameters` fills them in).
    free_share: None: every channel reads mean and F and mixes them by lambda (the paper's). 0 < free_share <= 1: split
    values; that share of each head's channels, the last ones, reads F, the others read the mean, and there is no
    lambda. It is rounded to whole channels; a share that rounds to none is refused.
    value_logexp_cap: clip |beta v| in the log-sum-exp branch (None: exact, no clip).
    conv_hidden: width H_c of the conditioner (None: d / 16, at least 8, and from 16 on a multiple of 8).
    conv_form: what multiplies the conditioner's normalised state, by z of unit length: SiLU(sqrt(H_c) z) ("scaled"),
    SiLU(z) as in the paper ("paper"), or sqrt(H_c) z as in the authors' file ("authors").
    backend: which implementation reads ("auto", "plain", "sdpa", "triton", "reference").
    softmax_backend and mamba_normalize are the authors' names of backend and normalize.
    After construction widths, backend and normalize hold what they resolved to, which `dataclasses.replace` keeps: with
    another n_embd or ratio, reset fem_dim, qk_dim and conv_hidden to None.

    Raises TypeError on an unknown field, ValueError on a value that no layer can have and on a field that the prior
    does not read.
    """

    n_embd: int
    n_head: int
    fem_dim: int | None = None
    fem_ratio: float = 0.5
    qk_dim: int | None = None
    p_t_to_fem_ratio: float = 4.0
    prior_type: str = "softmax"
    n_kv_head: int | None = None
    window: int | None = None
    decay: str = "head"
    ssm_rank: int = 16
    normalize: bool | None = None
    mamba_normalize: bool = True
    causal: bool = True
    bias: bool = True
    dropout: float = 0.0
    eps: float = 1e-6
    use_temperature: bool = True
    use_lse: bool = True
    use_outer_gate: bool = True
    keep_lambda: bool = False
    gate_rank: int | None = None
    beta_max_init: float = 1.8
    lambda_init: float = 0.0
    value_logexp_cap: float | None = None
    free_share: float | None = None
    use_rope: bool = True
    rope_theta: float = 10000.0
    rope_frequencies: tuple[float, ...] | None = None
    rope_factor: float = 1.0
    use_conv: bool = True
    conv_hidden: int | None = None
    conv_form: str = "scaled"
    conv_norm_first: bool = True
    conv_bidirectional: bool = False
    backend: str | None = None
    softmax_backend: str = "auto"

    def __post_init__(self):
        self._check_choices()
        self._resolve_aliases()
        self._resolve_widths()
        self._check_prior()

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_choices(self):
        for name in WHOLE + WHOLE_OR_NONE:
            value = getattr(self, name)
            if value is not None or name in WHOLE:
                self._set(**{name: positive_int(name, value)})
        if self.gate_rank is not None:
            self._set(gate_rank=positive_int("gate_rank", self.gate_rank, (None, 0)))
        for name, default in _DEFAULTS.items():
            if isinstance(default, bool) and not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise ValueError(f"normalize must be True, False or None, got {self.normalize!r}.")
        for name, (low, high) in RANGES.items():
            if getattr(self, name) is not None or name not in ("value_logexp_cap", "free_share"):
                self._set(**{name: finite_number(name, getattr(self, name), low, high)})
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout!r}.")
        if self.n_embd % self.n_head and None in (self.fem_dim, self.qk_dim):
            raise ValueError(f"n_head must divide n_embd = {self.n_embd}, got n_head = {self.n_head}.")
        choices = {"prior_type": known_priors(), "decay": DECAYS, "conv_form": CONDITIONERS}
        choices |= dict.fromkeys(("backend", "softmax_backend"), AUTHORS_BACKENDS)
        for name, known in choices.items():
            value = getattr(self, name)
            if not (value is None and name == "backend") and not (isinstance(value, str) and value in known):
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.")
        if self.causal and self.conv_bidirectional:
            raise ValueError("conv_bidirectional=True lets the future in; it needs causal=False, got causal=True.")

    def _resolve_aliases(self):
        if self.backend is not None and self.softmax_backend != "auto":
            raise ValueError(
                f"softmax_backend is the authors' name of backend: give one, got backend={self.backend!r} "
                f"and softmax_backend={self.softmax_backend!r}."
            )
        if self.normalize is True and not self.mamba_normalize:
            raise ValueError(
                "mamba_normalize is the authors' name of normalize: give one, or both alike in dataclasses.replace, "
                "which keeps the other; got normalize=True and mamba_normalize=False."
            )
        normalize = self.mamba_normalize if self.normalize is None else self.normalize
        self._set(
            backend=AUTHORS_BACKENDS[self.backend or self.softmax_backend],
            softmax_backend="auto",
            normalize=normalize,
            mamba_normalize=normalize,
            use_lse=self.use_lse or self.use_temperature,
        )

    def _resolve_widths(self):
        if self.fem_dim is None:
            self._set(fem_dim=_nearest_multiple(self.fem_ratio * self.n_embd, self.n_head))
        if self.qk_dim is None:
            self._set(qk_dim=_nearest_multiple(self.p_t_to_fem_ratio * self.fem_dim / 2, self._key_step))
        for name, step in (("fem_dim", self.n_head), ("qk_dim", self._key_step)):
            if getattr(self, name) % step:
                even = " (an even width per head for RoPE)" if step > self.n_head else ""
                raise ValueError(f"{name} must be a multiple of {step}{even}, got {getattr(self, name)}.")
        if self.conv_hidden is None:
            width = max(8, self.fem_dim // 16)
            if width >= 16:  # a map of [x, h] has rows of D + H_c numbers, which tensor cores want in eights
                width = _nearest_multiple(width, 8)
            self._set(conv_hidden=width + width % 2 if self.conv_bidirectional else width)
        if self.conv_bidirectional and self.conv_hidden % 2:
            raise ValueError(
                f"conv_bidirectional splits conv_hidden in halves; it must be even, got {self.conv_hidden}."
            )

    def _check_prior(self):
        if self.n_kv_head is not None and self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head = {self.n_head}, got {self.n_kv_head}.")
        if self.prior_type == "softmax" and not self.normalize:
            raise ValueError("normalize=False is for scan priors; the softmax prior is normalised by definition.")
        if self.rope_frequencies is not None:
            if not isinstance(self.rope_frequencies, (list, tuple)):
                raise ValueError(f"rope_frequencies must be a list of numbers, got {self.rope_frequencies!r}.")
            numbers = (finite_number("each of rope_frequencies", f, -math.inf, math.inf) for f in self.rope_frequencies)
            self._set(rope_frequencies=tuple(numbers))
            planes = self.key_width / 2
            if not self.use_rope or len(self.rope_frequencies) != planes:
                wanted = f"one number for each of the {planes:g} planes of a head" if self.use_rope else "use_rope=True"
                raise ValueError(f"rope_frequencies needs {wanted}, got {len(self.rope_frequencies)} numbers.")
        if self.keep_lambda and (self.use_temperature or not self.use_lse or self.free_share is not None):
            raise ValueError(
                "keep_lambda=True needs use_lse=True, use_temperature=False and no free_share, got "
                f"use_lse={self.use_lse}, use_temperature={self.use_temperature} and free_share={self.free_share}."
            )
        for name in ("free_share", "value_logexp_cap"):
            value = getattr(self, name)
            if value is not None and not self.use_lse:
                raise ValueError(f"{name} needs use_lse=True, got {name}={value!r} with use_lse=False; leave it out.")
            if value is not None and not known_priors()[self.prior_type].takes_pairs:
                raise ValueError(
                    f"{name} needs a prior that reads every channel on its own, got {name}={value!r} "
                    f"with {self.prior_type!r}, which reads all channels of a head together; leave it out."
                )
        if self.free_width == 0:
            raise ValueError(
                f"free_share must give each head a whole channel of its {self.value_width}, "
                f"got {self.free_share!r}, which rounds to none."
            )
        for name, readers in _readers().items():
            value = getattr(self, name)
            if self.prior_type not in readers and value != _DEFAULTS[name]:
                raise ValueError(
                    f"{name} needs prior_type={' or '.join(map(repr, readers))}, got {name}={value!r} with "
                    f"{self.prior_type!r}; leave it out."
                )

    def _check_read(self, values: dict) -> None:
        """Raise ValueError on a field that was given, differs from its default, and is read by nothing.

        p_t_to_fem_ratio passes for priors without keys: the authors' script of rnn_softmax gives it.
        """
        prior = known_priors()[self.prior_type]
        keys = prior.widths(self).key_maps > 0
        needs = {
            "qk_dim": (keys, "a prior with queries and keys"),
            "rope_theta": (self.use_rope and self.rope_frequencies is None, "use_rope=True without rope_frequencies"),
            "rope_factor": (self.use_rope, "use_rope=True"),
            "p_t_to_fem_ratio": (values.get("qk_dim") is None, "qk_dim=None, which it would set"),
            "beta_max_init": (self.use_temperature, "use_temperature=True"),
            "lambda_init": (self.learns_lambda, "use_temperature=True, or keep_lambda=True, without free_share"),
            "fem_ratio": (values.get("fem_dim") is None, "fem_dim=None, which it would set"),
            "gate_rank": (
                self.learns_lambda or self.use_outer_gate,
                "a gate: use_outer_gate, or use_temperature without free_share",
            ),
            **dict.fromkeys(CONDITIONER_FIELDS, (self.use_conv, "use_conv=True")),
        }
        for name, (is_read, wanted) in needs.items():
            if not is_read and name in values and values[name] != _DEFAULTS[name]:
                raise ValueError(f"{name} needs {wanted}, got {name}={values[name]!r} without that; leave it out.")

    @property
    def _key_step(self) -> int:
        return self.n_head * (2 if self.use_rope else 1)

    @property
    def kv_heads(self) -> int:
        """Heads of the keys and values: n_kv_head, or n_head."""
        return self.n_kv_head or self.n_head

    @property
    def key_width(self) -> int:
        """Width of a head's queries and keys, d_k."""
        return self.qk_dim // self.n_head

    @property
    def value_width(self) -> int:
        """Width of a head's values, d_v."""
        return self.fem_dim // self.n_head

    @functools.cached_property  # once, as torch.compile(dynamic=True) would make a symbol of the float free_share
    def free_width(self) -> int:
        """The number of a head's channels that read the free energy: all of them, or those of free_share."""
        return self.value_width if self.free_share is None else round(self.free_share * self.value_width)

    @property
    def free_alone(self) -> bool:
        """True if every channel reads F and none the mean: a free energy without a lambda to mix it."""
        mixed = self.use_temperature or self.keep_lambda or not known_priors()[self.prior_type].takes_pairs
        return self.use_lse and self.free_share is None and not mixed

    @property
    def read_width(self) -> int:
        """Width of what a head's attention sums: the values, and e where each channel reads both mean and F."""
        both = self.use_lse and self.free_share is None and not self.free_alone
        return self.value_width * (2 if both else 1)

    @property
    def learns_lambda(self) -> bool:
        """True if lambda mixes mean and free energy."""
        return (self.use_temperature or self.keep_lambda) and self.free_share is None

    @property
    def context_width(self) -> int:
        """Width of the conditioner's features, which every projection reads behind the input; 0 without it."""
        return self.conv_hidden if self.use_conv else 0

    @property
    def linear_weights(self) -> int:
        """Weights of all linear maps of the layer, prior included, conditioner and biases apart (Appendix H.7)."""
        return self.weights_around_prior + known_priors()[self.prior_type].widths(self).linear

    @property
    def weights_around_prior(self) -> int:
        """Weights of the maps to values, gates and output."""
        value_and_output = self.n_embd * (self.kv_heads * self.value_width + self.fem_dim)
        gates = (self.learns_lambda + self.use_outer_gate) * self._gate_weights
        return value_and_output + gates

    @property
    def _gate_weights(self) -> int:
        """Weights of the maps behind one gate, lambda or g."""
        if self.gate_rank is None:
            return self.n_embd * self.fem_dim
        return self.gate_rank * (self.n_embd + self.fem_dim) if self.gate_rank else self.n_embd * self.n_head

    @classmethod
    def matched(cls, n_embd: int, n_head: int, prior_type: str = "softmax", **fields) -> FreeEnergyMixerConfig:
        """The configuration whose linear weights total those of plain attention, 4 D^2 (Appendix H.7).

            D d (value + output + lambda + gate) + prior = 4 D^2        a gate of rank r counts r (D + d), not D d

        Keys have the paper's width (D, or 2 D / 3 where the decay is as wide as they are). Of all widths that the heads
        divide, those that come nearest to the total are taken; multiples of 8 a head, where one of 48 or more comes
        within 4 % of it. `config.linear_weights` is the total reached. Raises what the configuration raises, and
        ValueError where fields name a width.
        """
        _refuse_widths("matched", fields)
        start = cls(n_embd=n_embd, n_head=n_head, prior_type=prior_type, **fields)
        key_maps, step = known_priors()[prior_type].widths(start).key_maps, start._key_step
        nominal = _nearest_multiple(2 * n_embd / max(key_maps, 2), step)
        offsets = (0,) if key_maps <= 2 else (0, -step, step)
        conv_hidden = fields.get("conv_hidden")  # None follows fem_dim
        off = lambda config: abs(config.linear_weights - 4 * n_embd**2)  # noqa: E731
        solved = (
            start._nearest_width(qk_dim=nominal + offset, conv_hidden=conv_hidden)
            for offset in offsets
            if nominal + offset > 0
        )
        return sorted(solved, key=off)[0]  # torch.compile knows no min with a key

    @classmethod
    def slim(cls, n_embd: int, n_head: int, prior_type: str = "softmax", **fields) -> FreeEnergyMixerConfig:
        """`matched` with slim gates, for reads of many extremes.

        lambda and g are maps of rank D / 16, so that the values stay nearly as wide as attention's and every channel
        reads mean and F: at width 512 a cache of 1.4 times attention's. With the conditioner under softmax, without
        it under the scans. fields replace any of this.
        """
        return cls.matched(n_embd, n_head, prior_type, **slim_fields(n_embd, prior_type, fields))

    @classmethod
    def split(cls, n_embd: int, n_head: int, prior_type: str = "softmax", **fields) -> FreeEnergyMixerConfig:
        """`matched` with split values: a read and a softmax cache no wider than attention's.

        Half of each head's channels read F, the others the mean (free_share=.5), without lambda; an outer gate of rank
        D / 16 and no conditioner. fields replace any of this.
        """
        return cls.matched(n_embd, n_head, prior_type, **split_fields(n_embd, prior_type, fields))

    @classmethod
    def paper(cls, n_embd: int, n_head: int, prior_type: str = "softmax", **fields) -> FreeEnergyMixerConfig:
        """The authors' widths, for comparisons with the paper's tables; for most priors they are those of `matched`.

        rnn_softmax (AFT) and rnn_decay: values as wide as the layer, d = D. mamba and mamba_interactive: d = 2 D / n,
        n the full maps among value, output, lambda and gate, so D / 2 with all parts and D without any. Raises what
        `matched` raises.
        """
        _refuse_widths("paper", fields)
        return build_config(n_embd=n_embd, n_head=n_head, prior_type=prior_type, **paper_fields(prior_type, fields))

    def _nearest_width(self, **fields) -> FreeEnergyMixerConfig:
        """The configuration with these fields whose weights come nearest to 4 D^2, by bisection.

        Wide heads get values in multiples of 8, as tensor cores want them, where that costs 4 % of the weights or less.
        """
        target = 4 * self.n_embd**2
        with_heads = lambda size: replace(self, fem_dim=size * self.n_head, **fields)  # noqa: E731
        least = 1 if self.free_share is None else int(0.5 / self.free_share) + 1  # free_share rounds to a channel there
        low, high = least, 4 * self.n_embd // self.n_head  # widths of a head's values: no more than 4 D in all
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if with_heads(middle).linear_weights < target else (low, middle)
        off = lambda config: abs(config.linear_weights - target)  # noqa: E731
        around = [with_heads(size) for size in (low - 1, low) if size >= least]
        eights = [with_heads(size) for size in (low // 8 * 8, low // 8 * 8 + 8) if size >= max(least, _WIDE_HEAD)]
        liked = [config for config in eights if off(config) <= _FOR_EIGHTS * target]
        return sorted(liked or around, key=off)[0]  # as above


_DEFAULTS = {field.name: field.default for field in fields(FreeEnergyMixerConfig) if field.default is not MISSING}


def build_config(**fields) -> FreeEnergyMixerConfig:
    """`FreeEnergyMixerConfig.matched`, unless fields name a width: then the configuration of these widths."""
    return FreeEnergyMixerConfig(**fields) if set(WIDTHS) & fields.keys() else FreeEnergyMixerConfig.matched(**fields)


def _refuse_widths(start: str, fields: dict) -> None:
    for name in WIDTHS:
        if name in fields:
            raise ValueError(f"{start} solves the widths; leave out {name}, or build FreeEnergyMixerConfig directly.")


def _readers() -> dict[str, list[str]]:
    """For each field that only some priors read, the names of these priors."""
    priors = known_priors()
    names = dict.fromkeys(name for prior in priors.values() for name in prior.uses)
    return {name: [key for key, prior in priors.items() if name in prior.uses] for name in names}


def slim_fields(n_embd: int, prior_type: str, changes: dict) -> dict:
    """The fields of `slim`, any of them replaced by `changes`; without a rank where these leave no gate.

    The rank D / 16 won where slim gates did; from width 128 on it is a multiple of 8.
    """
    width = positive_int("n_embd", n_embd)
    rank = _nearest_multiple(width / 16, 8) if width >= 128 else max(1, round(width / 16))
    mixed = changes.get("use_temperature", True) and changes.get("free_share") is None
    gate = {"gate_rank": rank} if mixed or changes.get("use_outer_gate", True) else {}
    return gate | {"use_conv": prior_type == "softmax"} | changes


def split_fields(n_embd: int, prior_type: str, changes: dict) -> dict:
    """The fields of `split`, any of them replaced by `changes`."""
    return slim_fields(n_embd, prior_type, {"use_conv": False, "free_share": 0.5} | changes)


def paper_fields(prior_type: str, changes: dict) -> dict:
    """`changes`, and the width of `paper` where it is another than that of `matched`."""
    if prior_type in ("rnn_softmax", "rnn_decay"):
        return {"fem_ratio": 1.0} | changes
    if prior_type not in ("mamba", "mamba_interactive"):
        return dict(changes)
    mixed = changes.get("use_temperature", True) or changes.get("keep_lambda", False)
    gates = (mixed and changes.get("free_share") is None) + changes.get("use_outer_gate", True)
    full = gates if changes.get("gate_rank") is None else 0
    return {"fem_ratio": 2 / (2 + full)} | changes


def _nearest_multiple(width: float | int, step: int) -> int:
    return max(step, step * round(width / step))
