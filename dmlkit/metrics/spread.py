"""Spread: how wide classes are, how far apart, and the ratio of the two."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.ranking.products import block_rows


class SpreadConfig(MetricConfig, frozen=True):
    """Mean distance within classes and between class centres, and their ratio (Roth et al., ICML 2020, sec. 5).

    Distances are the manifold's. A centre is the mean of a class's points, put back onto the manifold.
    """

    name: Literal["spread"] = "spread"
    key: ClassVar[str] = "spread"
    definition: ClassVar[str] = (
        "intra_distance: mean distance of two points of a class, over classes; inter_distance: of two class centres; "
        "density: intra / inter"
    )
    searches: ClassVar[bool] = False

    def names(self) -> tuple[str, ...]:
        return "intra_distance", "inter_distance", "density"

    def of_points(self, points: Points) -> dict[str, float]:
        order = points.labels.argsort(stable=True)
        sizes = points.labels.bincount()
        classes = points.embeddings[order].split(sizes.tolist())
        within = [mean_distance(points.manifold, members) for members in classes if len(members) > 1]
        intra = sum(within) / len(within) if within else 0.0
        inter = mean_distance(points.manifold, class_centres(points, sizes))
        density = intra / max(inter, 1e-12)  # finite where all centres coincide: JSON knows no infinity
        return {"intra_distance": intra, "inter_distance": inter, "density": density}


def class_centres(points: Points, sizes: Tensor) -> Tensor:
    """The mean of each class's points on the manifold: (C, D)."""
    sums = points.embeddings.new_zeros(len(sizes), points.embeddings.shape[1])
    means = sums.index_add_(0, points.labels, points.embeddings) / sizes[:, None]
    return points.manifold.geometry.projx(means)


def mean_distance(manifold: Manifold, points: Tensor) -> float:
    """The mean over all pairs of n >= 2 different points (n, D).

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> mean_distance(Euclidean(1), torch.tensor([[0.0], [1.0], [3.0]]))
        2.0
    """
    blocks = points.split(block_rows(len(points)))
    total = sum(float(manifold.distance(block, points).sum(dtype=torch.float64)) for block in blocks)
    return total / (len(points) * (len(points) - 1))
