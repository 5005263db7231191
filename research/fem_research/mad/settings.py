"""What `fem mad` compares, as a recipe, and its profiles: MAD's own protocol, and one small enough for a laptop."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product

from fem.config import MLPS
from fem.extras import how_to_install
from fem.recipes import listed, option, require_not_negative, require_one_of, require_positive, require_some_of
from fem_research.common.grid import digest_of
from fem_research.common.mixers import INITIALISATIONS, PUBLISHED, above_zero, available, known, numbers
from fem_research.common.names import as_shown
from fem_research.mad.tasks import TASKS, build


@dataclass(frozen=True)
class Setting:
    """A task, its settings where they differ from MAD's baseline, and how long to train on how many examples."""

    task: str
    settings: dict[str, int | float]
    train_examples: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training and its tests. enough: the accuracy at which it ends at a test; None: at its last step."""

    heads: int
    batch: int
    warmup: float
    bfloat16: bool
    checkpoints: int
    test_examples: int
    width: int = 128
    blocks: int = 2
    mlp_width: int = 352
    mlp: str = "narrowed"
    enough: float | None = None


@dataclass(frozen=True)
class Profile:
    """Everything that `fem mad --profile` fixes; title and about are for its page, score is a key of `SCORES`."""

    title: str
    about: str
    settings: tuple[Setting, ...]
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    training: Training
    score: str


EPOCHS, BATCH = 200, 128
PAPER_EXAMPLES = {"memorization": 256}
FEWER_EXAMPLES = (6400, 3200, 1600, 800)
VOCABULARIES, LENGTHS = (32, 64, 128), (256, 512, 1024)
CHANGES: dict[str, dict[str, tuple[int | float, ...]]] = {
    "compression": {"vocab_size": VOCABULARIES, "seq_len": (64, 128, 256)},
    "fuzzy-in-context-recall": {"vocab_size": VOCABULARIES, "seq_len": LENGTHS},
    "in-context-recall": {"vocab_size": VOCABULARIES, "seq_len": LENGTHS},
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "noisy-in-context-recall": {"vocab_size": (48, 80, 144), "seq_len": LENGTHS, "frac_noise": (0.4, 0.6, 0.8)},
    "selective-copying": {"vocab_size": VOCABULARIES, "seq_len": (512, 1024), "num_tokens_to_copy": (32, 64, 96)},
}


def _paper_settings() -> tuple[Setting, ...]:
    """The baseline of every task, and the baseline with one variable changed at a time: 66 settings."""

    def of(task: str, settings: dict, examples: int) -> Setting:
        build(task, settings)
        return Setting(task, settings, examples, EPOCHS * -(-examples // BATCH))

    all_settings = []
    for task, changes in CHANGES.items():
        examples = PAPER_EXAMPLES.get(task, 12800)
        all_settings.append(of(task, {}, examples))
        all_settings += [of(task, {name: value}, examples) for name, values in changes.items() for value in values]
        if task not in PAPER_EXAMPLES:
            all_settings += [of(task, {}, fewer) for fewer in FEWER_EXAMPLES]
    return tuple(all_settings)


def _is_first(setting: Setting) -> bool:
    """Whether it is the task's baseline, with all of its examples."""
    return not setting.settings and setting.train_examples not in FEWER_EXAMPLES


FUZZY = {"vocab_size": 11, "seq_len": 32, "k_motif_size": 2, "v_motif_size": 2}
NOISY = {"vocab_size": 12, "noise_vocab_size": 4, "frac_noise": 0.2, "seq_len": 32}
LAPTOP_SETTINGS = (
    Setting("compression", {"vocab_size": 16, "seq_len": 16}, 3200, 1200),
    Setting("fuzzy-in-context-recall", FUZZY, 3200, 500),
    Setting("in-context-recall", {"vocab_size": 16, "seq_len": 32}, 3200, 800),
    Setting("memorization", {"vocab_size": 2048, "seq_len": 32}, 128, 96),
    Setting("noisy-in-context-recall", NOISY, 3200, 400),
    Setting("selective-copying", {"vocab_size": 16, "seq_len": 64, "num_tokens_to_copy": 24}, 1600, 160),
)

PAPER_TRAINING = Training(  # a test an epoch; MAD ends a training with 99.9 % right
    heads=16, batch=BATCH, warmup=0.0, bfloat16=True, checkpoints=EPOCHS, test_examples=1280, enough=0.999
)
PROFILES = {
    "paper": Profile(
        title="six synthetic tasks",
        about="In brackets Table 1's figure, whose heads, widths and learning rates are not published. Blank: not run.",
        settings=_paper_settings(),
        learning_rates=(1e-4, 5e-4, 1e-3),
        weight_decays=(0.0, 0.1),
        training=PAPER_TRAINING,
        score="mad_macro",
    ),
    "paper-one": Profile(
        title="one setting a task at the benchmark's own size",
        about="The first of a task's settings in the benchmark, at its width, heads, batch, data, optimiser and number "
        "of steps: 6 of 66 settings, so a figure here is no figure of Table 1.",
        settings=tuple(setting for setting in _paper_settings() if _is_first(setting)),
        learning_rates=(1e-4, 5e-4, 1e-3),
        weight_decays=(0.0,),
        training=PAPER_TRAINING,
        score="mad_macro",
    ),
    "recall": Profile(
        title="in-context recall at the benchmark's own size",
        about="One of the benchmark's 66 settings, with its width, heads, batch, data, optimiser and number of steps, "
        "and one of its learning rates; a training ends early at a test, one every hundred steps, with 99.9 % right, "
        "and counts as it was then.",
        settings=(Setting("in-context-recall", {}, 12800, EPOCHS * 100),),
        learning_rates=(1e-3,),
        weight_decays=(0.0,),
        training=PAPER_TRAINING,
        score="mad",
    ),
    "laptop": Profile(
        title="six synthetic tasks, at a laptop's size",
        about="Sizes, steps and settings are a laptop's: 6 of 66 settings, an eighth of the epochs at most. Models are "
        "undertrained: figures compare with each other and not with Table 1, where softmax attention recalls 99.9 % in "
        "context.",
        settings=LAPTOP_SETTINGS,
        learning_rates=(1e-3,),
        weight_decays=(0.0,),
        training=Training(heads=4, batch=32, warmup=0.05, bfloat16=False, checkpoints=16, test_examples=512),
        score="mad",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that decides the result of a run."""

    mixer: str
    setting: Setting
    initialisation: str
    learning_rate: float
    weight_decay: float
    seed: int
    training: Training

    @property
    def key(self) -> str:
        """A file name that differs between jobs which differ in any value."""
        return f"{self.setting.task}-{self.mixer.replace('/', '_')}-seed{self.seed}-{digest_of(asdict(self))}"


def _length(job: Job) -> int:
    return build(job.setting.task, job.setting.settings).seq_len


@dataclass(frozen=True, kw_only=True)
class MADRecipe:
    """Mixers, tasks and settings of a sweep. Lists are names or numbers with commas between them."""

    profile: str = option("laptop", f"Which settings, sizes and training: {' or '.join(PROFILES)}.")
    mixers: str = option(
        "attention,FEM",
        "With commas, such as attention+CL, FEM-Mamba, DiffTrans, Hyena; on a GPU also fla:DeltaNet and the like.",
        shown=as_shown,
    )
    tasks: str = option("all", f"all, or some of {', '.join(TASKS)}.")
    initialisations: str = option(
        "normal", f"How the linear maps of all models start: {' or '.join(INITIALISATIONS)}, or both."
    )
    learning_rates: str | None = option(None, "Learning rates to take the best of, instead of the profile's.")
    weight_decays: str | None = option(None, "Weight decays to take the best of, instead of the profile's.")
    mlp: str = option("narrowed", "SwiGLU: narrowed to equal parameters, or kept, as in the paper.")
    seeds: int = option(3, "How many seeds; each draws its own data and weights.")
    seed: int = option(0, "First seed.")

    def __post_init__(self):
        require_one_of("profile", self.profile, PROFILES)
        require_some_of("tasks", self.task_names, self.known_tasks)
        require_some_of("initialisations", listed(self.initialisations), INITIALISATIONS)
        require_one_of("mlp", self.mlp, MLPS)
        require_positive(self, "seeds")
        require_not_negative(self, "seed")
        self.jobs()

    @property
    def known_tasks(self) -> list[str]:
        return list(dict.fromkeys(setting.task for setting in PROFILES[self.profile].settings))

    @property
    def task_names(self) -> list[str]:
        return self.known_tasks if self.tasks == "all" else listed(self.tasks)

    @property
    def fixed(self) -> Profile:
        """The profile, with the learning rates, weight decays and MLP that were given."""
        chosen = {name: getattr(self, name) for name in ("learning_rates", "weight_decays") if getattr(self, name)}
        profile = PROFILES[self.profile]
        training = replace(profile.training, mlp=self.mlp)
        read = {"learning_rates": above_zero, "weight_decays": numbers}
        return replace(profile, training=training, **{name: read[name](name, text) for name, text in chosen.items()})

    def cost(self) -> str:
        """The sweep's cost at most: trainings, optimiser steps, and tokens that a model reads in training."""
        jobs = self.jobs()
        steps = sum(job.setting.steps for job in jobs)
        tokens = sum(
            job.setting.steps * min(job.training.batch, job.setting.train_examples) * _length(job) for job in jobs
        )
        return f"{len(jobs):,} trainings, at most {steps:,} steps and {tokens:.1e} tokens"

    def jobs(self) -> list[Job]:
        """All runs, seed by seed, so that a stopped sweep has compared all mixers on its first seeds."""
        import torch

        profile = self.fixed
        mixers = dict.fromkeys(known(name) for name in listed(self.mixers))
        if not mixers:
            raise ValueError("mixers must name at least one mixer, got an empty list.")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if absent := [name for name in mixers if name in PUBLISHED and not available(PUBLISHED[name], device)]:
            raise ValueError(
                f"mixers of flash-linear-attention need it installed ({how_to_install('baselines')}) and a GPU; here "
                f"{', '.join(absent)} cannot run."
            )
        varied = {
            "seed": range(self.seed, self.seed + self.seeds),
            "setting": [setting for setting in profile.settings if setting.task in self.task_names],
            "initialisation": listed(self.initialisations),
            "mixer": mixers,
            "learning_rate": profile.learning_rates,
            "weight_decay": profile.weight_decays,
        }
        return [Job(training=profile.training, **dict(zip(varied, values))) for values in product(*varied.values())]
