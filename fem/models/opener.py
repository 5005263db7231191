"""Checkpoints that programs can open without importing fem themselves."""

from __future__ import annotations

from pathlib import Path

from fem.extras import how_to_install

OPENER = "open_with_fem"
SOURCE = f'''"""Opens this checkpoint with the library that defines its model."""

try:
    import fem.models
except ImportError as missing:
    raise ImportError("this checkpoint needs free-energy-mixer: {how_to_install("lm")}.") from missing


def __getattr__(name):
    return getattr(fem.models, name)
'''


class OpensWithFEM:
    """A config whose folder says where its classes are: `auto_map`, and a module of ten lines that imports fem.

    With trust_remote_code=True the Auto classes run that module; in a process that imported `fem.models` they know the
    classes already and run nothing from the folder.
    """

    auto_map: dict  # annotated here and not in the subclasses, where it would become a field of the config

    def to_diff_dict(self) -> dict:
        return super().to_diff_dict() | {"auto_map": {auto: f"{OPENER}.{name}" for auto, name in self.auto_map.items()}}

    def save_pretrained(self, save_directory: str | Path, *args, **kwargs) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{OPENER}.py").write_text(SOURCE, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Copy nothing beside the weights: the installed library has the code."""
