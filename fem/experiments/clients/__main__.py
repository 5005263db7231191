"""Both surveys as a page: python -m fem.experiments.clients [FOLDER] [MODEL_TYPE ...]"""

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

from fem.experiments.clients.programs import run_clients
from fem.experiments.clients.survey import Finding, model_types, survey

RESULTS = ("right", "refused", "wrong", "crashed", "not run", "not built")


def main(folder: Path, wanted: list[str]) -> None:
    """Everything; or the model types named, beside what the record in the folder says of the rest."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    record = folder / "clients.json"
    known = json.loads(record.read_text(encoding="utf-8")) if wanted and record.exists() else {"model_types": []}
    findings = {row["model_type"]: Finding(**row) for row in known["model_types"]}
    for model_type in wanted or model_types():
        found = findings[model_type] = survey(model_type)
        print(f"{model_type:32} {found.result:10} {found.reason[:120]}", file=sys.stderr, flush=True)
    clients = known.get("clients") or run_clients()
    rows = [findings[model_type] for model_type in sorted(findings)]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"clients": clients, "model_types": [asdict(row) for row in rows]}, indent=1)
    record.write_text(text + "\n", encoding="utf-8")
    (folder / "clients.md").write_text(page(clients, rows), encoding="utf-8")


def page(clients: list[dict[str, str]], findings: list[Finding]) -> str:
    counts = Counter(found.result for found in findings)
    lines = [
        "# What works with what",
        "",
        "A `FEMForCausalLM` of one layer in the hands of other libraries. Blank: not installed, so not run.",
        "",
        "| library | version | item | result |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row['library']} | {row['version']} | {row['item']} | {row['result'].replace('|', '/')} |"
            for row in clients
        ),
        "",
        "## Model types turned into FEM",
        "",
        f"Every model type that `AutoModel` of transformers {transformers.__version__} builds, made small with random "
        "weights, run, given to `replace_attention`, and run again. Right: all outputs equal the original's to 1e-4 of "
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
    lines += ["### Why", "", "| model type | |", "| --- | --- |"]
    lines += [f"| `{found.model_type}` | {found.reason.replace('|', '/')} |" for found in refused]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/clients"), sys.argv[2:])
