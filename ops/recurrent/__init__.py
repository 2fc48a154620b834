"""Ops of layers that keep a state of fixed size for each request, in a slot of a pool."""
