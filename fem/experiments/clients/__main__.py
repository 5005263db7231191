"""The survey as a page: python -m fem.experiments.clients [FOLDER] [MODEL_TYPE ...]"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import transformers

from fem.experiments.clients.survey import Finding, model_types, survey

RESULTS = ("right", "refused", "wrong", "crashed", "not built")


def main(folder: Path, wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    findings = []
    for model_type in wanted or model_types():
        findings.append(survey(model_type))
        print(f"{model_type:32} {findings[-1].result:10} {findings[-1].reason[:120]}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "surgery_families.json").write_text(json.dumps([asdict(found) for found in findings], indent=1) + "\n")
    (folder / "surgery_families.md").write_text(page(findings), encoding="utf-8")


def page(findings: list[Finding]) -> str:
    counts = Counter(found.result for found in findings)
    lines = [
        "# Model types turned into FEM",
        "",
        f"Every model type that `AutoModel` of transformers {transformers.__version__} builds, made small with random "
        "weights, run, given to `replace_attention`, and run again. Right: all outputs equal the host's to 1e-4 of "
        "their spread. Refused: a sentence says why, when it is replaced or first called. Not built: this survey could "
        "not make it small or guess its inputs; nothing is known about it.",
        "",
        f"`python -m fem.experiments.clients docs/results`, torch {torch.__version__}, CPU, {date.today()}.",
        "",
        "| result | model types |",
        "| --- | --- |",
        *(f"| {result} | {counts[result]} |" for result in RESULTS),
        "",
    ]
    for result in RESULTS:
        names = [found.model_type for found in findings if found.result == result]
        if names:
            lines += [f"**{result}**: {', '.join(f'`{name}`' for name in names)}", ""]
    refused = [found for found in findings if found.result in ("refused", "wrong", "crashed")]
    lines += ["## Why", "", "| model type | |", "| --- | --- |"]
    lines += [f"| `{found.model_type}` | {found.reason.replace('|', '/')} |" for found in refused]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/clients"), sys.argv[2:])
