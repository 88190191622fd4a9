"""True accept rate at a false accept rate: how many pairs of one class are recognised when few others are accepted."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.pairs.curve import PairCurve

Share = Annotated[float, Field(gt=0, lt=1)]


class TarAtFarConfig(MetricConfig, frozen=True):
    """TAR@FAR, the share of the pairs of one class that are accepted where few of two classes are.

    Accepted are the scores from t on, the smallest threshold that at most the share ``far`` of the pairs of different
    classes reaches. Nothing is interpolated: t is one of the scores. Pairs are those of `roc_auc`.
    """

    name: Literal["tar_at_far"] = "tar_at_far"
    far: Annotated[tuple[Share, ...], Field(min_length=1)] = (1e-3,)
    """Shares of the pairs of different classes that may be accepted, each a figure."""
    key: ClassVar[str] = "tar@far=x"
    definition: ClassVar[str] = (
        "tar@far=x: pairs of one class accepted at the lowest threshold that at most a share x of the others reaches"
    )
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        curve = PairCurve.of(points)
        accepted = [0] * len(self.far)
        for band in curve.bands():
            rate = band.reached.double() / curve.different
            for place, far in enumerate(self.far):
                accepted[place] += int(band.count[rate <= far].sum())
        return {name: count / curve.same for name, count in zip(self.names(), accepted, strict=True)}

    def notes(self, points: Points) -> Iterable[str]:
        """Where there are fewer pairs of different classes than one accepted needs."""
        different = PairCurve.of(points).different
        for name, far in zip(self.names(), self.far, strict=True):
            if far * different < 1:
                yield f"{name}: with {different} pairs of different classes, none of them may be accepted"
