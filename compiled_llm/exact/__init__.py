"""Proof that a request's bits do not depend on how it is served: a matrix of settings, compared bit for bit."""
