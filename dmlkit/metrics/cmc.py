"""Cumulative matching characteristic: the curve of recall over ranks, the figure of query/gallery protocols."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class CmcConfig(MetricConfig, frozen=True):
    """CMC@k of re-identification and In-Shop: recall@k under the name and at the ranks used there."""

    name: Literal["cmc"] = "cmc"
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 10, 20, 30, 40, 50)
    """Cut-offs, each a figure."""
    key: ClassVar[str] = "cmc@k"
    definition: ClassVar[str] = "cmc@k: any hit in the k nearest of the gallery; equals recall@k"
    first_only: ClassVar[bool] = True

    def cutoffs(self) -> tuple[int, ...]:
        return self.k

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {name: ranking.any_within(ranking.cut(k)) for name, k in zip(self.names(), self.k, strict=True)}
