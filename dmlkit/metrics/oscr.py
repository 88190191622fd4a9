"""Open-set classification rate: known queries answered rightly while unknown ones are rejected."""

from typing import ClassVar, Literal

from pydantic import Field

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.open_set.split import OpenSet, wins


class OscrConfig(MetricConfig, frozen=True):
    """OSCR, the area under the rate of right answers over the false accept rate (Dhamija et al., NeurIPS 2018).

    The threshold goes over all scores. A known query counts where its answer is right and its score reaches the
    threshold, an unknown one is accepted where its score does. So the area is the share of pairs of a known and an
    unknown query in which the known one is answered rightly and scores higher; equal scores half. `OpenSet` says what
    is searched.
    """

    name: Literal["oscr"] = "oscr"
    unknown_fraction: float = Field(0.5, gt=0, lt=1)
    """Share of the classes, the last of them, that are unknown."""
    key: ClassVar[str] = "oscr"
    definition: ClassVar[str] = (
        "oscr: known queries answered rightly and scoring above unknown ones, over all pairs of the two"
    )
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        found = OpenSet.of(points, self.unknown_fraction)
        beaten = wins(found.known_scores, found.unknown_scores) * found.right
        return {"oscr": float(beaten.mean()) / len(found.unknown_scores)}
