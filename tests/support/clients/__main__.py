"""What works with what, as a page: `make clients`; here, python -m clients [FOLDER] [programs | MODEL_TYPE ...]"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import transformers
from clients.programs import run_clients
from clients.survey import Finding, model_types, survey

from fem.tables import markdown_table

RESULTS = ("right", "refused", "wrong", "crashed", "not run", "not built")
WHY = {  # what an error message says about a model type that was not run
    "a package that is not installed": r"requires the \w+ library|pip install",
    "inputs that the survey does not guess": r"missing \d|specif|provided|must be|NoneType|Could not find",
    "too large although made small": r"MemoryError",
}
OTHER = "sizes that do not fit each other once made small"


def main(folder: Path, wanted: list[str]) -> None:
    """Everything; or what is named, the programs or model types, beside what the record in the folder says."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.modules["fla"] = None  # whose kernels transformers takes where they are installed, on a CPU too
    record = folder / "clients.json"
    known = json.loads(record.read_text(encoding="utf-8")) if wanted and record.exists() else {"model_types": []}
    findings = {row["model_type"]: Finding(**row) for row in known["model_types"]}
    for model_type in [name for name in wanted if name != "programs"] or ([] if wanted else model_types()):
        found = findings[model_type] = survey(model_type)
        print(f"{model_type:32} {found.result:10} {found.reason[:120]}", file=sys.stderr, flush=True)
    clients = run_clients() if "programs" in wanted or "clients" not in known else known["clients"]
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
        f"Of transformers' model types {counts['right']} become FEM without a change of what they compute, "
        f"{counts['refused']} are refused by name and {counts['wrong']} are wrong.",
        "",
        "A `FEMForCausalLM` of one layer in the hands of other libraries. Blank: not run. Commands "
        "run in a process of their own that does not import fem: the checkpoint's `auto_map` does, where they are told "
        "to trust its code. transformers' own tests of models have [a page](transformers_suite.md).",
        "",
        markdown_table(clients),
        "## Model types turned into FEM",
        "",
        f"Every model type that `AutoModel` of transformers {transformers.__version__} builds, made small with random "
        "weights, run, given to `replace_attention`, and run again. Right: all outputs equal the original's to 1e-4 of "
        "their spread, and not all to the last bit, so that what was replaced has been read. Refused: a sentence says "
        "why, when it is replaced or first called. Not run: its attention is taken, but the survey could not run it "
        "small. Not built: nothing is known about it.",
        "",
        f"`make clients`, torch {torch.__version__}, CPU, {date.today()}.",
        "",
        markdown_table([{"result": result, "model types": counts[result]} for result in RESULTS]),
    ]
    for result in RESULTS[:4]:
        names = [found.model_type for found in findings if found.result == result]
        if names:
            lines += [f"**{result}**: {', '.join(f'`{name}`' for name in names)}", ""]
    groups = {why: [] for why in (*WHY, OTHER)}
    for found in findings:
        if found.result in RESULTS[4:]:
            group = next((why for why, words in WHY.items() if re.search(words, found.reason)), OTHER)
            groups[group].append(f"`{found.model_type}`")
    table = [{"why": why, "model types": f"{len(names)}: {', '.join(names)}"} for why, names in groups.items()]
    lines += ["### Not run and not built", "", markdown_table(table), "### Why", ""]
    why = [{"model type": f"`{x.model_type}`", "why": x.reason} for x in findings if x.result in RESULTS[1:4]]
    return "\n".join([*lines, markdown_table(why)])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/clients"), sys.argv[2:])
