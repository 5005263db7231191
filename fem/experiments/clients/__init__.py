"""What works with what: model types of transformers turned into FEM. Run: python -m fem.experiments.clients"""
