"""The error rate of seeds that are added one by one, against naive repetitions of it."""

import numpy as np
import pytest
from scipy import stats

from dmlkit.study.verdicts import PairedFigures, compare_at_looks, is_decided, least_p_values


@pytest.mark.heavy
@pytest.mark.parametrize(("first", "last"), [(3, 11), (5, 13), (2, 4)])
def test_two_equal_variants_are_called_different_in_at_most_5_percent(first: int, last: int):
    """400 studies of figures of equal variants; those of a seed are alike, as the same initial weights make them."""
    random = np.random.default_rng(1)
    called, called_naively = 0, 0
    for _ in range(400):
        seeds = random.normal(0.7, 0.05, last)
        base, method = (list(seeds + random.normal(0, 0.02, last)) for _ in range(2))
        looks = range(first, last + 1)
        called += any(is_decided(PairedFigures(base[:n], method[:n]), first, last) for n in looks)
        called_naively += any(stats.ttest_rel(base[:n], method[:n]).pvalue < 0.05 for n in looks)
    assert called <= 400 * 0.05 + 2 * (400 * 0.05 * 0.95) ** 0.5  # two standard deviations of chance
    assert called_naively > called + 10  # what it is there for


def test_a_difference_is_found_and_fewer_looks_are_stricter_by_less():
    random = np.random.default_rng(0)
    base = random.normal(0.7, 0.01, 5)
    pairs = PairedFigures(list(base), list(base + random.normal(0.05, 0.005, 5)))
    assert is_decided(pairs, 5, 13) and is_decided(PairedFigures(pairs.method, pairs.base), 5, 13)
    widths = [compare_at_looks(pairs, 5, last) for last in (5, 6, 9, 13)]
    assert np.all(np.diff([width.high - width.low for width in widths]) > 0)
    assert np.all(np.diff([width.p_value for width in widths]) >= 0)


def test_one_look_is_students_paired_t_test():
    base, method = [0.5, 0.6, 0.7, 0.66], [0.53, 0.6, 0.76, 0.7]
    expected = stats.ttest_rel(method, base)
    interval = expected.confidence_interval(0.95)
    comparison = compare_at_looks(PairedFigures(base, method), 4, 4)
    ends = interval.low, interval.high, expected.pvalue
    assert (comparison.low, comparison.high, comparison.p_value) == pytest.approx(ends)
    assert np.quantile(least_p_values(4, 4), 0.05) == pytest.approx(0.05, rel=0.05)


def test_the_interval_holds_0_where_the_p_value_is_above_5_percent():
    random = np.random.default_rng(3)
    for shift in np.linspace(0, 0.06, 40):
        base = list(random.normal(0.7, 0.02, 6))
        method = list(np.array(base) + random.normal(shift, 0.03, 6))
        comparison = compare_at_looks(PairedFigures(base, method), 5, 10)
        assert (comparison.low <= 0 <= comparison.high) == (comparison.p_value > 0.05)


@pytest.mark.parametrize("last", [6, 12])
def test_a_difference_that_matters_is_called_none_in_less_than_two_and_a_half_percent(last: int):
    """200 studies of variants that differ by just what matters, with a spread that leaves intervals narrower."""
    random = np.random.default_rng(2)
    called, called_where_there_is_none = 0, 0
    for _ in range(200):
        base, noise = random.normal(0.7, 0.05, last), random.normal(0, 0.004, last)
        far, same = (
            any(
                max(-one.low, one.high) <= 0.01
                for n in range(6, last + 1)
                if (one := compare_at_looks(PairedFigures(list(base[:n]), list(method[:n])), 6, last))
            )
            for method in (base + noise + 0.01, base + noise)
        )
        called, called_where_there_is_none = called + far, called_where_there_is_none + same
    assert called <= 200 * 0.025 + 2 * (200 * 0.025 * 0.975) ** 0.5
    assert called_where_there_is_none > 150


def test_a_difference_that_does_not_matter_needs_no_more_seeds():
    base, method = [0.5, 0.6, 0.7], [0.501, 0.6, 0.7]
    pairs = PairedFigures(base, method)
    assert not is_decided(pairs, 3, 3)
    assert is_decided(pairs, 3, 3, 0.005) and not is_decided(pairs, 3, 3, 0.0005)


@pytest.mark.parametrize("pairs", [0, 1])
def test_a_single_pair_decides_nothing_and_equal_figures_need_no_more_seeds(pairs: int):
    assert not is_decided(PairedFigures([0.5] * pairs, [0.9] * pairs), 2, 8)
    assert is_decided(PairedFigures([0.5, 0.6], [0.5, 0.6]), 2, 8)
