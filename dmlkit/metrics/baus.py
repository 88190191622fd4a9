"""Balanced accuracy on unknown classes: their queries rejected."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.open_set.split import OpenSet, class_mean


class BausConfig(MetricConfig, frozen=True):
    """BAUS, the share of queries of unknown classes that score less than the threshold, mean over the classes.

    The threshold is given: one chosen on these images would flatter. `OpenSet` says what is searched.
    """

    name: Literal["baus"] = "baus"
    threshold: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    """Similarities, each a figure; ``dmlkit calibrate`` finds one on validation classes."""
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "baus@threshold=x"
    definition: ClassVar[str] = "baus@threshold=x: queries scoring less than x, mean over unknown classes"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        return {
            name: class_mean(found.unknown_scores < threshold, found.unknown_labels)
            for name, threshold in zip(self.names(), self.threshold, strict=True)
        }
