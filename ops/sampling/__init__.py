"""Choosing tokens from logits: the ops, their references, their kernels."""
