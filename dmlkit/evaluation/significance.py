"""How sure a figure is: intervals, comparisons of repeated runs, and p-values that are corrected for their number."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite

import torch

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
