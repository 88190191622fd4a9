"""What a model sees: inspection, curvature, alignment of two models, and evidence of what answers rest on."""

from dmlkit.look.curvature import measure_curvature
from dmlkit.plots.geometry import plot_map

__all__ = ["measure_curvature", "plot_map"]
