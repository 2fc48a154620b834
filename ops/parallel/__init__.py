"""Ops between the processes that serve one model together, the ranks of tensor parallelism."""
