"""Decoder-only models as pure functions of (weights, StepInput, KVCache). A family is one file and one line in
``registry.py``; docs/models.md says how to add one.
"""
