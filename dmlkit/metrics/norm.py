"""Norm: how long the features are that embeddings stand for."""

from typing import ClassVar, Literal

from dmlkit.metrics.base import MetricConfig, Points


class NormConfig(MetricConfig, frozen=True):
    """Mean length of the features, and their mean squared length, which training may blow up (Chen et al., AAAI 2021).

    The features are those of the manifold: a point of flat space itself, and in a curved one the vector from the origin
    to it, as long as the way there. On the sphere all have length 1. With ``validate_every: 1`` a run's curves show how
    they change, as in Table 1 of the paper.
    """

    name: Literal["norm"] = "norm"
    key: ClassVar[str] = "norm"
    definition: ClassVar[str] = "norm: mean length of the features of embeddings; squared_norm: mean of its square"
    searches: ClassVar[bool] = False

    def names(self) -> tuple[str, ...]:
        return "norm", "squared_norm"

    def of_points(self, points: Points) -> dict[str, float]:
        lengths = points.manifold.to_features(points.embeddings).double().norm(dim=1)
        return {"norm": lengths.mean().item(), "squared_norm": lengths.square().mean().item()}
