"""The metric interface: rankings and points, from which metrics are computed, and the base class of metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any]
else:
    Array: TypeAlias = Any
Labels: TypeAlias = Array | Mapping[str, Array]
"""One label per embedding, or those of each level of a hierarchy by its name, coarsest first; the last are the classes
themselves. Or (N, L) bool: which of L labels each embedding has."""
LEVEL_NAME = r"^[a-z][a-z0-9_]*$"


@dataclass(frozen=True)
class Ranking:
    """Ranks of the positives of Q queries, best first.

    The positives of a query are the items of its class, without the query itself. Items with the same score share
    their ranks: positive j has any rank in ``above + 1 .. above + tied`` with equal probability, and every metric is
    the expected value over the orders of the tied items, except ``map@k:oml``, the ratio of two. With a hierarchy, the
    positives are the items of its class at the coarsest level.
    """

    above: Tensor
    """(Q, J) int64, ascending; number of items with a higher score, ``gallery`` without a positive j that was found."""
    tied: Tensor  # (Q, J) int64 >= 1; m, number of items with the same score, including positive j
    hits_above: Tensor  # (Q, J) int64; H, number of positives among the items above
    hits_tied: Tensor  # (Q, J) int64 >= 1; h, number of positives among the tied items
    positives: Tensor  # (Q,) int64 >= 1; R, number of positives
    gallery: Tensor  # (Q,) int64; number of ranked items
    grades: Tensor | None = None
    """(Q, J) int64 in 0..L; number of levels at which positive j has the class of its query; None without levels."""
    levels: int = 1  # L, number of levels; 1 without a hierarchy
    single_shot: Tensor | None = None
    """(Q, K) float64, probability of a hit among the 1..K nearest if one item of each class is drawn, where needed."""

    def at_level(self, level: int) -> "Ranking":
        """Return the ranking whose positives have the class of their query at ``level``, 1 for the coarsest."""
        if self.grades is None:
            return self
        is_positive = self.grades >= level
        order = (~is_positive).sort(dim=1, stable=True).indices[:, : max(1, int(is_positive.sum(1).max()))]
        exists = is_positive.gather(1, order)
        above = self.above.gather(1, order).where(exists, self.gallery[:, None])
        column = torch.arange(above.shape[1], device=above.device).expand_as(above)
        starts = torch.ones_like(exists)
        starts[:, 1:] = above[:, 1:] != above[:, :-1]  # positives of the same score have the same items above them
        first = column.where(starts, 0).cummax(1).values
        group = starts.cumsum(1) - 1
        sizes = torch.zeros_like(above).scatter_add_(1, group, torch.ones_like(above))
        return Ranking(
            above=above,
            tied=self.tied.gather(1, order).where(exists, 1),
            hits_above=first,
            hits_tied=sizes.gather(1, group),
            positives=is_positive.sum(1),
            gallery=self.gallery,
            single_shot=self.single_shot,
        )

    def hits_within(self, limit: Tensor) -> Tensor:
        """Compute the expected number of hits among the first ``limit`` (Q,) items, (Q,) float64."""
        return ((limit[:, None] - self.above).double() / self.tied).clamp(0, 1).sum(1)

    def any_within(self, limit: Tensor) -> Tensor:
        r"""Compute the probability of a hit among the first ``limit`` (Q,) items, (Q,) float64.

        If t of the m best tied items are within the limit, it is :math:`1 - \binom{m-h}{t} / \binom{m}{t}`.
        """
        m, h = self.tied[:, 0], self.hits_tied[:, 0]
        t = (limit - self.above[:, 0]).clamp(min=0).minimum(m)
        probability = (t > m - h).double()
        open_ = (t > 0) & (t <= m - h)
        misses = log_binomial((m - h)[open_], t[open_]) - log_binomial(m[open_], t[open_])
        probability[open_] = -torch.expm1(misses)
        return probability

    def precision_sum(self, limit: Tensor) -> Tensor:
        r"""Compute the expected sum of the precisions at the hits among the first ``limit`` (Q,) items, (Q,) float64.

        A tied positive at rank i has :math:`(h-1)(i-a-1)/(m-1)` other tied positives before it on average
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

    def discounts(self, limit: Tensor) -> Tensor:
        """Compute the expected 1 / log2(rank + 1) of each positive among the first ``limit`` (Q,) items, else 0: (Q, J)
        float64."""
        gains = self.ideal_gains(int(limit.max()))
        first = self.above.minimum(limit[:, None])
        last = (self.above + self.tied).minimum(limit[:, None])
        return (gains[last] - gains[first]) / self.tied

    def harmonic_sums(self) -> Tensor:
        """Compute the sum of 1 / rank over the ranks that each positive may have, (Q, J) float64."""
        last = (self.above + self.tied).minimum(self.gallery[:, None])
        ranks = torch.arange(1, int(self.gallery.max()) + 1, dtype=torch.float64, device=last.device)
        harmonic = _prefix_sums(1 / ranks)
        return harmonic[last] - harmonic[self.above]

    def ideal_gains(self, depth: int) -> Tensor:
        """Compute the gain of n hits at the ranks 1..n, for n = 0..depth, (depth + 1,) float64."""
        ranks = torch.arange(1, depth + 1, dtype=torch.float64, device=self.above.device)
        return _prefix_sums(1 / torch.log2(ranks + 1))


def _prefix_sums(values: Tensor) -> Tensor:
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def log_binomial(n: Tensor, k: Tensor) -> Tensor:
    """Return the logarithm of n over k, elementwise in float64."""
    n, k = n.double(), k.double()
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


@dataclass(frozen=True)
class Labeled:
    """Embeddings with their labels, as queries or as a gallery of `score_retrieval`."""

    embeddings: Array  # (N, D) points, array or tensor
    labels: Labels  # (N,) integers or strings, a mapping from each level to them, or (N, L) bool
    ids: Array | None = None
    """(N,) integers or strings, of both sides or none; an item is excluded for the queries that have its id."""


@dataclass(frozen=True)
class Targets:
    """Separate gallery that points are compared with."""

    embeddings: Tensor  # (M, D) points
    labels: Tensor  # (M,) int64
    ids: Tensor  # (M,) int64; an item with the id of a point is the point itself, and makes no pair with it
    point_labels: Tensor  # (N,) int64, labels of the points, with the same numbering as ``labels``
    point_ids: Tensor  # (N,) int64, ids of the points, with the same numbering as ``ids``


@dataclass(frozen=True)
class Points:
    """Labeled points on a manifold, for metrics that do not search."""

    embeddings: Tensor  # (N, D) points
    labels: Tensor  # (N,) int64 in 0..C-1; every class is present
    manifold: Manifold
    targets: Targets | None = None  # gallery that the points are compared with; None compares them with each other
    groups: Tensor | None = None  # (N,) int64, without targets: points of one group form no pair
    shared: dict[object, Any] = field(default_factory=lambda: {}, repr=False)  # results that several metrics share


class MetricConfig(ComponentConfig, frozen=True):
    """Base class of metrics. A search metric implements `per_query`; any other metric implements `of_points`."""

    key: ClassVar[str]
    """Name by which the metric is requested and reported; ``@k`` stands for its cut-offs, e.g. ``recall@k``, and
    ``@far=x`` for the values of another option. Default: ``name``."""
    definition: ClassVar[str]
    """Definition in one line, printed next to the value; R = positives of the query without itself."""
    searches: ClassVar[bool] = True
    """Whether the metric is computed per query from a ranking, and not from the points."""
    first_only: ClassVar[bool] = False
    """Whether the metric depends only on the best positive of each query, so that the others need not be ranked."""
    to_r: ClassVar[bool] = False
    """Whether the metric depends on the first R items."""
    to_end: ClassVar[bool] = False
    """Whether the metric depends on all positives, also on the last ones."""
    is_graded: ClassVar[bool] = False
    """Whether the metric depends on all levels of a hierarchy; without one it has a single level."""
    smaller_is_better: ClassVar[bool] = False
    """Whether the metric is an error rate. Such a metric cannot choose a checkpoint or support a claim of a study."""

    level: Annotated[str, Field(pattern=LEVEL_NAME)] | None = Field(default=None, repr=False)
    """Level of the dataset's hierarchy whose classes count; null for the classes themselves."""

    @model_validator(mode="after")
    def _has_one_level(self) -> "MetricConfig":
        if self.is_graded and self.level is not None:
            raise ValueError(f"{self.name} uses all levels; remove level {self.level}")
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(abstract, **kwargs)
        if not hasattr(cls, "key") and not abstract:
            cls.key = cls.model_fields["name"].default

    @property
    def uses_levels(self) -> bool:
        """Whether the metric needs the levels of a hierarchy."""
        return self.is_graded or self.level is not None

    @classmethod
    def lacks(cls) -> list[str]:
        """Return which of `per_query` and `of_points` the metric needs but does not define."""
        needed = "per_query" if cls.searches else "of_points"
        return [*super().lacks(), *([needed] if getattr(cls, needed) is getattr(MetricConfig, needed) else [])]

    @classmethod
    def names_known(cls) -> list[str]:
        """Return the names by which metrics are requested, with ``@k`` for a cut-off."""
        return sorted(variant.key for variant in cls.variants.values())

    @classmethod
    def compat_values(cls) -> tuple[str, ...]:
        """Return the libraries whose variant of the metric is requested with a suffix, as in ``map@10:oml``."""
        field = cls.model_fields.get("compat")
        return () if field is None else tuple(name for part in get_args(field.annotation) for name in get_args(part))

    @classmethod
    def option_in_name(cls) -> str | None:
        """Return the option whose values are part of names: ``k`` of ``recall@k``, ``far`` of ``tar@far=x``."""
        option = cls.key.partition("@")[2].removesuffix("=x")
        return option if option in cls.model_fields else None

    def cutoffs(self) -> tuple[int, ...]:
        """Return the cut-offs k of the metric."""
        return ()

    def names(self) -> tuple[str, ...]:
        """Return the names under which the values are reported, in the order of `cutoffs`, e.g. ``map@5:oml:genus``."""
        suffix = "".join(f":{part}" for part in (getattr(self, "compat", None), self.level) if part)
        return tuple(name + suffix for name in self.figures())

    def figures(self) -> tuple[str, ...]:
        """Return the names of the values without library and level: the name of the request, unless it has several."""
        return self.request_names()

    def request_names(self) -> tuple[str, ...]:
        """Return the names by which the metric is requested; they do not include all options."""
        option = self.option_in_name()
        if option is None:
            return (self.key,)
        return tuple(f"{self.key[:-1]}{_short_number(value)}" for value in getattr(self, option))

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of `per_query` or `of_points` under the names of `names`, which add the level."""
        return dict(zip(self.names(), values.values(), strict=True))

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        """Compute fractions by name, (Q,) float64, in the order of `names`; the metric is their mean. Only metrics that
        `searches` have them."""
        raise TypeError(f"{self.name} is computed from points, not from a ranking; use of_points")

    def of_points(self, points: Points) -> dict[str, float]:
        """Compute values by name, in the order of `names`.

        Raises:
            ValueError: the metric is not defined for these points.
        """
        raise TypeError(f"{self.name} is computed from a ranking, not from points; use per_query")

    def notes(self, points: Points) -> Iterable[str]:
        """Return notes for the reader of the values of `of_points`."""
        return ()


def _short_number(value: float) -> str:
    """Format a number in the fewest characters; integers are never written with an exponent.

    Example:
        >>> [_short_number(value) for value in (1000, 10.0, 0.01, 0.001, 0.00025, -0.5)]
        ['1000', '10', '0.01', '1e-3', '2.5e-4', '-0.5']
    """
    if isinstance(value, int):
        return str(value)
    exact = Decimal(str(value)).normalize()
    mantissa, _, exponent = f"{exact:e}".partition("e")
    return min(f"{exact:f}", f"{mantissa}e{int(exponent)}", key=len)
