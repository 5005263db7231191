"""Image classification: DeiT with and without FEM (Section 3, Table 3).

images.py finds the pictures, pixels.py makes tensors of them, settings.py is the recipe, training.py one run of
transformers' Trainer, report.py the results of all runs, experiment.py `fem vision`.
"""
