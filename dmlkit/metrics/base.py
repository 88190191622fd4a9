"""The metric interface: what a ranking holds, and what a metric makes of it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dmlkit.component import ComponentConfig


@dataclass(frozen=True)
class Ranking:
    """The nearest neighbours of Q queries in a gallery, nearest first, without the query itself.

    Args:
        hits: (Q, K) bool; neighbour k of query q has the label of q.
        positives: (Q,) int64 >= 1; R, how many items of the gallery have the label of q, without q itself.
    """

    hits: Tensor
    positives: Tensor


class MetricConfig(ComponentConfig, frozen=True):
    """Root of the metric family."""

    definition: ClassVar[str]
    """One line, printed beside the figure; R = positives of the query without itself."""

    def names(self) -> tuple[str, ...]:
        """The keys of what `compute` returns."""
        raise NotImplementedError

    def depth(self, max_positives: int) -> int:
        """How many neighbours the metric looks at, where no query has more than ``max_positives`` positives."""
        raise NotImplementedError

    def compute(self, ranking: Ranking) -> dict[str, float]:
        """Named fractions, averaged over the queries."""
        raise NotImplementedError
