"""Normalised discounted cumulative gain: hits near the front count more, at any search length."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class NdcgConfig(MetricConfig, frozen=True):
    r"""nDCG@k with binary gains (Saeki et al. 2022, eq. 10-11).

    .. math:: \frac{\sum_{i=1}^{k} \mathrm{rel}_i / \log_2(i + 1)}{\sum_{i=1}^{\min(R, k)} 1 / \log_2(i + 1)}
    """

    name: Literal["ndcg"] = "ndcg"
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (10,)
    """Cut-offs, each a figure."""
    key: ClassVar[str] = "ndcg@k"
    definition: ClassVar[str] = "ndcg@k: sum over i <= k of hit(i) / log2(i + 1), over that of min(R, k) hits in front"

    def cutoffs(self) -> tuple[int, ...]:
        return self.k

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {name: _ndcg(ranking, ranking.cut(k)) for name, k in zip(self.names(), self.k, strict=True)}


def _ndcg(ranking: Ranking, k: Tensor) -> Tensor:
    ideal = ranking.ideal_gains(int(k.max()))[ranking.positives.minimum(k)]
    return ranking.discounted_gain(k) / ideal
