"""Adjusted mutual information of classes and k-means clusters."""

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.clustering.contingency import Contingency
from dmlkit.metrics.clustering.kmeans import KMeansOptions, class_clusters


class AmiConfig(MetricConfig, frozen=True):
    r"""AMI, mutual information adjusted for chance: 0 for random clusters, however many (Vinh et al., JMLR 2010).

    .. math:: \frac{I(Y; Z) - E[I]}{(H(Y) + H(Z)) / 2 - E[I]}
    """

    name: Literal["ami"] = "ami"
    iterations: PositiveInt = 20
    """Of Lloyd's algorithm; fewer where it settles."""
    restarts: PositiveInt = 1
    """Clusterings, of which the one with the least squared distance counts."""
    seed: NonNegativeInt = 0
    """Of the clustering."""
    key: ClassVar[str] = "ami"
    definition: ClassVar[str] = "ami: nmi adjusted for chance; 0 for random clusters"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"ami": adjusted_information(Contingency.of(points.labels, clusters))}


def adjusted_information(table: Contingency) -> float:
    """Mutual information above chance over the most there could be above chance; 1 where that is 0.

    Example:
        >>> import torch
        >>> round(adjusted_information(Contingency.of(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0]))), 6)
        1.0
    """
    chance = table.expected_information()
    room = table.mean_entropy() - chance
    gain = table.mutual_information() - chance
    return gain / room if abs(room) > 1e-15 else 1.0
