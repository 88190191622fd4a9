"""Intervals and p-values against closed forms, SciPy and their own promises."""

import numpy as np
import pytest
import torch
from scipy import stats

from dmlkit.evaluation.breakdown import class_scores, confusions
from dmlkit.evaluation.significance import (
    bootstrap_intervals,
    paired_comparison,
    paired_runs,
    runs_to_separate,
    t_interval,
)


def test_bootstrap_of_a_share_is_the_normal_interval():
    values = (torch.rand(4000, generator=torch.Generator().manual_seed(0)) < 0.3).double()
    interval = bootstrap_intervals({"recall@1": values})["recall@1"]
    margin = 1.96 * float(values.std(correction=0)) / 4000**0.5
    assert interval.mean == pytest.approx(float(values.mean()))
    assert interval.low == pytest.approx(interval.mean - margin, abs=0.1 * margin)
    assert interval.high == pytest.approx(interval.mean + margin, abs=0.1 * margin)


def test_bootstrap_covers_the_truth_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    columns = {str(i): torch.from_numpy(rng.beta(2, 5, 200)) for i in range(400)}
    intervals = bootstrap_intervals(columns).values()
    covered = np.mean([interval.low <= 2 / 7 <= interval.high for interval in intervals])
    assert 0.91 < covered < 0.98


def test_paired_permutation_against_all_exchanges():
    rng = np.random.default_rng(1)
    first, second = rng.random(10), rng.random(10) + 0.2
    exact = stats.permutation_test(
        (second, first), lambda a, b: np.mean(a - b), permutation_type="samples", alternative="two-sided"
    ).pvalue
    ours = paired_comparison(torch.from_numpy(first), torch.from_numpy(second))
    assert ours.difference == pytest.approx(np.mean(second - first))
    assert ours.p_value == pytest.approx(exact, abs=0.01)
    assert ours.low < ours.difference < ours.high


def test_p_values_are_uniform_without_a_difference():
    rng = np.random.default_rng(2)
    p = [paired_comparison(*torch.from_numpy(rng.standard_normal((2, 30)))).p_value for _ in range(100)]
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_equal_models_and_zero_one_values():
    same = torch.rand(50)
    result = paired_comparison(same, same)
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    first, second = torch.zeros(40), torch.cat([torch.ones(10), torch.zeros(30)])
    # of the 10 queries that changed all went one way: 2 of 2^10 exchanges are as extreme
    assert paired_comparison(first, second).p_value == pytest.approx(2 / 1024, abs=0.0015)


def test_different_queries_are_refused():
    with pytest.raises(ValueError, match="same queries"):
        paired_comparison(torch.zeros(3), torch.zeros(4))


def test_t_interval_against_scipy():
    values = [0.61, 0.58, 0.63, 0.6]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    ours = t_interval(values)
    assert (ours.mean, ours.low, ours.high) == pytest.approx((np.mean(values), low, high))
    assert t_interval([0.5]).high == float("inf")


def test_breakdown_against_loops():
    rng = np.random.default_rng(3)
    labels, nearest, values = rng.integers(0, 9, 200), rng.integers(0, 9, 200), rng.random(200)
    scores = class_scores({"x": torch.from_numpy(values)}, torch.from_numpy(labels), by="x")
    assert [score.metrics["x"] for score in scores] == pytest.approx(
        sorted(values[labels == c].mean() for c in range(9))
    )
    assert {score.label: score.queries for score in scores} == {c: (labels == c).sum() for c in range(9)}
    pairs = confusions(torch.from_numpy(labels), torch.from_numpy(nearest))
    assert sum(pair.queries for pair in pairs) == (labels != nearest).sum()
    assert [pair.queries for pair in pairs] == sorted((pair.queries for pair in pairs), reverse=True)
    for pair in pairs:
        assert pair.queries == ((labels == pair.label) & (nearest == pair.taken_for)).sum()
        assert pair.share == pair.queries / (labels == pair.label).sum()


def test_paired_runs_against_scipy():
    rng = np.random.default_rng(4)
    first, second = rng.random(6).tolist(), (rng.random(6) + 0.3).tolist()
    expected = stats.ttest_rel(second, first)
    interval = expected.confidence_interval(0.95)
    ours = paired_runs(first, second)
    assert (ours.difference, ours.low, ours.high, ours.p_value) == pytest.approx(
        (np.mean(np.subtract(second, first)), interval.low, interval.high, expected.pvalue)
    )


def test_paired_runs_that_tell_nothing_or_everything():
    one = paired_runs([0.5], [0.9])
    assert (one.low, one.high, one.p_value) == (-float("inf"), float("inf"), 1)
    assert paired_runs([0.5, 0.25], [0.5, 0.25]).p_value == 1
    same = paired_runs([0.5, 0.25], [0.75, 0.5])
    assert (same.low, same.high, same.p_value) == (0.25, 0.25, 0)
    with pytest.raises(ValueError, match="same seeds"):
        paired_runs([0.5], [0.5, 0.6])


def test_runs_to_separate_is_the_first_size_whose_interval_leaves_zero():
    changes = np.array([0.02, -0.01, 0.03, 0.0])
    needed = runs_to_separate([0.5] * 4, (0.5 + changes).tolist())
    for n in (needed, needed - 1):
        low, _ = stats.t.interval(0.95, n - 1, loc=changes.mean(), scale=changes.std(ddof=1) / n**0.5)
        assert (low > 0) == (n == needed)
    assert runs_to_separate([0.5], [0.6]) is None
    assert runs_to_separate([0.5, 0.6], [0.6, 0.5]) is None
