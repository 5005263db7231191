"""transformers' own test suite on our models: python tests/support/transformers_suite.py [PRIOR ...]

The suite is in the source distribution of the installed release, not in its wheel; it is downloaded once. What that
distribution lacks (the suites of generation and of its exporters) is not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

import torch
import transformers

from fem.tables import markdown_table

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "free-energy-mixer"
PRIORS = ("softmax", "softmax without C", "gla", "mamba", "llama")
RESULTS = ("passed", "failed", "skipped")
STUBS = {
    "__init__.py": "",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def folder_of_release() -> Path:
    return CACHE / f"transformers-{transformers.__version__}"


def is_here() -> bool:
    return (folder_of_release() / "needs" / "parameterized").is_dir()


def source() -> Path:
    """The folder that holds the suite, as the package `tests`, and what it needs besides."""
    folder = folder_of_release()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    if not is_here():
        CACHE.mkdir(parents=True, exist_ok=True)
        wanted = ["--no-deps", "--no-binary", "transformers", f"transformers=={transformers.__version__}"]
        subprocess.run([*pip, "download", *wanted, "--dest", CACHE], check=True)
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
        subprocess.run([*pip, "install", "--target", folder / "needs", "parameterized"], check=True)
    for name, text in STUBS.items():
        path = folder / "tests" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folder


def run(prior: str, only: str | None) -> dict[str, object]:
    """How many tests passed, failed and were skipped, and what the failed ones say."""
    folder = source()
    found = folder / f"{prior.replace(' ', '_')}.xml"
    paths = os.pathsep.join(map(str, (folder, folder / "needs", ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, "--noconftest"]
    command += ["-p", "no:cacheprovider", f"--junitxml={found}", *(["-k", only] if only else [])]
    environment = os.environ | {"PYTHONPATH": paths, "FEM_SUITE_PRIOR": prior, "HF_HUB_OFFLINE": "1"}
    cases = Path(__file__).with_name("transformers_cases.py")
    subprocess.run([*command, "--import-mode=importlib", cases], env=environment, cwd=folder, stdout=sys.stderr)
    results = dict.fromkeys(RESULTS, 0)
    failures = {}
    for case in ElementTree.parse(found).iter("testcase"):
        kinds = {part.tag: part for part in case}
        failed = kinds.get("failure", kinds.get("error"))
        results["failed" if failed is not None else "skipped" if "skipped" in kinds else "passed"] += 1
        if failed is not None:
            failures[case.get("name")] = " ".join((failed.get("message") or "").split())[:400]
    return {"prior": prior, **results, "failures": failures}


def page(rows: list[dict]) -> str:
    own = [row for row in rows if row["prior"] != "llama"]
    passed, failed = (sum(row[kind] for row in own) for kind in ("passed", "failed"))
    lines = [
        "# transformers' own tests on our models",
        "",
        f"{passed} of the {passed + failed} tests that our models can run pass.",
        "",
        f"The model tests in the source distribution of transformers {transformers.__version__}, on small models of "
        "two layers, with the base model and its four heads; Llama beside them. What a model cannot have is skipped. "
        "Of what Llama passes, FEM without C skips the maps of attention and the decorator that collects them, which "
        "`inspect` makes, and scaled rotary angles, for which the suite looks in a module of their own; with C, "
        "and under priors with a state, also what transformers' own attention functions read.",
        "",
        markdown_table([{"model": row["prior"]} | {kind: row[kind] for kind in RESULTS} for row in rows]),
    ]
    failed = {}
    for row in rows:
        for name, said in row["failures"].items():
            failed.setdefault(name, {"test": f"`{name}`", "models": [], "says": said})["models"].append(row["prior"])
    if failed:
        table = [found | {"models": ", ".join(found["models"])} for found in failed.values()]
        lines += ["## Failed", "", markdown_table(table)]
    how = f"`python tests/support/transformers_suite.py`, torch {torch.__version__}, CPU, {date.today()}."
    return "\n".join([*lines, how, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("priors", nargs="*", default=PRIORS, help=f"of {', '.join(PRIORS)}; all of these by default")
    parser.add_argument("--bring", action="store_true", help="download the suite, if it is not here, and run nothing")
    parser.add_argument("--only", help="tests whose name holds this, as pytest's -k; nothing is then written")
    parser.add_argument("--output", type=Path, default=ROOT / "research" / "results" / "checks")
    options = parser.parse_args()
    if options.bring:
        source()
        return
    record = options.output / "transformers_suite.json"
    known = json.loads(record.read_text(encoding="utf-8"))["suite"] if record.exists() else []
    rows = {row["prior"]: row for row in known} | {prior: run(prior, options.only) for prior in options.priors}
    text = page([rows[prior] for prior in sorted(rows, key=[*PRIORS, *rows].index)])
    print(text)
    if not options.only:
        record.write_text(json.dumps({"suite": list(rows.values())}, indent=1) + "\n", encoding="utf-8")
        record.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
