"""Time series forecasting: the paper's backbone, baselines of neuralforecast, and Table 4 (Section 3).

tables.py reads the data, series.py splits and scales it, backbone.py is the paper's model around a mixer,
training.py trains it, baselines.py trains what neuralforecast has ready, report.py and picture.py are what all runs
add up to, settings.py and experiment.py `fem forecast`.
"""

from fem.experiments.forecast.experiment import command

__all__ = ["command"]
