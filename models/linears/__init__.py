"""Kinds of linear layer: how the weights are kept, and what multiplies with them. One file for each."""
