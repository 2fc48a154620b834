"""Linear layers on packed weights: the op, its reference, its kernel for CPUs."""
