"""Solvers of the intra-op problem."""
