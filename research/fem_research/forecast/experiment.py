"""`fem forecast`: forecasters of equal size that differ only in their mixer, and the baselines of neuralforecast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

import pandas as pd

from fem.plots import picture
from fem.provenance import provenance
from fem.tables import markdown_table
from fem_research.common.grid import Grid, one_by_one, publish
from fem_research.common.measure import cpu_threads
from fem_research.common.names import FORECASTERS, colour, display
from fem_research.common.paired import by_seed, spread
from fem_research.forecast.settings import PROFILES, ForecastRecipe, Job
from fem_research.runs.run import RUNS, check_output, command_line, progress
from fem_research.runs.tables import write_page

TABLE_4_MODELS = ("FEM", "FEM-GLA", "FEM-Mamba/paper", "FEM-AFT/paper", "GLA", "iTransformer", "PatchTST", "DLinear")
TABLE_4 = {
    "Weather": (0.222, 0.223, 0.218, 0.223, 0.221, 0.232, 0.221, 0.233),
    "Solar": (0.189, 0.188, 0.193, 0.186, 0.204, 0.198, 0.219, 0.202),
    "ETTh1": (0.419, 0.418, 0.421, 0.414, 0.418, 0.421, 0.454, 0.413),
    "ETTh2": (0.340, 0.344, 0.340, 0.339, 0.342, 0.374, 0.330, 0.426),
    "ETTm1": (0.341, 0.345, 0.346, 0.344, 0.357, 0.351, 0.373, 0.346),
    "ETTm2": (0.242, 0.247, 0.246, 0.241, 0.250, 0.245, 0.265, 0.247),
}
TABLE_4_NOTE = (
    "MSE, mean over horizons 96, 192, 336 and 720; the paper's in brackets. Ours is blank unless all four were run."
)
HORIZONS = (96, 192, 336, 720)


def name_of(model: str) -> str:
    return FORECASTERS.get(model) or display(model)


def summary(records: Sequence[dict]) -> list[dict]:
    """Mean errors over the seeds, and what every seed has, by data, horizon and model."""
    rows = (
        pd.DataFrame(records)
        .groupby(["data", "horizon", "model"], sort=False, as_index=False)
        .agg(
            mse=("mse", "mean"),
            mses=("mse", list),
            mae=("mae", "mean"),
            maes=("mae", list),
            seeds=("seed", list),
            lookbacks=("lookback", list),
            sizes=("parameters", list),
            seconds=("seconds", list),
        )
    )
    return rows.to_dict("records")


def table(records: Sequence[dict]) -> list[dict]:
    """A row per data, horizon and model, which comes first: a column that stays in sight."""
    return [
        {"model": name_of(row["model"]), "data": row["data"], "horizon": row["horizon"], "MSE": row["mse"]}
        | {"sd": spread(row["mses"]), "MSE by seed": by_seed(row["mses"], ".4f"), "MAE": row["mae"]}
        | {
            "lookback": by_seed(list(dict.fromkeys(row["lookbacks"])), "d"),
            "parameters": by_seed(list(dict.fromkeys(row["sizes"])), ","),
        }
        | {"CPU s": mean(row["seconds"])}
        for row in summary(records)
    ]


def short_table(records: Sequence[dict]) -> list[dict]:
    """The columns of `table` that fit on a terminal."""
    return [{name: row[name] for name in ("model", "data", "horizon", "MSE", "sd", "MAE")} for row in table(records)]


def table4(summaries: Sequence[dict]) -> list[dict]:
    """Table 4 from rows of `summary`: "ours (the paper's)"; ours blank unless all four horizons were run.

    training: what the runs of a row's training share; only rows with one of them are averaged, the first that has all.
    """
    ours: dict[tuple, dict[str, dict[int, float]]] = {}
    for row in summaries:
        trainings = ours.setdefault((row["data"].lower(), name_of(row["model"])), {})
        trainings.setdefault(row.get("training", ""), {})[row["horizon"]] = row["mse"]
    rows = []
    for data, figures in TABLE_4.items():
        rows.append({"dataset": data})
        for model, paper in zip(TABLE_4_MODELS, figures):
            trainings = ours.get((data.lower(), model), {}).values()
            whole = next((errors for errors in trainings if errors.keys() >= set(HORIZONS)), None)
            ours_mean = f"{mean(whole[horizon] for horizon in HORIZONS):.3f} " if whole else ""
            rows[-1][model] = f"{ours_mean}({paper:.3f})"
    return rows


def forecasts(path: Path, records: Sequence[dict]) -> None:
    """The last channel of the middle test window, and its forecasts by the first seeds."""
    first: dict[tuple, dict] = {}
    for record in records:
        first.setdefault((record["data"], record["horizon"], record["model"]), record)
    data, horizons = (list(dict.fromkeys(record[name] for record in records)) for name in ("data", "horizon"))
    title = "Last channel in the middle of the test rows, scaled"
    with picture(path, title, 4.6 * len(horizons) + 1.6, 3.0 * len(data) + 0.3) as figure:
        panels = figure.subplots(len(data), len(horizons), squeeze=False)
        for record in first.values():
            axes = panels[data.index(record["data"])][horizons.index(record["horizon"])]
            shown = record["example"]
            past, future = range(-len(shown["history"]), 0), range(record["horizon"])
            if not axes.lines:
                axes.plot(
                    [*past, *future], shown["history"] + shown["future"], color="black", linewidth=1, label="truth"
                )
            look = {"color": colour(record["model"]), "linewidth": 1.4, "label": name_of(record["model"])}
            axes.plot(future, shown["forecast"], **look)
            axes.set(xlabel="rows from now", title=f"{record['data']}, horizon {record['horizon']}")
        labelled = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels())}
        figure.legend(labelled.values(), labelled.keys(), loc="outside right upper")


def write_report(folder: Path, records: Sequence[dict], command: str) -> None:
    """forecasts.png and md in `folder`."""
    forecasts(folder / "forecasts.png", records)
    write_page(
        folder,
        "Forecasting: FEM in the paper's backbone",
        "MSE and MAE on scaled data over all test windows, steps and channels; nothing is dropped. Scaling, splits and "
        "windows are the same for all. All mixers are compared in one backbone with equal parameters: one that has "
        'more gets narrower MLPs, unless --mlp is kept. "no mixer" is that backbone without one, where no '
        "token sees another; narrowed MLPs have its parameters. Backbone and training are those of Lu and Yang, ICML "
        "2025 (arXiv 2502.07244). DLinear, PatchTST, iTransformer and FEMForecaster are trained by neuralforecast; of "
        "several lookbacks theirs is the best on the validation rows. CPU s: of training one seed, validation "
        "included; sd: over seeds.",
        markdown_table(table(records), {"MSE": min, "MAE": min}),
        "![test error of every model, a dot per seed](scores.png)",
        "![one test window and its forecasts](forecasts.png)",
        "## Table 4",
        TABLE_4_NOTE,
        markdown_table(table4(summary(records))),
        provenance(command),
    )


def run(recipe: ForecastRecipe, output: Path, profile: str = "laptop") -> dict:
    """Run the jobs without a record in `output`/runs, write tables, plots, report; returns what results.json holds."""
    check_output(output, "forecast", recipe)
    from fem_research.forecast.training import train

    jobs = recipe.jobs()
    if any(job.is_baseline for job in jobs):
        from fem_research.forecast.baselines import train_baseline
    with cpu_threads(recipe.threads), progress() as bars:

        def train_one(job: Job, checkpoints: Path) -> dict:
            return train_baseline(job, bars) if job.is_baseline else train(job, checkpoints, bars)

        records = Grid(output / RUNS, partial(one_by_one, train=train_one), bars, "models").records(jobs)
    return publish(
        output,
        "forecast",
        recipe,
        records,
        ("data", "horizon", "model", "seed"),
        tables={"table": table(records), "table4": table4(summary(records))},
        page=lambda folder: write_report(
            folder, records, command_line("forecast", recipe, ForecastRecipe(**PROFILES[profile]), profile)
        ),
        results={"forecast": summary(records)},
        shown=("Forecasts of equal size: errors on scaled test data", short_table(records)),
    )
