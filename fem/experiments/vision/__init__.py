"""Image classification: DeiT with and without FEM (Section 3, Table 3).

images.py finds the pictures, pixels.py makes tensors of them, training.py is one run of transformers' Trainer,
report.py what all runs add up to, experiment.py `fem vision`.
"""

from fem.experiments.vision.experiment import command

__all__ = ["command"]
