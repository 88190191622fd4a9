"""Mean average precision at k: MAP with a search length of one's choice."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class MapAtKConfig(MetricConfig, frozen=True):
    r"""MAP@k, the mean of the precisions at the hits among the k nearest, out of the min(R, k) there could be.

    .. math:: \frac{1}{\min(R, k)} \sum_{i=1}^{k} P(i) \, \mathrm{rel}_i

    Others divide by something else; ``compat`` follows them, and reports e.g. ``map@10:oml``:
    ``pml`` (pytorch-metric-learning) by R, ``oml`` (open-metric-learning) by the number of hits found,
    ``mpa`` (Saeki et al. 2022, Table 1) by k.
    """

    name: Literal["map_at_k"] = "map_at_k"
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (10,)
    """Cut-offs, each a figure."""
    compat: Literal["pml", "oml", "mpa"] | None = None
    """Divide as others do: ``pml`` by R, ``oml`` by the hits found, ``mpa`` by k."""
    key: ClassVar[str] = "map@k"
    definition: ClassVar[str] = (
        "map@k: (1/min(R, k)) sum over i <= k of precision(i) * hit(i) (:pml / R, :oml / hits found, :mpa / k)"
    )

    def cutoffs(self) -> tuple[int, ...]:
        return self.k

    def names(self) -> tuple[str, ...]:
        suffix = f":{self.compat}" if self.compat else ""
        return tuple(name + suffix for name in super().names())

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {name: self._at(ranking, ranking.cut(k)) for name, k in zip(self.names(), self.k, strict=True)}

    def _at(self, ranking: Ranking, k: Tensor) -> Tensor:
        return ranking.precision_sum(k) / self._divisor(ranking, k)

    def _divisor(self, ranking: Ranking, k: Tensor) -> Tensor:
        match self.compat:
            case "pml":
                return ranking.positives
            case "oml":
                return ranking.hits_within(k).clamp(min=1)
            case "mpa":
                return k
            case None:
                return ranking.positives.minimum(k)
