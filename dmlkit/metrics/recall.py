"""Recall at k: is there an image of the same class among the k nearest?"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from dmlkit.metrics.base import MetricConfig, Ranking


class RecallConfig(MetricConfig, frozen=True):
    """R@k, the share of queries with a hit among their k nearest neighbours (also called CMC@k)."""

    name: Literal["recall"] = "recall"
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8)
    definition: ClassVar[str] = "recall@k: any hit in the k nearest"

    def names(self) -> tuple[str, ...]:
        return tuple(f"recall@{k}" for k in self.k)

    def depth(self, max_positives: int) -> int:
        return max(self.k)

    def compute(self, ranking: Ranking) -> dict[str, float]:
        return {f"recall@{k}": ranking.hits[:, :k].any(1).double().mean().item() for k in self.k}
