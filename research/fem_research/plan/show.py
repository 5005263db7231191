"""A plan as a table: what is said, and how it is known."""

from __future__ import annotations

from fem.tables import show_table
from fem_research.plan import cost
from fem_research.plan.cost import Job
from fem_research.plan.model import weights

COUNTED = ("weights", "optimiser", "gradients")  # of the bytes that a GPU holds
CACHES = (4096, 32768, 131072)
WORDS = {
    "gathered": "whole weights",
    "arithmetic": "time: arithmetic",
    "memory": "time: memory traffic",
    "sharding": "time: messages of shards",
    "splitting": "time: messages of split rows and heads",
    "step": "shortest step",
    "utilisation": "utilisation in the shortest step",
}


def table(job: Job) -> list[dict[str, str]]:
    """A line for everything that the plan says."""
    rows = []

    def line(what: str, much: str, how: str) -> None:
        rows.append({"what": what, "how much": much, "how it is known": how})

    gb = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    held, told = cost.memory(job), cost.prediction(job)
    line("parameters", f"{sum(w.count for w in weights(job.size, job.form)):,}", "counted")
    for name, size in held.items():
        how = "counted" if name in COUNTED else "counted, CPU" if name == "activations" else "formula"
        line(f"memory of a GPU: {WORDS.get(name, name)}", gb(size), how)
    line("memory of a GPU", gb(sum(held.values())), "sum")
    line("longest row that fits", f"{cost.longest(job):,} tokens", "formula")
    line("operations a token", f"{cost.flops_per_token(job):.3g}", "formula")
    for name, size in cost.messages(job).items():
        if size:
            line(f"bytes a step over {cost.wires(job)[name]}: {name}", gb(size), "formula")
    forms = {"utilisation": "{:.0%}", "likely tokens a day": "{:.3g}"}
    for name, value in told.items():
        line(WORDS.get(name, name), forms.get(name, "{:.3f} s").format(value), "PREDICTED")
    for tokens in CACHES:
        held = cost.cache_bytes(job.size, job.form, tokens)
        line(f"cache of a row of {tokens:,}", f"{held / 1e6:,.0f} MB", "counted")
    return rows


def show(job: Job) -> None:
    show_table("What a training costs", table(job))
    print(cost.advice(job))
    print("Times are predictions from data sheets; none of this ran on a GPU.")
    print("What was counted: research/results/checks/plan.md")
