"""Two-sample test: do two sets of points come from the same distribution?"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PERMUTATIONS = 999  # the smallest p-value is 1 / 1000


class TwoSamples(NamedTuple):
    """Result of a two-sample test."""

    distance: float
    """Energy distance, at least 0, in the unit of the distance of the points; the mean over strata."""
    p_value: float


def energy_test(
    first: Tensor,
    second: Tensor,
    strata: tuple[Tensor, Tensor],
    distance: Callable[[Tensor, Tensor], Tensor],
    *,
    seed: int = 0,
) -> TwoSamples | None:
    r"""Test whether two samples have the same distribution within each stratum, by energy distances and permutations.

    The energy distance (Székely & Rizzo 2013, eq. 6.1) of samples X of n and Y of m points,

    .. math:: E = \frac{2}{nm} \sum_{i,j} d(x_i, y_j) - \frac{1}{n^2} \sum_{i,j} d(x_i, x_j)
                  - \frac{1}{m^2} \sum_{i,j} d(y_i, y_j),

    is 0 only for equal distributions if d is a distance of negative type, as on all our manifolds. The statistic is the
    sum of :math:`\frac{nm}{n + m} E` over the strata, and its p-value is the share of permutations of the points of
    each stratum with at least that sum. It is exact for points that are independent within their stratum, whatever the
    shares of the strata in either sample.

    Args:
        first, second: (N, D) and (M, D) points.
        strata: (N,) and (M,) int64, the stratum of each point.
        distance: function of two sets of points (n, D) and (m, D), which returns their distances (n, m).
        seed: seed of the permutations.

    Returns:
        The result; None if no stratum has points of both samples.

    Example:
        >>> draws = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> one = torch.zeros(30, dtype=torch.int64)
        >>> same = energy_test(draws[:30], draws[30:], (one, one), torch.cdist)
        >>> moved = energy_test(draws[:30], draws[30:] + 1.5, (one, one), torch.cdist)
        >>> same.p_value > 0.05, moved.p_value
        (True, 0.001)
    """
    generator = torch.Generator().manual_seed(seed)
    points, codes = torch.cat([first, second]), torch.cat(strata)
    is_first = torch.arange(len(points)) < len(first)
    total, weight = torch.zeros(1 + PERMUTATIONS, dtype=torch.float64), 0.0
    for code in codes.unique():
        rows = (codes == code).nonzero()[:, 0]
        size, ours = len(rows), int(is_first[rows].sum())
        if ours in (0, size):
            continue
        # E is -w^T D w with 1 / n for points of the first sample and -1 / m for those of the second
        own = torch.where(is_first[rows], 1 / ours, -1 / (size - ours)).double()
        shuffled = own[torch.rand(PERMUTATIONS, size, generator=generator).argsort(1)]
        weights = torch.cat([own[None], shuffled])
        distances = distance(points[rows], points[rows]).double()
        factor = ours * (size - ours) / size
        total -= factor * ((weights @ distances) * weights).sum(1)
        weight += factor
    if weight == 0:
        return None
    rounding = 1e-9 * float(total.abs().max())
    extreme = int((total[1:] >= total[0] - rounding).sum())
    return TwoSamples(max(0.0, float(total[0]) / weight), (extreme + 1) / (PERMUTATIONS + 1))
