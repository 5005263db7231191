"""MAD: six synthetic tasks that probe what a sequence mixer can do (Section 3, Table 1).

tasks.py draws the data, settings.py says what a profile trains on, backbone.py is the model around a mixer, training.py
one run, experiment.py `fem mad`, which runs them all, and table.py and report.py show the results.
"""
