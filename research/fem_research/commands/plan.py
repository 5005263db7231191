"""`fem plan`: what a training costs, before it runs."""

from __future__ import annotations

from typing import Any

from fem.commands.options import recipe_options
from fem_research.plan.settings import Job


@recipe_options(Job)
def command(changes: dict[str, Any]):
    """Memory, messages and predicted time of one of the paper's language models on many GPUs, and its serving cache."""
    from fem_research.plan.show import show

    show(Job(**changes))
