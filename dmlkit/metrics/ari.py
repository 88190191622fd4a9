"""Adjusted Rand index of classes and k-means clusters."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.clustering.contingency import Contingency
from dmlkit.metrics.clustering.kmeans import KMeansOptions, class_clusters


class AriConfig(MetricConfig, frozen=True):
    r"""ARI, the share of pairs that both put together or both apart, adjusted for chance (Hubert & Arabie 1985).

    .. math:: \frac{S - E}{(A + B) / 2 - E}, \quad S = \sum_{ij} \binom{n_{ij}}{2},\ A = \sum_i \binom{a_i}{2},\
        B = \sum_j \binom{b_j}{2},\ E = A B / \binom{N}{2}
    """

    name: Literal["ari"] = "ari"
    iterations: PositiveInt = 20
    """Of Lloyd's algorithm; fewer where it settles."""
    restarts: PositiveInt = 1
    """Clusterings, of which the one with the least squared distance counts."""
    seed: NonNegativeInt = 0
    """Of the clustering."""
    key: ClassVar[str] = "ari"
    definition: ClassVar[str] = "ari: pairs that classes and k-means clusters agree on, adjusted for chance"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"ari": adjusted_rand(Contingency.of(points.labels, clusters))}


def adjusted_rand(table: Contingency) -> float:
    """Agreement above chance over the most there could be above chance; 1 where that is 0.

    Example:
        >>> import torch
        >>> round(adjusted_rand(Contingency.of(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2]))), 6)
        0.571429
    """
    both, same_class, same_cluster = (
        int((n * (n - 1) // 2).sum()) for n in (table.overlap, table.classes, table.clusters)
    )
    pairs = table.total * (table.total - 1) // 2
    chance = same_class * same_cluster / pairs if pairs else 0.0
    room = (same_class + same_cluster) / 2 - chance
    return (both - chance) / room if room else 1.0
