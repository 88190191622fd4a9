"""Pairwise F1 of classes and k-means clusters."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.clustering.contingency import Contingency
from dmlkit.metrics.clustering.kmeans import KMeansOptions, class_clusters


class F1Config(MetricConfig, frozen=True):
    r"""F1 of "same cluster" as a test for "same class", over all pairs of points.

    .. math:: \frac{2 \sum_{ij} \binom{n_{ij}}{2}}{\sum_i \binom{a_i}{2} + \sum_j \binom{b_j}{2}}
    """

    name: Literal["f1"] = "f1"
    iterations: PositiveInt = 20
    """Of Lloyd's algorithm; fewer where it settles."""
    restarts: PositiveInt = 1
    """Clusterings, of which the one with the least squared distance counts."""
    seed: NonNegativeInt = 0
    """Of the clustering."""
    key: ClassVar[str] = "f1"
    definition: ClassVar[str] = "f1: F1 over pairs of points, same k-means cluster against same class"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"f1": pairwise_f1(Contingency.of(points.labels, clusters))}


def pairwise_f1(table: Contingency) -> float:
    """F1 over pairs; 1 where neither partition puts any two points together.

    Example:
        >>> import torch
        >>> pairwise_f1(Contingency.of(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])))
        0.4
    """
    both, same_class, same_cluster = (
        int((n * (n - 1) // 2).sum()) for n in (table.overlap, table.classes, table.clusters)
    )
    return 2 * both / (same_class + same_cluster) if same_class + same_cluster else 1.0
