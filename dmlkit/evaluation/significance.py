"""How sure a figure is: intervals and paired comparisons, over the queries of two models or over repeated runs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

RESAMPLES = 2000
PERMUTATIONS = 10_000
MOST_RUNS = 1000  # a difference that needs more is none for practice
CHUNK_ENTRIES = 2**24  # random numbers held at once


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """How a second model differs from a first, on the same queries or with the same seeds.

    Args:
        difference: mean of second - first.
        low, high: its 95 % interval.
        p_value: how probable a difference this far from 0 is where there is none.
    """

    difference: float
    low: float
    high: float
    p_value: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def bootstrap_intervals(per_query: Mapping[str, Tensor], *, seed: int = 0) -> dict[str, Interval]:
    """95 % intervals of means over queries: the 2.5 and 97.5 percentiles of 2 000 resamples (Efron 1979).

    Queries are drawn as if independent of each other; the test classes and the trained weights are taken as given.

    Args:
        per_query: (Q,) values by name, of the same queries.
        seed: of the resampling.

    Example:
        >>> bootstrap_intervals({"recall@1": torch.tensor([0.0, 1.0] * 200)})["recall@1"].mean
        0.5
    """
    values = torch.stack([column.double() for column in per_query.values()], 1)  # (Q, M)
    means = torch.cat([counts @ values / len(values) for counts in _resamples(len(values), seed)])
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    rows = zip(values.mean(0).tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Interval(*row) for name, row in zip(per_query, rows, strict=True)}


def paired_comparison(first: Tensor, second: Tensor, *, seed: int = 0) -> Comparison:
    """Compare two models query by query.

    The p-value is two-sided, from 10 000 random exchanges of the two values of each query (a paired permutation
    test; Good 2000); it is never below 1 / 10 001. The interval is a bootstrap over queries.

    Args:
        first, second: (Q,) values of the same queries, in the same order.
        seed: of the resampling.

    Raises:
        ValueError: the lengths differ.

    Example:
        >>> result = paired_comparison(torch.zeros(100), torch.tensor([1.0, 0.0] * 50))
        >>> result.difference, round(result.p_value, 4)
        (0.5, 0.0001)
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise ValueError(f"expected values of the same queries, got {tuple(first.shape)} and {tuple(second.shape)}")
    change = second.double() - first.double()
    interval = bootstrap_intervals({"difference": change}, seed=seed)["difference"]
    moved = change[change != 0]
    size = moved.abs().sum().item() if len(moved) else 0.0
    observed = abs(moved.sum().item()) - 1e-12 * size  # sums that differ by rounding are equal
    extreme = sum(int((signs @ moved).abs().ge(observed).sum()) for signs in _signs(len(moved), seed))
    p_value = (extreme + 1) / (PERMUTATIONS + 1) if len(moved) else 1.0
    return Comparison(interval.mean, interval.low, interval.high, p_value)


def paired_differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Comparison]:
    """How a second model differs from a first on the same queries, for each metric that both have.

    Args:
        first, second: (Q,) values by metric, of the same queries in the same order.

    Example:
        >>> paired_differences({"map@r": torch.zeros(9)}, {"map@r": torch.ones(9), "mrr": torch.ones(9)}).keys()
        dict_keys(['map@r'])
    """
    return {name: paired_comparison(first[name], second[name]) for name in first if name in second}


def _resamples(size: int, seed: int) -> Iterator[Tensor]:
    """How often each of ``size`` items is drawn, for `RESAMPLES` resamples in chunks: (n, size) float64."""
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
    from scipy.stats import t

    if len(first) < 2:
        return None
    changes = torch.tensor(_changes(first, second), dtype=torch.float64)
    size, spread = abs(changes.mean().item()), changes.std().item()
    counts = range(2, MOST_RUNS + 1)
    return next((n for n in counts if float(t.ppf(0.975, n - 1)) * spread < size * n**0.5), None)


def _changes(first: list[float], second: list[float]) -> list[float]:
    return [after - before for before, after in zip(first, second, strict=True)]
