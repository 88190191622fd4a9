"""The geometry of embeddings: the curvature that suits them, and maps of them."""

from dmlkit.look.curvature import measure_curvature
from dmlkit.plots.geometry import plot_map

__all__ = ["measure_curvature", "plot_map"]
