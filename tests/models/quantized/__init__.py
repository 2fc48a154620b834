"""Tests of models/quantized."""
