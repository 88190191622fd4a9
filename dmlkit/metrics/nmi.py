"""Normalised mutual information of classes and k-means clusters."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.clustering.contingency import Contingency
from dmlkit.metrics.clustering.kmeans import KMeansOptions, class_clusters


class NmiConfig(MetricConfig, frozen=True):
    r"""NMI of the classes and as many k-means clusters, 1 when they agree.

    .. math:: \frac{I(Y; Z)}{(H(Y) + H(Z)) / 2}
    """

    name: Literal["nmi"] = "nmi"
    iterations: PositiveInt = 20
    """Of Lloyd's algorithm; fewer where it settles."""
    restarts: PositiveInt = 1
    """Clusterings, of which the one with the least squared distance counts."""
    seed: NonNegativeInt = 0
    """Of the clustering."""
    key: ClassVar[str] = "nmi"
    definition: ClassVar[str] = "nmi: mutual information of classes and k-means clusters / mean of their entropies"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"nmi": normalized_information(Contingency.of(points.labels, clusters))}


def normalized_information(table: Contingency) -> float:
    """Mutual information over mean entropy; 1 where neither partition divides anything.

    Example:
        >>> import torch
        >>> normalized_information(Contingency.of(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])))
        1.0
    """
    entropy = table.mean_entropy()
    return table.mutual_information() / entropy if entropy > 0 else 1.0
