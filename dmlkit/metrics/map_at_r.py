"""Mean average precision at R: how much of the top R is right, weighted towards the front."""

from typing import ClassVar, Literal

import torch

from dmlkit.metrics.base import MetricConfig, Ranking


class MapAtRConfig(MetricConfig, frozen=True):
    r"""MAP@R of Musgrave et al., ECCV 2020 (arXiv:2003.08505), eq. 3-4.

    .. math:: \frac{1}{R} \sum_{i=1}^{R} P(i) \, \mathrm{rel}_i
    """

    name: Literal["map_at_r"] = "map_at_r"
    definition: ClassVar[str] = "map@r: (1/R) sum over i <= R of precision(i) * hit(i)"

    def names(self) -> tuple[str, ...]:
        return ("map@r",)

    def depth(self, max_positives: int) -> int:
        return max_positives

    def compute(self, ranking: Ranking) -> dict[str, float]:
        rank = torch.arange(1, ranking.hits.shape[1] + 1, device=ranking.hits.device)  # (K,)
        hits = ranking.hits & (rank <= ranking.positives[:, None])  # (Q, K)
        precision = hits.cumsum(1) / rank  # (Q, K)
        return {"map@r": ((precision * hits).sum(1).double() / ranking.positives).mean().item()}
