"""The metric interface: what a ranking and a set of points hold, and what a metric makes of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

import torch
from torch import Tensor

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold


@dataclass(frozen=True)
class Ranking:
    """Where the positives of Q queries stand among all that was ranked for them, best first.

    The positives of a query are the items of its class, without itself. Items with the same score share their
    ranks: positive j stands anywhere in ``above + 1 .. above + tied`` with equal probability, and every
    metric is the expected value over the orders of the tied items.

    Args:
        above: (Q, J) int64, ascending; items with a higher score. A column that a query has no positive for
            (or none that was found) holds ``gallery``.
        tied: (Q, J) int64 >= 1; m, items with the same score, positive j included.
        hits_above: (Q, J) int64; H, positives among the items above.
        hits_tied: (Q, J) int64 >= 1; h, positives among the tied.
        positives: (Q,) int64 >= 1; R.
        gallery: (Q,) int64; how many items were ranked.
    """

    above: Tensor
    tied: Tensor
    hits_above: Tensor
    hits_tied: Tensor
    positives: Tensor
    gallery: Tensor

    def cut(self, k: int) -> Tensor:
        """min(k, gallery): (Q,) int64."""
        return self.gallery.clamp(max=k)

    def hits_within(self, limit: Tensor) -> Tensor:
        """Expected hits among the first ``limit`` (Q,) items: (Q,) float64."""
        return ((limit[:, None] - self.above).double() / self.tied).clamp(0, 1).sum(1)

    def any_within(self, limit: Tensor) -> Tensor:
        r"""Probability of a hit among the first ``limit`` (Q,) items: (Q,) float64.

        With t of the m best tied items inside the limit: :math:`1 - \binom{m-h}{t} / \binom{m}{t}`.
        """
        m, h = self.tied[:, 0], self.hits_tied[:, 0]
        t = (limit - self.above[:, 0]).clamp(min=0).minimum(m)
        found = (t > m - h).double()
        open_ = (t > 0) & (t <= m - h)
        misses = _log_binomial((m - h)[open_], t[open_]) - _log_binomial(m[open_], t[open_])
        found[open_] = -torch.expm1(misses)
        return found

    def precision_sum(self, limit: Tensor) -> Tensor:
        r"""Sum of the precision at each hit among the first ``limit`` (Q,) items: (Q,) float64, expected.

        A tied positive at rank i has :math:`(h-1)(i-a-1)/(m-1)` other tied ones before it on average
        (a = ``above``), so the sum over i needs only harmonic numbers (McSherry & Najork, ECIR 2008).
        """
        if (self.tied == 1).all():
            precision = (self.hits_above + 1).double() / (self.above + 1)  # (Q, J)
            return (precision * (self.above < limit[:, None])).sum(1)
        first = self.above.minimum(limit[:, None])  # (Q, J)
        last = (self.above + self.tied).minimum(limit[:, None])
        harmonic = _prefix_sums(1 / torch.arange(1, int(limit.max()) + 1, dtype=torch.float64, device=limit.device))
        slope = (self.hits_tied - 1).double() / (self.tied - 1).clamp(min=1)
        offset = self.hits_above + 1 - slope * (self.above + 1)
        return ((offset * (harmonic[last] - harmonic[first]) + slope * (last - first)) / self.tied).sum(1)

    def discounted_gain(self, limit: Tensor) -> Tensor:
        """Sum of 1 / log2(rank + 1) over the hits among the first ``limit`` (Q,) items: (Q,), expected."""
        gains = self.ideal_gains(int(limit.max()))
        first = self.above.minimum(limit[:, None])
        last = (self.above + self.tied).minimum(limit[:, None])
        return ((gains[last] - gains[first]) / self.tied).sum(1)

    def ideal_gains(self, depth: int) -> Tensor:
        """The gain of n hits at the ranks 1..n, for n = 0..depth: (depth + 1,) float64."""
        ranks = torch.arange(1, depth + 1, dtype=torch.float64, device=self.above.device)
        return _prefix_sums(1 / torch.log2(ranks + 1))


def short(value: float) -> str:
    """An integer as it is, another number in the fewest characters.

    Example:
        >>> short(1000), short(10.0), short(0.01), short(0.001), short(0.00025), short(-0.5)
        ('1000', '10', '0.01', '1e-3', '2.5e-4', '-0.5')
    """
    if isinstance(value, int):
        return str(value)
    exact = Decimal(str(value)).normalize()
    mantissa, _, exponent = f"{exact:e}".partition("e")
    return min(f"{exact:f}", f"{mantissa}e{int(exponent)}", key=len)


def _prefix_sums(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    n, k = n.double(), k.double()
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


@dataclass(frozen=True)
class Targets:
    """What points are compared with, where that is a gallery of its own.

    Args:
        embeddings: (M, D) points.
        labels: (M,) int64.
        ids: (M,) int64; an item with the id of a point is the point itself, and no pair with it.
        point_labels: (N,) int64 of the points, numbered as ``labels``.
        point_ids: (N,) int64 of the points, numbered as ``ids``.
    """

    embeddings: Tensor
    labels: Tensor
    ids: Tensor
    point_labels: Tensor
    point_ids: Tensor


@dataclass(frozen=True)
class Points:
    """Labelled points on a manifold, for metrics that do not search.

    Args:
        embeddings: (N, D) points.
        labels: (N,) int64 in 0..C-1, every class present.
        manifold: the geometry.
        targets: what the points are compared with; None: with each other.
        found: what several metrics need and one of them has computed, by what it is.
    """

    embeddings: Tensor
    labels: Tensor
    manifold: Manifold
    targets: Targets | None = None
    found: dict[object, Any] = field(default_factory=lambda: {}, repr=False)


class MetricConfig(ComponentConfig, frozen=True):
    """Root of the metric family. A member implements `per_query` (a search metric) or `of_points`."""

    key: ClassVar[str]
    """How the metric is asked for and reported; ``@k`` stands for its cut-offs, e.g. ``recall@k``, and ``@far=x`` for
    the values of another option."""
    definition: ClassVar[str]
    """One line, printed beside the figure; R = positives of the query without itself."""
    searches: ClassVar[bool] = True
    """Whether it is made of a ranking, query by query, rather than of the points."""
    first_only: ClassVar[bool] = False
    """Whether the best positive of each query says it all, so that the others need not be ranked."""
    to_r: ClassVar[bool] = False
    """Whether it looks at the first R items."""
    smaller_is_better: ClassVar[bool] = False
    """Whether it is an error, so that it can choose no checkpoint and support no claim."""

    @classmethod
    def lacks(cls) -> list[str]:
        """Return the one of `per_query` and `of_points` that the metric needs, where it is not defined."""
        needed = "per_query" if cls.searches else "of_points"
        return [*super().lacks(), *([needed] if getattr(cls, needed) is getattr(MetricConfig, needed) else [])]

    @classmethod
    def names_known(cls) -> list[str]:
        """How members are asked for, ``@k`` standing for a cut-off."""
        return sorted(variant.key for variant in cls.variants.values())

    @classmethod
    def listed(cls) -> str | None:
        """The option whose values stand in names, one each: ``k`` of ``recall@k``, ``far`` of ``tar@far=x``."""
        option = cls.key.partition("@")[2].removesuffix("=x")
        return option if option in cls.model_fields else None

    def cutoffs(self) -> tuple[int, ...]:
        """The k's it looks at."""
        return ()

    def names(self) -> tuple[str, ...]:
        """The keys of what `per_query` or `of_points` returns, those with a cut-off in the order of `cutoffs`."""
        return self.asked()

    def asked(self) -> tuple[str, ...]:
        """The names that ask for it, as far as names can say it."""
        option = self.listed()
        if option is None:
            return (self.key,)
        return tuple(f"{self.key[:-1]}{short(value)}" for value in getattr(self, option))

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        """Fractions by name, (Q,) float64; the metric is their mean. Only of a metric that `searches`."""
        raise TypeError(f"{self.name} is not made of a ranking")

    def of_points(self, points: Points) -> dict[str, float]:
        """Figures by name.

        Raises:
            ValueError: they are not defined for such points.
        """
        raise TypeError(f"{self.name} is made of a ranking")

    def notes(self, points: Points) -> Iterable[str]:
        """What a reader of `of_points` must know."""
        return ()
