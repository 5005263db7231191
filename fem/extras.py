"""The extras of the distribution and the optional packages that each brings."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "free-energy-mixer"
# modules that are not named after their package
PACKAGE_OF = {"PIL": "pillow", "sklearn": "scikit_learn", "fla": "flash_linear_attention"}


def installed(package: str) -> str | None:
    """The version of an installed package; None where there is none of that name."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def extras() -> dict[str, list[str]]:
    """The extras of the installed distribution and the packages each brings, as pyproject.toml declares them."""
    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    by_extra: dict[str, list[str]] = {}
    for line in declared:
        match = re.match(r"([\w.-]+)(?:\[.*?\])?[^;]*;.*extra == [\"']([\w-]+)[\"']", line)
        if match and match[1] != DISTRIBUTION:
            by_extra.setdefault(match[2], []).append(match[1])
    return by_extra


def how_to_install(extra: str) -> str:
    """The library is on no index yet, so its extras are installed from a copy of the repository."""
    return f"pip install '.[{extra}]' in your copy of the repository"


def missing_package(error: ModuleNotFoundError) -> str:
    """One sentence: which package is missing and what installs it. Raises `error` again where no extra brings it."""
    module = (error.name or "").partition(".")[0]
    wanted = PACKAGE_OF.get(module, module)
    for extra, packages in extras().items():
        if wanted in (package.replace("-", "_") for package in packages):
            return f"this needs {module}, which is not installed: {how_to_install(extra)}."
    raise error
