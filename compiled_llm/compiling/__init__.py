"""Compiled functions: made, checked, kept on disk, reported."""
