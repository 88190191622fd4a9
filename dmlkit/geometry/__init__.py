"""The geometry of embeddings: the curvature that suits them, and maps of them."""

from dmlkit.geometry.curvature import measure_curvature
from dmlkit.geometry.plot import plot_map

__all__ = ["measure_curvature", "plot_map"]
