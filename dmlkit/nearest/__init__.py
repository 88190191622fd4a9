"""Exact nearest neighbors and near pairs on every manifold."""
