"""Looking at a difference again and again as seeds are added, without calling chance a difference more often."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dmlkit.evaluation.statistics import Comparison, paired_runs
from dmlkit.run_folder.documents import Metrics

LEVEL = 0.05  # of verdicts, over all looks at a statement
REPETITIONS = 100_000  # of the simulation: the bound is known to 1.5 %
SAME = 1e-6  # figures that differ by less are equal: more seeds would show nothing


def paired_figures(
    first: Mapping[int, Metrics], second: Mapping[int, Metrics], metric: str
) -> tuple[list[float], list[float]]:
    """A figure of two variants, of the seeds that both have.

    Args:
        first, second: figures by seed.
        metric: which.

    Example:
        >>> paired_figures({0: {"mrr": 0.1}, 1: {"mrr": 0.2}}, {1: {"mrr": 0.3}, 2: {"mrr": 0.4}}, "mrr")
        ([0.2], [0.3])
    """
    both = [seed for seed in first if seed in second]
    return [first[seed][metric] for seed in both], [second[seed][metric] for seed in both]


def compare_at_looks(base: list[float], method: list[float], first: int, last: int) -> Comparison:
    """`paired_runs`, where one looks after ``first`` pairs and after each further one up to ``last`` of them.

    Pocock's bound (Biometrika 1977): every look has the same level, such that over all of them no difference is called
    one in 5 %. His table is for a known spread, and here it is unknown: the bound is the 5 % quantile of the least p of
    Student's test over the looks, in a simulation without a difference. The p-value is how often the least one there
    is as small.

    Args:
        base, method: one figure a run, of the same seeds in the same order.
        first, last: pairs at the first and at the last look.

    Example:
        >>> once = compare_at_looks([0.5, 0.6, 0.7], [0.53, 0.64, 0.75], 3, 3)
        >>> often = compare_at_looks([0.5, 0.6, 0.7], [0.53, 0.64, 0.75], 3, 8)
        >>> round(once.p_value, 4), round(once.low, 4), often.p_value > 0.05, often.low < 0
        (0.0202, 0.0152, True, True)
    """
    from scipy.stats import t

    once = paired_runs(base, method)
    if last <= first or len(base) < 2:
        return once
    least = least_p_values(first, last)
    bound = float(least[int(LEVEL * len(least))])
    freedom = len(base) - 1
    margin = (once.high - once.difference) * float(t.ppf(1 - bound / 2, freedom) / t.ppf(1 - LEVEL / 2, freedom))
    p_value = (1 + int(np.searchsorted(least, once.p_value, side="right"))) / (1 + len(least))
    return replace(once, low=once.difference - margin, high=once.difference + margin, p_value=p_value)


def is_decided(base: list[float], method: list[float], first: int, last: int, negligible: float | None = None) -> bool:
    """Whether more seeds are not needed: the interval of the difference excludes 0 or is within what is negligible, or
    there is none at all."""
    if len(base) < 2:
        return False
    comparison = compare_at_looks(base, method, first, last)
    are_same = max(abs(after - before) for before, after in zip(base, method, strict=True)) < SAME
    return are_same or comparison.low > 0 or comparison.high < 0 or is_within(comparison, negligible)


def is_within(comparison: Comparison, negligible: float | None) -> bool:
    """Whether the 95 % interval lies within a difference that does not matter, to either side.

    It is the test of equivalence by two one-sided ones (Schuirmann, J. Pharmacokinet. Biopharm. 1987), with the wider
    interval of the verdicts: no difference by mistake in at most 2.5 %.

    Example:
        >>> change = compare_at_looks([0.5, 0.6, 0.7], [0.501, 0.601, 0.7], 3, 3)
        >>> is_within(change, 0.005), is_within(change, 0.001), is_within(change, None)
        (True, False, False)
    """
    return negligible is not None and max(-comparison.low, comparison.high) <= negligible


@cache
def least_p_values(first: int, last: int) -> NDArray[np.float64]:
    """The least p over the looks, ascending, in many repetitions without a difference (R,)."""
    from scipy.stats import t

    changes = np.random.default_rng(0).standard_normal((REPETITIONS, last))  # a t statistic knows no unit
    counts = np.arange(max(2, first), last + 1)
    means = changes.cumsum(1)[:, counts - 1] / counts
    variances = ((changes**2).cumsum(1)[:, counts - 1] - counts * means**2) / (counts - 1)
    p_values = 2 * t.sf(np.abs(means) * np.sqrt(counts / variances), counts - 1)
    return np.sort(p_values.min(1))
