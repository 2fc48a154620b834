"""Calibrated quantisation of checkpoints: statistics of a text, SmoothQuant, AWQ, GPTQ, and the files."""
