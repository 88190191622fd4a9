"""Balanced accuracy on known classes: their queries accepted, and answered rightly."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.open_set.split import OpenSet, class_mean


class BaksConfig(MetricConfig, frozen=True):
    """BAKS, the share of queries of known classes that are accepted and answered rightly, mean over the classes.

    Accepted is a score from the threshold on. It is given: one chosen on these images would flatter. `OpenSet` says
    what is searched.
    """

    name: Literal["baks"] = "baks"
    threshold: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    """Similarities, each a figure; ``dmlkit calibrate`` finds one on validation classes."""
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "baks@threshold=x"
    definition: ClassVar[str] = (
        "baks@threshold=x: queries scoring at least x and answered rightly, mean over known classes"
    )
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        return {
            name: class_mean(found.right & (found.known_scores >= threshold), found.known_labels)
            for name, threshold in zip(self.names(), self.threshold, strict=True)
        }
