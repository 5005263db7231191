"""Where the free energy pays: tasks that one average cannot do, and tasks that it does best."""

from fem.experiments.regimes.experiment import command, run
from fem.experiments.regimes.settings import RegimesRecipe
from fem.experiments.regimes.training import TASKS

__all__ = ["TASKS", "RegimesRecipe", "command", "run"]
