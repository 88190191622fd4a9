"""Checks of a batch and of a manifold before a loss is computed."""
