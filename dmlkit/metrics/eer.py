"""Equal error rate: where as many pairs of one class are rejected as pairs of two are accepted."""

from typing import ClassVar, Literal

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.pairs.curve import PairCurve


class EerConfig(MetricConfig, frozen=True):
    """EER, the false accept rate where it equals the false reject rate, over the pairs of `roc_auc`; less is better.

    Between two thresholds both rates go along straight lines: the figure is where the ROC curve, drawn through its
    points at all distinct scores, meets the diagonal TAR = 1 - FAR.
    """

    name: Literal["eer"] = "eer"
    key: ClassVar[str] = "eer"
    definition: ClassVar[str] = (
        "eer: false accept rate where it equals the false reject rate, over all pairs; less is better"
    )
    searches: ClassVar[bool] = False
    smaller_is_better: ClassVar[bool] = True

    def of_points(self, points: Points) -> dict[str, float]:
        return {"eer": equal_error_rate(PairCurve.of(points))}


def equal_error_rate(curve: PairCurve) -> float:
    """Where the curve meets the diagonal TAR = 1 - FAR: the false accept rate there."""
    for band in curve.bands():
        hits = band.before + band.count.cumsum(0)
        tar, far = hits.double() / curve.same, band.reached.double() / curve.different
        passed = (tar + far >= 1).nonzero()
        if len(passed):
            place = int(passed[0])
            first_tar = float(hits[place] - band.count[place]) / curve.same
            first_far = float(band.above[place]) / curve.different
            if first_tar + first_far >= 1:  # before this score, on the way along which the TAR stays
                return 1 - first_tar
            wide, high = float(far[place]) - first_far, float(tar[place]) - first_tar
            return first_far + wide * (1 - first_tar - first_far) / (wide + high)
    raise AssertionError  # the last point has TAR 1
