"""The shape of embeddings: which curvature suits them, and pictures."""

from dmlkit.geometry.run import measure_curvature, plot_map

__all__ = ["measure_curvature", "plot_map"]
