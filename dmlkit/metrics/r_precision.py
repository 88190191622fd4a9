"""R-Precision: precision at as many neighbours as there are right ones."""

from typing import ClassVar, Literal

from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class RPrecisionConfig(MetricConfig, frozen=True):
    """R-Precision, the share of hits among the R nearest (Musgrave et al., ECCV 2020, arXiv:2003.08505)."""

    name: Literal["r_precision"] = "r_precision"
    key: ClassVar[str] = "r_precision"
    definition: ClassVar[str] = "r_precision: hits in the R nearest / R"
    to_r: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {"r_precision": ranking.hits_within(ranking.positives) / ranking.positives}
