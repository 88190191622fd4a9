"""Mean average precision at R: how much of the top R is right, weighted towards the front."""

from typing import ClassVar, Literal

from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class MapAtRConfig(MetricConfig, frozen=True):
    r"""MAP@R of Musgrave et al., ECCV 2020 (arXiv:2003.08505), eq. 3-4.

    .. math:: \frac{1}{R} \sum_{i=1}^{R} P(i) \, \mathrm{rel}_i
    """

    name: Literal["map_at_r"] = "map_at_r"
    key: ClassVar[str] = "map@r"
    definition: ClassVar[str] = "map@r: (1/R) sum over i <= R of precision(i) * hit(i)"
    to_r: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {"map@r": ranking.precision_sum(ranking.positives) / ranking.positives}
