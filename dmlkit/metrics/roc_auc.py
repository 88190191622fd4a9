"""Area under the ROC curve over all pairs: is a pair of one class more alike than a pair of two?"""

from typing import ClassVar, Literal

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.pairs.curve import PairCurve


class RocAucConfig(MetricConfig, frozen=True):
    """ROC-AUC, the probability that a pair of one class scores higher than a pair of two; equal scores count half.

    All pairs count, each unordered one once; with queries and a gallery, every query with every item but itself.
    """

    name: Literal["roc_auc"] = "roc_auc"
    key: ClassVar[str] = "roc_auc"
    definition: ClassVar[str] = "roc_auc: probability that a pair of one class scores above a pair of two; ties half"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        return {"roc_auc": area(PairCurve.of(points))}


def area(curve: PairCurve) -> float:
    """The area under the curve, in integers up to the last division."""
    twice = sum(int((band.count * (2 * curve.different - band.above - band.reached)).sum()) for band in curve.bands())
    return twice / (2 * curve.same * curve.different)
