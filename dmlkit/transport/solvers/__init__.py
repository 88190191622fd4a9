"""Algorithms behind the transport solvers."""
