"""Time series forecasting: the paper's backbone, baselines of neuralforecast, and Table 4 (Section 3).

tables.py reads the data, series.py splits and scales it, backbone.py is the paper's model around a mixer, training.py
trains it, baselines.py trains models of neuralforecast, report.py shows the results of all runs, settings.py and
experiment.py are `fem forecast`.
"""
