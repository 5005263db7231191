"""The paper's language tasks under the names lm-evaluation-harness gives them, and what the paper measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """One column of Table 2: its heading, the harness's task, and the metric that is reported.

    The paper reports accuracy or normalised accuracy "as standard" (Appendix L); which of them per task is our choice.
    """

    column: str
    task: str
    metric: str


PAPER = (
    Score("MMLU-P", "leaderboard_mmlu_pro", "acc"),
    Score("GPQA", "leaderboard_gpqa", "acc_norm"),
    Score("BBH", "leaderboard_bbh", "acc_norm"),
    Score("MATH", "leaderboard_math_hard", "exact_match"),
    Score("MuSR", "leaderboard_musr", "acc_norm"),
    Score("IFE-I", "leaderboard_ifeval", "inst_level_strict_acc"),
    Score("IFE-P", "leaderboard_ifeval", "prompt_level_strict_acc"),
    Score("ARC-C", "arc_challenge", "acc_norm"),
    Score("ARC-E", "arc_easy", "acc"),
    Score("HS", "hellaswag", "acc_norm"),
    Score("PIQA", "piqa", "acc"),
    Score("BoolQ", "boolq", "acc"),
    Score("WinoG", "winogrande", "acc"),
    Score("COPA", "copa", "acc"),
    Score("OBQA", "openbookqa", "acc_norm"),
    Score("SciQ", "sciq", "acc"),
)
SUITES = {"paper": PAPER}

# Table 2 of the paper (Lu and Yang, ICLR 2026), all of its rows, columns in the order of PAPER. Mixers have our names:
# attention is "Transformer (SMAttn)" of 1.3B and FEM-SM(-G,T,L,C) of 340M, +C, +CL and +CLT are FEM-SM(-G,T,L), (-G,T)
# and (-G), FEM is FEM-SM.
TABLE_2 = """
1.3B DeltaNet      0.109 0.263 0.308 0.011 0.417 0.288 0.165 0.266 0.522 0.502 0.704 0.611 0.541 0.740 0.318 0.761
1.3B GSA           0.110 0.270 0.294 0.013 0.438 0.300 0.179 0.287 0.529 0.510 0.712 0.541 0.536 0.760 0.330 0.773
1.3B RetNet        0.110 0.252 0.293 0.001 0.384 0.056 0.024 0.271 0.489 0.480 0.701 0.583 0.533 0.710 0.324 0.736
1.3B HGRN          0.114 0.269 0.297 0.008 0.409 0.253 0.122 0.271 0.518 0.481 0.707 0.584 0.515 0.700 0.326 0.695
1.3B HGRN2         0.115 0.254 0.295 0.002 0.350 0.223 0.129 0.282 0.504 0.317 0.671 0.416 0.522 0.770 0.328 0.378
1.3B attention     0.114 0.259 0.296 0.011 0.365 0.270 0.141 0.280 0.492 0.492 0.705 0.621 0.552 0.760 0.318 0.769
1.3B FEM           0.113 0.262 0.303 0.012 0.451 0.326 0.192 0.364 0.636 0.519 0.713 0.624 0.534 0.740 0.382 0.807
1.3B GLA           0.114 0.259 0.295 0.006 0.427 0.272 0.157 0.277 0.482 0.488 0.702 0.574 0.541 0.690 0.326 0.721
1.3B FEM-GLA       0.112 0.258 0.297 0.009 0.475 0.277 0.157 0.310 0.564 0.482 0.708 0.602 0.529 0.740 0.358 0.782
340M DiffTrans     0.109 0.259 0.299 0.008 0.390 0.266 0.133 0.289 0.531 0.408 0.668 0.603 0.534 0.690 0.330 0.734
340M GatedDeltaNet 0.113 0.260 0.296 0.010 0.421 0.258 0.133 0.276 0.527 0.396 0.662 0.588 0.527 0.710 0.338 0.735
340M DeltaNet      0.112 0.260 0.300 0.009 0.452 0.277 0.150 0.269 0.502 0.405 0.653 0.519 0.504 0.690 0.316 0.717
340M attention     0.106 0.267 0.292 0.010 0.386 0.269 0.126 0.273 0.506 0.396 0.650 0.569 0.499 0.720 0.324 0.727
340M attention+C   0.113 0.254 0.296 0.009 0.388 0.246 0.122 0.277 0.507 0.403 0.664 0.583 0.515 0.670 0.320 0.728
340M attention+CL  0.112 0.258 0.298 0.009 0.401 0.254 0.129 0.290 0.518 0.407 0.657 0.595 0.511 0.690 0.342 0.731
340M attention+CLT 0.112 0.261 0.297 0.010 0.421 0.266 0.144 0.293 0.531 0.412 0.668 0.593 0.519 0.710 0.338 0.716
340M FEM           0.114 0.264 0.300 0.012 0.437 0.273 0.142 0.284 0.542 0.409 0.676 0.609 0.523 0.730 0.342 0.735
340M GLA           0.110 0.258 0.289 0.007 0.415 0.228 0.109 0.247 0.478 0.366 0.637 0.547 0.489 0.640 0.294 0.649
340M FEM-GLA       0.115 0.255 0.297 0.009 0.473 0.241 0.123 0.271 0.493 0.397 0.644 0.592 0.510 0.680 0.331 0.683
"""


def paper_rows() -> dict[str, dict[str, float]]:
    """Row -> column -> score, as printed."""
    rows = {}
    for line in TABLE_2.strip().splitlines():
        size, family, *scores = line.split()
        rows[f"{size} {family}"] = {score.column: float(text) for score, text in zip(PAPER, scores, strict=True)}
    return rows


def paper_row(name: str) -> dict[str, float]:
    """One of `paper_rows`. Raises ValueError on another name."""
    rows = paper_rows()
    if name not in rows:
        raise ValueError(f"beside must be a row of Table 2, {', '.join(rows)}; got {name!r}.")
    return rows[name]


def ranked(rows: dict[str, dict[str, float]]) -> list[dict]:
    """The rows' average rank over the columns, 1 for the best, equals sharing one, and how often each is first."""
    table = []
    for name, row in rows.items():
        ranks = [1 + sum(other[column] > score for other in rows.values()) for column, score in row.items()]
        table.append({"row": name, "average rank": sum(ranks) / len(ranks), "firsts": ranks.count(1)})
    return table


def table_2(size: str, ours: dict[str, float | None]) -> list[dict]:
    """Table 2's rows of a size and ours, which has a rank where every column was scored, with the scores of all."""
    papers = {name: row for name, row in paper_rows().items() if name.startswith(f"{size} ")}
    whole = all(score is not None for score in ours.values())
    table = ranked(papers | {"ours": ours} if whole else papers)
    if not whole:
        table.append({"row": "ours", "average rank": None, "firsts": None})
    return [row | (ours if row["row"] == "ours" else papers[row["row"]]) for row in table]
