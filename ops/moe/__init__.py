"""Mixture of experts: which experts a token uses, their linear layers, and the sum of what they give."""
