"""Mean reciprocal rank: how far down is the first hit?"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking


class MrrConfig(MetricConfig, frozen=True):
    """MRR, the mean of 1 / rank of the first hit, over the whole gallery."""

    name: Literal["mrr"] = "mrr"
    key: ClassVar[str] = "mrr"
    definition: ClassVar[str] = "mrr: 1 / rank of the first hit; 0 where none was found"
    first_only: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        above, m, h = ranking.above[:, 0], ranking.tied[:, 0], ranking.hits_tied[:, 0]
        value = (above < ranking.gallery) / (above + 1).double()
        tied = m > h
        if tied.any():
            value[tied] = expected_reciprocal(above[tied], m[tied], h[tied])
        return {"mrr": value}


def expected_reciprocal(above: Tensor, tied: Tensor, hits: Tensor) -> Tensor:
    r"""E[1 / (a + X)], X the first of h hits among m tied items: (Q,) float64.

    .. math:: P(X > x) = \prod_{i=1}^{x} \frac{m - h - i + 1}{m - i + 1}

    Example:
        >>> expected_reciprocal(torch.tensor([0]), torch.tensor([2]), torch.tensor([1])).tolist()  # ranks 1, 2
        [0.75]
    """
    cases, case = torch.stack([above, tied, hits]).unique(dim=1, return_inverse=True)
    values = [_expected_reciprocal(*column) for column in cases.T.tolist()]
    return torch.tensor(values, dtype=torch.float64, device=above.device)[case]


def _expected_reciprocal(above: int, tied: int, hits: int) -> float:
    x = torch.arange(1, tied - hits + 2, dtype=torch.float64)  # the ranks that the first hit may have
    later = ((tied - hits - x + 1) / (tied - x + 1)).cumprod(0)  # P(X > x)
    probability = torch.cat([later.new_ones(1), later[:-1]]) - later
    return float((probability / (above + x)).sum())
