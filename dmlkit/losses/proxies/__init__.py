"""Computation of losses over learnable proxies."""
