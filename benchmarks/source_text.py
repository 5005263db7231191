"""One text of Python's standard library and torch's own sources, for `fem ablate --text-file`.

    python benchmarks/source_text.py runs/python_and_torch.txt

Every .py file of the two but the standard library's tests, in random order (seed 0), an empty line between two.
About 59 MB; the files depend on the versions of Python and torch, so the text's SHA-256 is printed and belongs beside
what was measured on it.
"""

import hashlib
import random
import sysconfig
from pathlib import Path

import torch
import typer


def source_files() -> list[Path]:
    standard_library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "test", "tests"}
    python = [p for p in standard_library.rglob("*.py") if not left_out & set(p.relative_to(standard_library).parts)]
    return sorted(python) + sorted(Path(torch.__file__).parent.rglob("*.py"))


def main(output: Path) -> None:
    files = source_files()
    random.Random(0).shuffle(files)
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore").rstrip() for path in files) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"{output}: {len(files)} files, {len(text.encode()) / 1e6:.1f} MB, SHA-256 {digest[:16]}")


if __name__ == "__main__":
    typer.run(main)
