"""Calibrated quantisation of checkpoints: statistics of a text, SmoothQuant, AWQ, GPTQ, and the files."""

METHODS = ("rtn", "smoothquant", "awq", "gptq", "smoothquant+gptq", "awq+gptq")
