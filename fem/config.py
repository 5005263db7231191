"""The configuration of one mixer layer: what it computes and how wide it is."""

from __future__ import annotations

import functools
import math
from dataclasses import MISSING, dataclass, fields, replace

from fem.checks import SMALLEST, finite_number, is_number, positive_int, unknown_field
from fem.prior_table import BACKENDS, known_priors

AUTHORS_BACKENDS = {"auto": "auto", "naive": "plain", "flash": "sdpa", **{name: name for name in BACKENDS}}
DECAYS = ("scalar", "head", "channel")
CONDITIONERS = ("scaled", "paper", "authors")  # conv_form: the paper has SiLU(z), the authors' file sqrt(H_c) z
CONDITIONER_FIELDS = ("conv_hidden", "conv_form", "conv_norm_first", "conv_bidirectional")
MLPS = ("narrowed", "kept")  # beside a mixer with more parameters than attention: to make up for them, or as it is

WIDTHS = ("fem_dim", "qk_dim", "fem_ratio", "p_t_to_fem_ratio")
# Fields that are positive integers, and what else they may be.
WHOLE = dict.fromkeys(("n_embd", "n_head", "ssm_rank"), ()) | {"gate_rank": (None, 0)}
WHOLE |= dict.fromkeys(("fem_dim", "qk_dim", "n_kv_head", "window", "conv_hidden"), (None,))
# Heads from this width on get values in multiples of 8, as tensor cores want them, where that moves the weights by this
# share at most.
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
    """Sizes, prior and switches of a `FreeEnergyMixer`; what each field means stands beside it.

        o_t = W_O (g_t * ((1 - lambda_t) mean_t + lambda_t F_t))                        (Eq. 11)

    `matched` solves the widths for the parameters of plain attention. Otherwise they round to whole heads, those of the
    keys to even ones under RoPE. use_temperature needs use_lse and switches it on; use_lse without it reads F alone, at
    beta 1, or with keep_lambda=True mixes mean and F there by lambda, as the authors' file does.
    free_share=None: every channel reads mean and F and mixes them by lambda, as in the paper. A share splits the
    values: that share of each head's channels, the last ones, reads F, the others read the mean, and there is no
    lambda. It is rounded to whole channels; a share that rounds to none is refused.
    After construction widths, backend and normalize hold what they resolved to, which `dataclasses.replace` keeps: with
    another n_embd or ratio, reset fem_dim, qk_dim and conv_hidden to None.

    Raises TypeError on an unknown field, ValueError on a value that no layer can have and on a field that the prior
    does not read.
    """

    n_embd: int  # width D of the layer's input and output
    n_head: int  # heads H, a divisor of D
    fem_dim: int | None = None  # width d of the values over all heads; None: fem_ratio * D
    fem_ratio: float = 0.5
    qk_dim: int | None = None  # width of the queries and of the keys over all heads; None: p_t_to_fem_ratio * d / 2
    p_t_to_fem_ratio: float = 4.0
    prior_type: str = "softmax"  # a key of `fem.PRIORS`
    n_kv_head: int | None = None  # of softmax: heads of keys and values; None: n_head
    window: int | None = None  # of softmax: a row sees its last `window` tokens; None: all
    decay: str = "head"  # of gla: one decay for the layer ("scalar"), a "head" or a key "channel"
    ssm_rank: int = 16  # of mamba: states per channel
    normalize: bool | None = None  # False: the score of a scan prior stays unnormalised; None: mamba_normalize
    mamba_normalize: bool = True  # the authors' name of normalize
    causal: bool = True
    bias: bool = True
    dropout: float = 0.0
    eps: float = 1e-6
    use_temperature: bool = True  # T: beta is learnt per channel, lambda per token
    use_lse: bool = True  # L: read the free energy
    use_outer_gate: bool = True  # G
    keep_lambda: bool = False
    gate_rank: int | None = None  # of lambda's and g's maps; None: full D x d, as in the paper; 0: one number a head
    beta_max_init: float = 1.8  # beta starts at softplus of it
    lambda_init: float = 0.0  # the bias of lambda's map at the start
    value_logexp_cap: float | None = None  # clips |beta v| in the free energy; None: exact, no clip
    free_share: float | None = None
    use_rope: bool = True
    rope_theta: float = 10000.0  # rotary plane j turns by theta^(-2 j / d_k) a position
    rope_frequencies: tuple[float, ...] | None = None  # by these instead, one for each of the d_k / 2 planes
    rope_factor: float = 1.0  # multiplies rotated queries and keys
    use_conv: bool = True  # C: the conditioner
    conv_hidden: int | None = None  # its width H_c; None: d / 16, at least 8, and from 16 on a multiple of 8
    conv_form: str = "scaled"  # multiplies its state, by z of unit length: SiLU(sqrt(H_c) z), or as CONDITIONERS says
    conv_norm_first: bool = True
    conv_bidirectional: bool = False
    backend: str | None = None  # which implementation reads, of BACKENDS; None: softmax_backend
    softmax_backend: str = "auto"  # the authors' name of backend

    def __post_init__(self):
        self._check_choices()
        self._resolve_aliases()
        self._resolve_widths()
        self._check_prior()

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_choices(self):
        for name, others in WHOLE.items():
            self._set(**{name: positive_int(name, getattr(self, name), others)})
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

    def _resolve_aliases(self):
        for name, alias, usual in (("backend", "softmax_backend", "auto"), ("normalize", "mamba_normalize", True)):
            value, other = getattr(self, name), getattr(self, alias)
            if value and other != usual:
                got = f"{name}={value!r} and {alias}={other!r}"
                raise ValueError(f"{alias} is the authors' name of {name}: give one, in replace both alike; got {got}.")
        normalize = self.mamba_normalize if self.normalize is None else self.normalize
        self._set(backend=AUTHORS_BACKENDS[self.backend or self.softmax_backend], softmax_backend="auto")
        self._set(normalize=normalize, mamba_normalize=normalize, use_lse=self.use_lse or self.use_temperature)

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
            if 2 * len(self.rope_frequencies) != self.key_width:
                wanted = f"one number for each of the {self.key_width / 2:g} planes of a head"
                raise ValueError(f"rope_frequencies needs {wanted}, got {len(self.rope_frequencies)} numbers.")
        priors = known_priors()
        pairs = "a prior that reads every channel on its own; this one reads all channels of a head together"
        keeps = self.use_lse and not self.use_temperature and self.free_share is None
        needs = [
            ("conv_bidirectional", not self.causal, "causal=False, as it lets the future in"),
            ("conv_bidirectional", self.conv_hidden % 2 == 0, f"halves of conv_hidden, which is {self.conv_hidden}"),
            ("rope_frequencies", self.use_rope, "use_rope=True"),
            ("keep_lambda", keeps, "use_lse=True, use_temperature=False and no free_share"),
            ("free_share", self.free_width > 0, f"a whole channel of each head's {self.value_width}"),
        ]
        for name in ("free_share", "value_logexp_cap"):
            needs += [(name, self.use_lse, "use_lse=True"), (name, priors[self.prior_type].takes_pairs, pairs)]
        for name in dict.fromkeys(name for prior in priors.values() for name in prior.uses):
            readers = [key for key, prior in priors.items() if name in prior.uses]
            needs.append((name, self.prior_type in readers, f"prior_type={' or '.join(map(repr, readers))}"))
        self._refuse_unread(needs, vars(self))

    def _check_read(self, given: dict) -> None:
        """Raise ValueError on a field that was given, differs from its default, and is read by nothing.

        p_t_to_fem_ratio passes for priors without keys: the authors' script of rnn_softmax gives it.
        """
        has_keys = known_priors()[self.prior_type].widths(self).key_maps > 0
        gated = self.learns_lambda or self.use_outer_gate
        needs = [
            ("qk_dim", has_keys, "a prior with queries and keys"),
            ("rope_theta", self.use_rope and self.rope_frequencies is None, "use_rope=True without rope_frequencies"),
            ("rope_factor", self.use_rope, "use_rope=True"),
            ("p_t_to_fem_ratio", given.get("qk_dim") is None, "qk_dim=None, which it would set"),
            ("fem_ratio", given.get("fem_dim") is None, "fem_dim=None, which it would set"),
            ("beta_max_init", self.use_temperature, "use_temperature=True"),
            ("lambda_init", self.learns_lambda, "use_temperature=True, or keep_lambda=True, without free_share"),
            ("gate_rank", gated, "a gate: use_outer_gate, or use_temperature without free_share"),
            *((name, self.use_conv, "use_conv=True") for name in CONDITIONER_FIELDS),
        ]
        self._refuse_unread(needs, given)

    def _refuse_unread(self, needs: list[tuple[str, bool, str]], given: dict) -> None:
        """Raise ValueError on a field of `needs` that differs from its default where what it needs does not hold."""
        for name, holds, wanted in needs:
            if not holds and name in given and given[name] != _DEFAULTS[name]:
                raise ValueError(f"{name} needs {wanted}, got {name}={given[name]!r} without that; leave it out.")

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
        alone = self.use_lse and self.free_share is None and not self.learns_lambda
        return alone and known_priors()[self.prior_type].takes_pairs

    @property
    def read_width(self) -> int:
        """Width of what a head's attention sums: the values, and e where each channel reads both mean and F."""
        both = self.use_lse and self.free_share is None and not self.free_alone
        return self.value_width * (1 + both)

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
        """Weights of the maps to values, gates (each full, per head, or of two maps) and output."""
        width, d, rank = self.n_embd, self.fem_dim, self.gate_rank
        slim = rank * (width + d) if rank else width * self.n_head
        gate = width * d if rank is None else slim
        values_and_output = width * (self.kv_heads * self.value_width + d)
        return values_and_output + (self.learns_lambda + self.use_outer_gate) * gate

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
        widths = [nominal + offset for offset in offsets if nominal + offset > 0]
        solved = [start._nearest_width(qk_dim=width, conv_hidden=conv_hidden) for width in widths]
        return sorted(solved, key=_off)[0]  # torch.compile knows no min with a key

    @classmethod
    def slim(cls, n_embd: int, n_head: int, prior_type: str = "softmax", **fields) -> FreeEnergyMixerConfig:
        """`matched` with slim gates, for reads of many extremes.

        lambda and g are maps of rank D / 16, so that the values stay nearly as wide as attention's. With the
        conditioner under softmax, without it under the scans. fields replace any of this.
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
        """The configuration with these fields whose weights come nearest to 4 D^2, by bisection."""
        target = 4 * self.n_embd**2
        with_heads = lambda size: replace(self, fem_dim=size * self.n_head, **fields)  # noqa: E731
        least = 1 if self.free_share is None else int(0.5 / self.free_share) + 1  # free_share rounds to a channel there
        low, high = least, 4 * self.n_embd // self.n_head  # widths of a head's values: no more than 4 D in all
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if with_heads(middle).linear_weights < target else (low, middle)
        around = [with_heads(size) for size in (low - 1, low) if size >= least]
        eights = [with_heads(size) for size in (low // 8 * 8, low // 8 * 8 + 8) if size >= max(least, _WIDE_HEAD)]
        return sorted([config for config in eights if _off(config) <= _FOR_EIGHTS * target] or around, key=_off)[0]


MIXER_FIELDS = {field.name for field in fields(FreeEnergyMixerConfig)}
_DEFAULTS = {field.name: field.default for field in fields(FreeEnergyMixerConfig) if field.default is not MISSING}


def build_config(**fields) -> FreeEnergyMixerConfig:
    """`FreeEnergyMixerConfig.matched`, unless fields name a width: then the configuration of these widths."""
    solves = not set(WIDTHS) & fields.keys() and {"n_embd", "n_head"} <= fields.keys()
    return FreeEnergyMixerConfig.matched(**fields) if solves else FreeEnergyMixerConfig(**fields)


def _off(config: FreeEnergyMixerConfig) -> int:
    """How many linear weights more or fewer than attention the layer has."""
    return abs(config.linear_weights - 4 * config.n_embd**2)


def _refuse_widths(start: str, fields: dict) -> None:
    for name in WIDTHS:
        if name in fields:
            raise ValueError(f"{start} solves the widths; leave out {name}, or build FreeEnergyMixerConfig directly.")


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
