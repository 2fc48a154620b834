"""Sizes and tiles that suit a machine and its work: found by measuring, or in traces of earlier runs."""
