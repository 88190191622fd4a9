"""Exact nearest neighbors and near pairs on every manifold, and similarities that rank a short list again; no files."""
