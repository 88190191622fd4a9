"""Statistics: bootstrap intervals over classes, paired tests, correction for many comparisons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

MOST_RUNS = 1000  # a difference that needs more is none for practice


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, if it ends."""
        return (self.low, self.high) if isfinite(self.low) else None


@dataclass(frozen=True)
class Comparison:
    """How a second model differs from a first, on the same queries or with the same seeds.

    Args:
        difference: mean of second - first.
        low, high: its 95 % interval; endless where nothing tells of one.
        p_value: how probable a difference this far from 0 is where there is none.
    """

    difference: float
    low: float
    high: float
    p_value: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, if it ends."""
        return (self.low, self.high) if isfinite(self.low) else None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no endless interval: null."""
        return {name: value if isfinite(value) else None for name, value in asdict(self).items()}


def t_interval(values: list[float]) -> Interval:
    """The mean of independent runs and its 95 % interval by Student's t; infinite for a single run.

    Example:
        >>> interval = t_interval([0.5, 0.6, 0.7])
        >>> round(interval.mean, 4), round(interval.high - interval.mean, 4)  # 4.3027 * 0.1 / sqrt(3)
        (0.6, 0.2484)
    """
    from scipy.stats import t

    runs = torch.tensor(values, dtype=torch.float64)
    mean = runs.mean().item()
    if len(values) < 2:
        return Interval(mean, -torch.inf, torch.inf)
    margin = float(t.ppf(0.975, len(values) - 1)) * runs.std().item() / len(values) ** 0.5
    return Interval(mean, mean - margin, mean + margin)


def paired_runs(first: list[float], second: list[float]) -> Comparison:
    """Compare runs of two methods seed by seed: Student's paired t-test, two-sided, and its 95 % interval.

    A single pair says nothing: the interval is infinite and p is 1.

    Args:
        first, second: one figure a run, of the same seeds in the same order.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> result = paired_runs([0.5, 0.6, 0.7], [0.53, 0.64, 0.75])
        >>> round(result.difference, 4), round(result.low, 4), round(result.p_value, 4)
        (0.04, 0.0152, 0.0202)
    """
    from scipy.stats import t

    if len(first) != len(second):
        raise ValueError(f"expected runs of the same seeds, got {len(first)} and {len(second)}")
    interval = t_interval(_changes(first, second))
    if len(first) < 2:
        return Comparison(interval.mean, interval.low, interval.high, 1.0)
    margin = interval.high - interval.mean
    if margin == 0:  # every pair differs by the same
        return Comparison(interval.mean, interval.low, interval.high, float(interval.mean == 0))
    freedom = len(first) - 1
    statistic = abs(interval.mean) / margin * float(t.ppf(0.975, freedom))
    return Comparison(interval.mean, interval.low, interval.high, 2 * float(t.sf(statistic, freedom)))


def runs_to_separate(first: list[float], second: list[float]) -> int | None:
    """About how many pairs of runs would keep 0 out of the paired interval if mean and spread stay what they are.

    None where they differ by nothing, where a single pair tells no spread, or where `MOST_RUNS` would not do.

    Example:
        >>> runs_to_separate([0.5, 0.6, 0.7], [0.52, 0.60, 0.71])  # 0.01 +- 0.01
        7
    """
    import numpy as np
    from scipy.stats import t

    if len(first) < 2:
        return None
    changes = torch.tensor(_changes(first, second), dtype=torch.float64)
    size, spread = abs(changes.mean().item()), changes.std().item()
    counts = np.arange(2, MOST_RUNS + 1)
    enough = counts[t.ppf(0.975, counts - 1) * spread < size * counts**0.5]
    return int(enough[0]) if len(enough) else None


def _changes(first: list[float], second: list[float]) -> list[float]:
    return [after - before for before, after in zip(first, second, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979): of true nulls, however many and however dependent, one at 5 %
    or below is rejected at most once in 20 times.

    The k-th smallest of n is multiplied by n - k + 1, is at least what the smaller ones became, and at most 1.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = least
    return corrected


Unit = Literal["classes", "queries"]
"""What is drawn: whole classes, or queries as if they were independent of each other."""
RESAMPLES = 2000
PERMUTATIONS = 10_000
CHUNK_ENTRIES = 2**24  # random numbers held at once
# Fewer tell nothing of how classes vary: of 300 simulated sets of 20 queries a class, whose shares of hits are drawn
# from Beta(4, 1.5), 95 % intervals held the truth in 48, 73 and 86 % for 2, 3 and 4 classes, and in 92, 91, 95 and 96 %
# for 5, 6, 8 and 10. Student's t over class means would hold it in 91 % from 2 on, by widths of 2.7, 0.9 and 0.6.
LEAST_CLASSES = 5
FEW_CLASSES = 10  # fewer tell little of how classes vary: 2 of 2^9 exchanges are as extreme as all of them can be


def bootstrap_intervals(
    per_query: Mapping[str, Tensor], classes: Tensor | None, *, seed: int = 0
) -> dict[str, Interval]:
    """95 % intervals of means over queries, from 2 000 resamples of classes (cluster bootstrap; Field & Welsh 2007).

    Queries of a class share what makes it easy or hard, so classes are drawn, each with all its queries: an interval
    says what other classes of the same kind would show. It is the expanded percentile interval, see `tail_of`. Fewer
    than `LEAST_CLASSES` do not tell how classes vary: their interval is endless.

    Args:
        per_query: (Q,) values by name, of the same queries.
        classes: (Q,) int64, of the queries; None draws the queries themselves, as if independent.
        seed: of the resampling.

    Example:
        >>> values, classes = torch.tensor([0.0, 1.0] * 200), torch.arange(40).repeat(10)
        >>> by_class = bootstrap_intervals({"recall@1": values}, classes)["recall@1"]
        >>> by_query = bootstrap_intervals({"recall@1": values}, None)["recall@1"]
        >>> by_class.mean, by_class.high > by_query.high  # every other class is found, the others are not
        (0.5, True)
    """
    if not per_query:
        return {}
    values = torch.stack([column.double() for column in per_query.values()], 1)  # (Q, M)
    sums, sizes = _sums(values, classes)
    if len(sizes) >= LEAST_CLASSES:
        draws = [counts @ sums / (counts @ sizes)[:, None] for counts in _resamples(len(sizes), seed)]
        tail = tail_of(effective_number(sizes))
        low, high = torch.cat(draws).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    else:
        low, high = (torch.full_like(values[0], end) for end in (-torch.inf, torch.inf))
    rows = zip(values.mean(0).tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Interval(*row) for name, row in zip(per_query, rows, strict=True)}


def paired_comparison(first: Tensor, second: Tensor, classes: Tensor | None, *, seed: int = 0) -> Comparison:
    """Compare two models on the same queries.

    The p-value is two-sided, from 10 000 random exchanges of the two models within each class (a paired permutation
    test; Good 2000): where they are alike, which of them did better in a class is a coin's toss. It is never below
    1 / 10 001, nor much below 2 / 2^C for C classes. The interval is that of `bootstrap_intervals`.

    Args:
        first, second: (Q,) values of the same queries, in the same order.
        classes: (Q,) int64, of the queries; None exchanges and draws single queries, as if independent.
        seed: of the resampling.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> first, second = torch.zeros(100), torch.tensor([1.0, 0.0] * 50)
        >>> [round(paired_comparison(first, second, classes).p_value, 2) for classes in (None, torch.arange(100) % 4)]
        [0.0, 0.5]
    """
    same = len({first.shape, second.shape, *([classes.shape] if classes is not None else [])}) == 1
    if not same or first.ndim != 1 or len(first) == 0:
        raise ValueError(f"expected values of the same queries, got {tuple(first.shape)} and {tuple(second.shape)}")
    change = second.double() - first.double()
    interval = bootstrap_intervals({"difference": change}, classes, seed=seed)["difference"]
    sums, sizes = _sums(change[:, None], classes)
    moved = sums[:, 0][sums[:, 0] != 0]
    size = moved.abs().sum().item() if len(moved) else 0.0
    observed = abs(moved.sum().item()) - 1e-12 * size  # sums that differ by rounding are equal
    extreme = sum(int((signs @ moved).abs().ge(observed).sum()) for signs in _signs(len(moved), seed))
    p_value = (extreme + 1) / (PERMUTATIONS + 1) if len(moved) and len(sizes) > 1 else 1.0
    return Comparison(interval.mean, interval.low, interval.high, p_value)


def paired_differences(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], classes: Tensor | None
) -> dict[str, Comparison]:
    """How a second model differs from a first on the same queries, for each metric that both have.

    Args:
        first, second: (Q,) values by metric, of the same queries in the same order.
        classes: (Q,) int64, as in `paired_comparison`.

    Example:
        >>> paired_differences({"map@r": torch.zeros(9)}, {"map@r": torch.ones(9), "mrr": torch.ones(9)}, None).keys()
        dict_keys(['map@r'])
    """
    return {name: paired_comparison(first[name], second[name], classes) for name in first if name in second}


def effective_number(weights: Tensor) -> float:
    """How many of equal weight vary as much as these, at least 1 (Kish 1965).

    Example:
        >>> effective_number(torch.tensor([5.0, 5.0, 5.0])), effective_number(torch.tensor([98.0, 1.0, 1.0])) < 1.05
        (3.0, True)
    """
    return float(weights.sum().square() / weights.square().sum())


def tail_of(count: float) -> float:
    """The share, in (0, 0.025), that a percentile interval of 95 % leaves out on either side, for more than 1 unit.

    That of a bootstrap over n is too narrow by sqrt((n - 1) / n), and by what a normal distribution has less than
    Student's t of n - 1 degrees of freedom; the expanded interval makes up for both (Hesterberg 2015, section 4.2.2).

    Example:
        >>> round(tail_of(1e6), 4), round(tail_of(7.0), 4)
        (0.025, 0.0041)
    """
    from scipy.special import ndtr, stdtrit

    return float(ndtr(-((count / (count - 1)) ** 0.5) * stdtrit(count - 1, 0.975)))


def told_few(classes: int) -> str | None:
    """What a reader must know of intervals over few classes; nothing of `FEW_CLASSES` or more.

    Example:
        >>> told_few(6), told_few(10)
        ('intervals over 6 classes are rough, about 92 % instead of 95; no p-value of theirs can be below 0.0312', None)
        >>> told_few(4)
        'no intervals over 4 classes: at least 5 tell how classes vary; no p-value of theirs can be below 0.125'
        >>> told_few(1)
        'no intervals over a single class: at least 5 tell how classes vary; p is 1'
    """
    if classes >= FEW_CLASSES:
        return None
    if classes < 2:
        return f"no intervals over a single class: at least {LEAST_CLASSES} tell how classes vary; p is 1"
    least = f"no p-value of theirs can be below {2 / 2**classes:.3g}"
    if classes < LEAST_CLASSES:
        return f"no intervals over {classes} classes: at least {LEAST_CLASSES} tell how classes vary; {least}"
    return f"intervals over {classes} classes are rough, about 92 % instead of 95; {least}"


def _sums(values: Tensor, classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums (G, M) of values (Q, M) over each class or query, and how many queries it has, (G,).

    Classes are in the order of their first queries: what is drawn does not depend on how a dataset numbers them.
    """
    if classes is None:
        return values, torch.ones(len(values), dtype=values.dtype)
    index, sizes = classes.unique(return_inverse=True, return_counts=True)[1:]
    firsts = torch.full_like(sizes, len(values)).scatter_reduce_(0, index, torch.arange(len(values)), "amin")
    order = firsts.argsort()
    return values.new_zeros(len(sizes), values.shape[1]).index_add_(0, index, values)[order], sizes.double()[order]


def _resamples(size: int, seed: int) -> Iterator[Tensor]:
    """How often each of ``size`` units is drawn, for `RESAMPLES` resamples in chunks: (n, size) float64."""
    generator = torch.Generator().manual_seed(seed)
    for count in _chunks(RESAMPLES, size):
        draws = torch.randint(size, (count, size), generator=generator)
        offset = torch.arange(count)[:, None] * size
        yield (draws + offset).flatten().bincount(minlength=count * size).reshape(count, size).double()


def _signs(size: int, seed: int) -> Iterator[Tensor]:
    """Random signs for `PERMUTATIONS` exchanges in chunks: (n, size) float64."""
    generator = torch.Generator().manual_seed(seed)
    for count in _chunks(PERMUTATIONS, size) if size else ():
        yield torch.randint(2, (count, size), generator=generator, dtype=torch.int8).double() * 2 - 1


def _chunks(total: int, size: int) -> Iterator[int]:
    step = max(1, CHUNK_ENTRIES // size)
    for start in range(0, total, step):
        yield min(step, total - start)
