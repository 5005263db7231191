"""Time series forecasting: the paper's host, peers of neuralforecast, and Table 4 (Section 3).

tables.py reads the data, series.py splits and scales it, host.py is the paper's model around a mixer and training.py
trains it, peers.py trains what neuralforecast has ready, report.py and picture.py are what all runs add up to,
settings.py and experiment.py `fem forecast`.
"""

from fem.experiments.forecast.experiment import command

__all__ = ["command"]
