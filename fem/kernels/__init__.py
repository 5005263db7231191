"""Triton kernels: memory and programs in, memory out. `fem.ops` imports them when it launches one."""
