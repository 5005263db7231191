"""Where the free energy helps: tasks that one average per head cannot do, and tasks that an average does best."""

from fem.experiments.regimes.experiment import command, run
from fem.experiments.regimes.settings import RegimesRecipe
from fem.experiments.regimes.training import TASKS

__all__ = ["TASKS", "RegimesRecipe", "command", "run"]
