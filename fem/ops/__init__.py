"""Tensors in, tensors out: one folder per read, each with its definition, its plain form and its kernels."""
