"""Area under the ROC curve of known against unknown queries."""

from typing import ClassVar, Literal

from pydantic import Field

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.open_set.split import OpenSet, wins


class AurocUnknownConfig(MetricConfig, frozen=True):
    """AUROC, the probability that a query of a known class scores above one of an unknown class; equal scores half.

    `OpenSet` says which classes are unknown, what is searched, and what the score is.
    """

    name: Literal["auroc_unknown"] = "auroc_unknown"
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "auroc_unknown"
    definition: ClassVar[str] = "auroc_unknown: probability that a known query scores above an unknown one"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        beaten = wins(found.known_scores, found.unknown_scores)
        return {"auroc_unknown": float(beaten.mean()) / len(found.unknown_scores)}
