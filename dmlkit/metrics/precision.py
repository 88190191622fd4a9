"""Precision at k: how many of the k nearest are right?"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class PrecisionConfig(MetricConfig, frozen=True):
    """P@k, the share of hits among the k nearest; P@1 equals R@1.

    ``compat: oml`` divides by min(k, R), as open-metric-learning does, and reports ``precision@k:oml``.
    """

    name: Literal["precision"] = "precision"
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Cut-offs, each a figure."""
    compat: Literal["oml"] | None = None
    """Count as open-metric-learning: divide by min(k, R)."""
    key: ClassVar[str] = "precision@k"
    definition: ClassVar[str] = "precision@k: hits in the k nearest / k (:oml / min(R, k))"

    def cutoffs(self) -> tuple[int, ...]:
        return self.k

    def names(self) -> tuple[str, ...]:
        suffix = f":{self.compat}" if self.compat else ""
        return tuple(name + suffix for name in super().names())

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {name: self._at(ranking, ranking.cut(k)) for name, k in zip(self.names(), self.k, strict=True)}

    def _at(self, ranking: Ranking, k: Tensor) -> Tensor:
        divisor = k.minimum(ranking.positives) if self.compat == "oml" else k
        return ranking.hits_within(k) / divisor
