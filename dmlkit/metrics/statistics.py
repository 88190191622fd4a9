"""Statistics of metrics: t-tests over runs, bootstrap intervals and permutation tests over classes, Holm's correction.

First the comparison of runs by seeds, then the correction of p-values, and then intervals and tests over queries.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, isfinite
from typing import Literal

import torch
from torch import Tensor

MOST_RUNS = 1000  # a difference that needs more runs has no practical relevance


@dataclass(frozen=True)
class Interval:
    """Mean and its 95 % interval, which is infinite if there are too few values for one."""

    mean: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """Interval; None if it is infinite."""
        return (self.low, self.high) if isfinite(self.low) else None


@dataclass(frozen=True)
class Comparison(Interval):
    """Mean difference, second - first, between two models on the same queries or with the same seeds."""

    p_value: float  # probability of a difference at least this far from 0 if there is no true difference

    @property
    def difference(self) -> float:
        """Mean of second - first."""
        return self.mean

    def as_dict(self) -> dict[str, float | None]:
        """Return the values for JSON, with null for infinite ones."""
        values = {"difference": self.mean, "low": self.low, "high": self.high, "p_value": self.p_value}
        return {name: value if isfinite(value) else None for name, value in values.items()}


def t_interval(values: list[float]) -> Interval:
    """Compute the mean of independent runs and its 95 % interval by Student's t; it is infinite for a single run.

    Example:
        >>> interval = t_interval([0.5, 0.6, 0.7])
        >>> round(interval.mean, 4), round(interval.high - interval.mean, 4)  # 4.3027 * 0.1 / sqrt(3)
        (0.6, 0.2484)
    """
    from scipy.special import stdtrit

    runs = torch.tensor(values, dtype=torch.float64)
    mean = runs.mean().item()
    if len(values) < 2:
        return Interval(mean, -torch.inf, torch.inf)
    margin = float(stdtrit(len(values) - 1, 0.975)) * runs.std().item() / len(values) ** 0.5
    return Interval(mean, mean - margin, mean + margin)


def paired_runs(first: list[float], second: list[float]) -> Comparison:
    """Compare runs of two methods with the same seeds, in the same order: two-sided paired t-test and 95 % interval.

    For a single pair the interval is infinite and p is 1.

    Example:
        >>> result = paired_runs([0.5, 0.6, 0.7], [0.53, 0.64, 0.75])
        >>> round(result.difference, 4), round(result.low, 4), round(result.p_value, 4)
        (0.04, 0.0152, 0.0202)
    """
    from scipy.special import stdtr, stdtrit

    if len(first) != len(second):
        raise ValueError(f"expected runs of the same seeds, got {len(first)} and {len(second)}")
    interval = t_interval(_changes(first, second))
    if len(first) < 2:
        return Comparison(interval.mean, interval.low, interval.high, 1.0)
    margin = interval.high - interval.mean
    if margin == 0:  # every pair has the same difference
        return Comparison(interval.mean, interval.low, interval.high, float(interval.mean == 0))
    freedom = len(first) - 1
    statistic = abs(interval.mean) / margin * float(stdtrit(freedom, 0.975))
    return Comparison(interval.mean, interval.low, interval.high, 2 * float(stdtr(freedom, -statistic)))


def runs_to_separate(first: list[float], second: list[float]) -> int | None:
    """Estimate how many pairs of runs are needed to exclude 0 from the interval, for the same mean and deviation.

    The result is None if the means are equal, if there is a single pair, or if more than `MOST_RUNS` are needed.
    """
    import numpy as np
    from scipy.special import stdtrit

    if len(first) < 2:
        return None
    changes = torch.tensor(_changes(first, second), dtype=torch.float64)
    size, spread = abs(changes.mean().item()), changes.std().item()
    counts = np.arange(2, MOST_RUNS + 1)
    enough = counts[stdtrit(counts - 1, 0.975) * spread < size * counts**0.5]
    return int(enough[0]) if len(enough) else None


def _changes(first: list[float], second: list[float]) -> list[float]:
    return [after - before for before, after in zip(first, second, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979).

    With a threshold of 5 % for the corrected values, the probability of rejecting any true null hypothesis is at most
    5 %, for any number of hypotheses and any dependence. The k-th smallest of n values is multiplied by n - k + 1; it
    is at least the previous corrected value and at most 1.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


Unit = Literal["classes", "queries"]
"""Units of a bootstrap or test: classes with all their queries, or single queries as if they were independent."""
SEED = 0  # of all draws, so that the same values have the same interval in every command
RESAMPLES = 2000
PERMUTATIONS = 10_000
CHUNK_ENTRIES = 2**24  # random numbers in memory at once
# With fewer classes their variation cannot be estimated. In 300 simulated sets of 20 queries per class, whose shares of
# hits are drawn from Beta(4, 1.5), the 95 % intervals contained the true value in 48, 73 and 86 % for 2, 3 and 4
# classes, and in 92, 91, 95 and 96 % for 5, 6, 8 and 10. Student's t over class means would contain it in 91 % from 2
# classes on, with widths of 2.7, 0.9 and 0.6.
LEAST_CLASSES = 5
FEW_CLASSES = 10  # with 9 classes the smallest possible p-value is 2 / 2^9, and intervals are rough


def bootstrap_intervals(per_query: Mapping[str, Tensor], classes: Tensor | None) -> dict[str, Interval]:
    """Compute 95 % intervals of means over queries by the cluster bootstrap over classes (Field & Welsh 2007).

    Queries of a class share what makes it easy or hard, so classes are drawn, each with all its queries, in 2 000
    resamples: an interval shows what to expect of other classes of the same kind. It is the expanded percentile
    interval, see `tail_of`. For fewer than `LEAST_CLASSES` classes it is infinite. If all values but those of fewer
    classes are 0, or 1, the variation of the others is not known; the interval is that of `share_interval`.

    Args:
        per_query: (Q,) values in 0..1 by name, of the same queries.
        classes: (Q,) int64, classes of the queries; None draws single queries, as if they were independent.

    Example:
        >>> values, classes = torch.tensor([0.0, 1.0] * 200), torch.arange(40).repeat(10)
        >>> by_class = bootstrap_intervals({"recall@1": values}, classes)["recall@1"]
        >>> by_query = bootstrap_intervals({"recall@1": values}, None)["recall@1"]
        >>> by_class.mean, by_class.high > by_query.high  # the queries alternate, so that they vary less than classes
        (0.5, True)
    """
    if not per_query:
        return {}
    means = _bootstrap(torch.stack([column.double() for column in per_query.values()], 1), classes)
    return dict(zip(per_query, means, strict=True))


def _bootstrap(values: Tensor, classes: Tensor | None, *, shares: bool = True) -> list[Interval]:
    """Return the intervals of the means of values (Q, M); ``shares`` are in 0..1."""
    sums, sizes = _sums(values, classes)
    means, clusters = values.mean(0).tolist(), effective_number(sizes)
    if len(sizes) < LEAST_CLASSES:
        return [Interval(mean, -torch.inf, torch.inf) for mean in means]
    draws = torch.cat([counts @ sums / (counts @ sizes)[:, None] for counts in _resamples(len(sizes))])
    tail = tail_of(clusters)
    ends = draws.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0).T.tolist()
    if shares:
        varied = torch.minimum((sums > 0).sum(0), (sums < sizes[:, None]).sum(0)).tolist()
        for column in (column for column, count in enumerate(varied) if count < LEAST_CLASSES):
            ends[column] = share_interval(means[column], float(draws[:, column].var()), clusters, len(values))
    return [Interval(mean, *pair) for mean, pair in zip(means, ends, strict=True)]


def share_interval(share: float, variance: float, clusters: float, answers: int) -> tuple[float, float]:
    """Compute Wilson's interval of a share for as many independent answers as have its variance (Korn & Graubard 1998).

    Args:
        share: in 0..1; if it is 0 or 1 its variance says nothing, and each cluster counts as one answer.
        variance: variance of the share over draws of clusters.
        clusters: effective number of clusters of answers, more than 1.

    Example:
        >>> low, high = share_interval(1.0, 0.0, 1e6, 20)  # z^2 = 3.84
        >>> round(low, 4), high
        (0.8389, 1.0)
    """
    from scipy.special import ndtri

    size = share * (1 - share) / variance if 0 < share < 1 and variance > 0 else clusters
    squared = float(ndtri(tail_of(clusters))) ** 2 / min(max(size, 1.0), float(answers))
    half = hypot((squared * share * (1 - share)) ** 0.5, squared / 2)
    low, below = ((part + squared / 2 - half) / (1 + squared) for part in (share, 1 - share))
    return low, 1 - below


def paired_comparison(first: Tensor, second: Tensor, classes: Tensor | None) -> Comparison:
    """Compare two models on the same queries.

    The two-sided p-value is from 10 000 random exchanges of the two models within each class (a paired permutation
    test; Good 2000): if the models do not differ, either is better in a class with probability 1/2. It is never below
    1 / 10 001, nor much below 2 / 2^C for C classes. The interval is that of `bootstrap_intervals`.

    Args:
        first, second: (Q,) values of the same queries, in the same order.
        classes: (Q,) int64, classes of the queries; None exchanges and draws single queries, as if independent.

    Example:
        >>> first, second = torch.zeros(100), torch.tensor([1.0, 0.0] * 50)
        >>> [round(paired_comparison(first, second, classes).p_value, 2) for classes in (None, torch.arange(100) % 4)]
        [0.0, 0.5]
    """
    same = len({first.shape, second.shape, *([classes.shape] if classes is not None else [])}) == 1
    if not same or first.ndim != 1 or len(first) == 0:
        raise ValueError(f"expected values of the same queries, got {tuple(first.shape)} and {tuple(second.shape)}")
    change = second.double() - first.double()
    (interval,) = _bootstrap(change[:, None], classes, shares=False)
    sums, sizes = _sums(change[:, None], classes)
    moved = sums[:, 0][sums[:, 0] != 0]
    size = moved.abs().sum().item() if len(moved) else 0.0
    observed = abs(moved.sum().item()) - 1e-12 * size  # sums that differ by rounding are equal
    extreme = sum(int((signs @ moved).abs().ge(observed).sum()) for signs in _signs(len(moved)))
    p_value = (extreme + 1) / (PERMUTATIONS + 1) if len(moved) and len(sizes) > 1 else 1.0
    return Comparison(interval.mean, interval.low, interval.high, p_value)


def paired_differences(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], classes: Tensor | None
) -> dict[str, Comparison]:
    """Compare a second model with a first by `paired_comparison`, for each metric that both have."""
    return {name: paired_comparison(first[name], second[name], classes) for name in first if name in second}


def part_comparison(values: Tensor, part: Tensor, classes: Tensor) -> Comparison:
    """Compare the queries of a part, e.g. those of one camera, with all others, by the cluster bootstrap over classes.

    Resamples draw classes with all their queries, of the part and others. The interval is that of
    `bootstrap_intervals`; the p-value is that of Student's t for the difference divided by its standard error over the
    resamples (Cameron, Gelbach & Miller 2008), with as many classes as the side with the lower `effective_number`. If
    a side has fewer than `LEAST_CLASSES` classes, the interval is infinite and p is 1. The part (Q,) is bool.
    """
    from scipy.special import stdtr

    in_part, value = part.double(), values.double()
    sums, _ = _sums(torch.stack([value * in_part, value * (1 - in_part), in_part, 1 - in_part], 1), classes)
    sizes = sums[:, 2], sums[:, 3]
    difference = float(sums[:, 0].sum() / sizes[0].sum() - sums[:, 1].sum() / sizes[1].sum())
    if min(int((side > 0).sum()) for side in sizes) < LEAST_CLASSES:
        return Comparison(difference, -torch.inf, torch.inf, 1.0)
    totals = torch.cat([counts @ sums for counts in _resamples(len(sums))])
    totals = totals[(totals[:, 2:] > 0).all(1)]  # both sides were drawn
    draws = totals[:, 0] / totals[:, 2] - totals[:, 1] / totals[:, 3]
    count = min(effective_number(side) for side in sizes)
    tail = tail_of(count)
    low, high = draws.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    error = float(draws.std()) * (count / (count - 1)) ** 0.5
    p_value = 2 * float(stdtr(count - 1, -abs(difference) / error)) if error else float(difference == 0)
    return Comparison(difference, low, high, p_value)


def ratio_interval(parts: Tensor, wholes: Tensor, classes: Tensor) -> Interval:
    """Compute a ratio of sums over queries (Q,), and its 95 % interval as in `bootstrap_intervals`."""
    sums, sizes = _sums(torch.stack([parts, wholes], 1).double(), classes)
    ratio = float(sums[:, 0].sum() / sums[:, 1].sum())
    if len(sizes) < LEAST_CLASSES:
        return Interval(ratio, -torch.inf, torch.inf)
    totals = torch.cat([counts @ sums for counts in _resamples(len(sums))])
    totals, tail = totals[totals[:, 1] > 0], tail_of(effective_number(sizes))
    low, high = (totals[:, 0] / totals[:, 1]).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(ratio, low, high)


def effective_number(weights: Tensor) -> float:
    """Compute the effective number of weights, at least 1 (Kish 1965)."""
    return float(weights.sum().square() / weights.square().sum())


def tail_of(count: float) -> float:
    """Compute the share, in (0, 0.025), that a 95 % percentile interval over n > 1 units excludes on either side.

    A bootstrap interval is too narrow by the factor sqrt((n - 1) / n), and by the ratio of the quantiles of the normal
    distribution and Student's t with n - 1 degrees of freedom. The expanded interval corrects both (Hesterberg 2015,
    section 4.2.2).
    """
    from scipy.special import ndtr, stdtrit

    return float(ndtr(-((count / (count - 1)) ** 0.5) * stdtrit(count - 1, 0.975)))


def few_classes_note(classes: int) -> str | None:
    """Return a note on the limits of intervals over few classes; None for `FEW_CLASSES` or more.

    Example:
        >>> few_classes_note(6), few_classes_note(10)
        ('intervals over 6 classes cover about 92 % instead of 95 %; p-values are never much below 0.0312', None)
        >>> few_classes_note(4)
        'no intervals over 4 classes: at least 5 are needed; p-values are never much below 0.125'
        >>> few_classes_note(1)
        'no intervals over a single class: at least 5 are needed; p is 1'
    """
    if classes >= FEW_CLASSES:
        return None
    if classes < 2:
        return f"no intervals over a single class: at least {LEAST_CLASSES} are needed; p is 1"
    p_limit = f"p-values are never much below {2 / 2**classes:.3g}"
    if classes < LEAST_CLASSES:
        return f"no intervals over {classes} classes: at least {LEAST_CLASSES} are needed; {p_limit}"
    return f"intervals over {classes} classes cover about 92 % instead of 95 %; {p_limit}"


def _sums(values: Tensor, classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum values (Q, M) over each class or query, (G, M), and count its queries, (G,).

    Classes are in the order of their first queries, so that the draws do not depend on the numbering of classes.
    """
    if classes is None:
        return values, torch.ones(len(values), dtype=values.dtype)
    index, sizes = classes.unique(return_inverse=True, return_counts=True)[1:]
    firsts = torch.full_like(sizes, len(values)).scatter_reduce_(0, index, torch.arange(len(values)), "amin")
    order = firsts.argsort()
    return values.new_zeros(len(sizes), values.shape[1]).index_add_(0, index, values)[order], sizes.double()[order]


def _resamples(size: int) -> Iterator[Tensor]:
    """Draw `RESAMPLES` resamples of ``size`` units; yield in chunks (n, size) float64 how often each unit is drawn."""
    generator = torch.Generator().manual_seed(SEED)
    for count in _chunks(RESAMPLES, size):
        draws = torch.randint(size, (count, size), generator=generator)
        offset = torch.arange(count)[:, None] * size
        yield (draws + offset).flatten().bincount(minlength=count * size).reshape(count, size).double()


def _signs(size: int) -> Iterator[Tensor]:
    """Draw random signs for `PERMUTATIONS` exchanges; yield them in chunks (n, size) float64."""
    generator = torch.Generator().manual_seed(SEED)
    for count in _chunks(PERMUTATIONS, size) if size else ():
        yield torch.randint(2, (count, size), generator=generator, dtype=torch.int8).double() * 2 - 1


def _chunks(total: int, size: int) -> Iterator[int]:
    step = max(1, CHUNK_ENTRIES // size)
    for start in range(0, total, step):
        yield min(step, total - start)
