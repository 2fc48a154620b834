"""Prefill and decode engines of other numbers of ranks: blocks of some are those of the others, to the bit."""
