"""Recall at k: is there an item of the same class among the k nearest?"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class RecallConfig(MetricConfig, frozen=True):
    """R@k, the share of queries with a hit among their k nearest neighbours."""

    name: Literal["recall"] = "recall"
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8)
    """Cut-offs, each a figure."""
    key: ClassVar[str] = "recall@k"
    definition: ClassVar[str] = "recall@k: any hit in the k nearest"
    first_only: ClassVar[bool] = True

    def cutoffs(self) -> tuple[int, ...]:
        return self.k

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {name: ranking.any_within(ranking.cut(k)) for name, k in zip(self.names(), self.k, strict=True)}
