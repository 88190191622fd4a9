"""The geometry of embeddings: the curvature that suits them, and maps of them."""

from dmlkit.geometry.run import measure_curvature, plot_map

__all__ = ["measure_curvature", "plot_map"]
