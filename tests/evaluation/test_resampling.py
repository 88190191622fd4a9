"""Intervals and p-values over classes and queries, against loops over classes, closed forms, SciPy and the truth."""

import numpy as np
import pytest
import torch
from scipy import stats

from dmlkit.metrics import statistics
from dmlkit.metrics.statistics import (
    bootstrap_intervals,
    effective_number,
    few_classes_note,
    holm,
    paired_comparison,
    paired_runs,
    runs_to_separate,
    tail_of,
)


def test_bootstrap_covers_the_truth_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    columns = {str(i): torch.from_numpy(rng.beta(2, 5, 200)) for i in range(400)}
    intervals = bootstrap_intervals(columns, None).values()
    assert 0.91 < np.mean([interval.low <= 2 / 7 <= interval.high for interval in intervals]) < 0.98


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is repeated hundreds of times: 400 resamples and 1 000 exchanges, not 2 000 and 10 000."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    monkeypatch.setattr(statistics, "PERMUTATIONS", 1000)


def test_equal_models_and_zero_one_values():
    same = torch.rand(50)
    result = paired_comparison(same, same, None)
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    first, second = torch.zeros(40), torch.cat([torch.ones(10), torch.zeros(30)])
    # of the 10 queries that changed all went one way: 2 of 2^10 exchanges are as extreme
    assert paired_comparison(first, second, None).p_value == pytest.approx(2 / 1024, abs=0.0015)


def test_different_queries_are_refused():
    with pytest.raises(ValueError, match="same queries"):
        paired_comparison(torch.zeros(3), torch.zeros(4), None)


def of_classes(rng: np.random.Generator, sizes: np.ndarray, mean: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Hits of queries whose classes are hard or easy, and the classes, in no order."""
    classes = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    share = rng.beta(10 * mean, 10 * (1 - mean), len(sizes))
    return (rng.random(len(classes)) < share[classes]).astype(float), classes


def test_over_classes_the_interval_is_that_of_a_loop_that_draws_classes():
    rng = np.random.default_rng(6)
    values, classes = of_classes(rng, rng.integers(3, 40, 60))
    own = [values[classes == c] for c in range(60)]
    means = [np.concatenate([own[c] for c in rng.integers(60, size=60)]).mean() for _ in range(4000)]
    found = bootstrap_intervals({"x": torch.from_numpy(values)}, torch.from_numpy(classes))["x"]
    assert found.mean == pytest.approx(values.mean())
    sizes = np.bincount(classes)
    count = sizes.sum() ** 2 / (sizes**2).sum()
    assert effective_number(torch.from_numpy(sizes).double()) == pytest.approx(count)
    wider = stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975) * (count / (count - 1)) ** 0.5
    spread = np.quantile(means, [0.025, 0.975]) - values.mean()
    assert (found.low, found.high) == pytest.approx(values.mean() + wider * spread, abs=0.1 * wider * spread[1])


@pytest.mark.parametrize("sizes", [np.full(5, 25), np.full(8, 25), 2 + 200 // np.arange(1, 42)], ids=str)
def test_over_classes_the_interval_holds_the_truth_nineteen_times_in_twenty(sizes: np.ndarray, few_draws: None):
    rng = np.random.default_rng(8)
    by_class, by_query = [], []
    for repetition in range(200):
        values, classes = (torch.from_numpy(one) for one in of_classes(rng, sizes))
        by_class.append(bootstrap_intervals({"x": values}, classes)["x"])
        by_query += [bootstrap_intervals({"x": values}, None)["x"]] if repetition < 50 else []
    held = [np.mean([one.low <= 0.6 <= one.high for one in found]) for found in (by_class, by_query)]
    least = 0.86 if len(sizes) == 5 else 0.9  # 0.92 of 5 classes, 0.95 of 8 and more, +- 0.03 by chance alone
    assert least <= held[0] < 1
    assert held[1] < 0.85


def test_the_interval_of_a_model_that_misses_nothing_has_a_width():
    """Wilson's for 12 answers that are all right, near Clopper and Pearson's by scipy."""
    classes = torch.arange(12).repeat_interleave(5)
    intervals = bootstrap_intervals({"all": torch.ones(60), "none": torch.zeros(60)}, classes)
    tail = tail_of(12.0)
    low = 1 / (1 + stats.norm.ppf(tail) ** 2 / 12)
    assert (intervals["all"].low, intervals["all"].high) == (pytest.approx(low), 1)
    assert (intervals["none"].low, intervals["none"].high) == (0, pytest.approx(1 - low))
    assert abs(low - stats.binomtest(12, 12).proportion_ci(1 - 2 * tail).low) < 0.06
    same = paired_comparison(torch.ones(60), torch.ones(60), classes)
    assert (same.low, same.high, same.p_value) == (0, 0, 1)


def test_the_interval_of_a_model_that_misses_little_holds_the_truth(few_draws: None):
    """A recall of 0.97 on 10 classes: percentiles of the bootstrap hold it in 0.85, since most classes miss nothing."""
    rng = np.random.default_rng(5)
    classes, held = torch.arange(10).repeat_interleave(20), []
    for _ in range(200):
        hits = rng.random((10, 20)) < rng.beta(4.85, 0.15, 10)[:, None]
        found = bootstrap_intervals({"x": torch.from_numpy(hits.ravel())}, classes)["x"]
        held.append(found.low <= 0.97 <= found.high)
    assert np.mean(held) >= 0.92


@pytest.mark.parametrize("count", [1, 4])
def test_fewer_than_five_classes_have_no_interval(count: int):
    """That of 2 to 4 would hold the truth in 48 to 86 of 100 cases; see `LEAST_CLASSES`."""
    values, classes = torch.ones(20), torch.arange(20) % count
    comparison = paired_comparison(torch.zeros(20), values, classes)
    assert (comparison.difference, comparison.ends) == (1, None)
    assert comparison.as_dict() == {"difference": 1, "low": None, "high": None, "p_value": comparison.p_value}
    assert bootstrap_intervals({"x": values}, classes)["x"].ends is None and bootstrap_intervals({}, None) == {}
    assert count > 1 or (comparison.p_value == 1 and "a single class" in str(few_classes_note(1)))


def test_exchanges_of_classes_against_all_exchanges():
    rng = np.random.default_rng(9)
    classes = np.repeat(np.arange(10), rng.integers(2, 9, 10))
    first, second = rng.random((2, len(classes))) + np.array([[0.0], [0.1]])
    sums = np.bincount(classes, second - first)
    exact = stats.permutation_test(
        (sums, np.zeros(10)), lambda a, b: np.sum(a - b), permutation_type="samples", alternative="two-sided"
    ).pvalue
    ours = paired_comparison(*(torch.from_numpy(one) for one in (first, second, classes)))
    assert ours.p_value == pytest.approx(exact, abs=0.01) and ours.difference == pytest.approx((second - first).mean())


def test_what_is_drawn_does_not_depend_on_the_numbers_of_the_classes():
    first, second = torch.rand(2, 60, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(60) % 12
    other = torch.randperm(12, generator=torch.Generator().manual_seed(1))[classes]
    assert paired_comparison(first, second, classes) == paired_comparison(first, second, other)


def test_classes_of_one_query_are_queries():
    first, second = torch.rand(2, 50, generator=torch.Generator().manual_seed(0))
    assert paired_comparison(first, second, torch.arange(50)) == paired_comparison(first, second, None)


def test_p_values_over_classes_are_uniform_where_models_differ_by_chance_in_each_class(few_draws: None):
    rng, classes, p = np.random.default_rng(10), np.arange(300) % 30, {"classes": [], "queries": []}
    for _ in range(100):
        first, second = (torch.from_numpy(rng.normal(size=300) + rng.normal(size=30)[classes]) for _ in range(2))
        p["classes"].append(paired_comparison(first, second, torch.from_numpy(classes)).p_value)
        p["queries"].append(paired_comparison(first, second, None).p_value)
    assert stats.kstest(p["classes"], "uniform").pvalue > 0.01
    assert np.mean(np.array(p["queries"]) < 0.05) > 0.3


def test_a_p_value_over_few_classes_is_not_below_what_is_told():
    for count in (2, 4, 9):
        classes = torch.arange(10 * count) % count
        p_value = paired_comparison(torch.zeros(10 * count), torch.ones(10 * count), classes).p_value
        assert p_value == pytest.approx(2 / 2**count, abs=0.02)
        assert f"below {2 / 2**count:.3g}" in str(few_classes_note(count))


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


def holm_by_definition(p_values: list[float], level: float) -> set[int]:
    """Holm 1979: the smallest p is compared with level / n, the next with level / (n - 1) ... until one fails."""
    rejected: set[int] = set()
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - step):
            break
        rejected.add(index)
    return rejected


def test_holm_rejects_what_its_definition_does():
    rng = np.random.default_rng(5)
    for _ in range(50):
        p_values = (rng.random(int(rng.integers(1, 9))) ** 3).round(3).tolist()
        corrected = holm(p_values)
        for level in (0.01, 0.05, 0.2):
            assert {i for i, p in enumerate(corrected) if p <= level} == holm_by_definition(p_values, level)
        assert all(before <= after <= 1 for before, after in zip(p_values, corrected, strict=True))


def test_holm_of_a_published_example():
    """R's p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm"), and ties."""
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert holm([0.5, 0.5]) == [1.0, 1.0] and holm([]) == []
