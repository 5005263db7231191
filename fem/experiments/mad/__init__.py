"""MAD: six synthetic tasks that probe what a sequence mixer can do (Section 3, Table 1).

tasks.py draws the data, settings.py says what a profile trains on, mixers.py names the mixers, backbone.py is the model
around a mixer, training.py one run, sweep.py all of them, table.py what they add up to, experiment.py `fem mad`.
"""

from fem.experiments.mad.experiment import command
from fem.experiments.mad.tasks import IGNORED, TASKS, generate

__all__ = ["IGNORED", "TASKS", "command", "generate"]
