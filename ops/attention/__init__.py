"""Paged attention: the op, its reference, and its kernels for CPUs and GPUs."""
