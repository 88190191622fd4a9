"""Intervals and p-values against closed forms, SciPy and their own promises."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dmlkit.evaluation.evaluate import Evaluation
from dmlkit.metrics.scoring import Scores
from dmlkit.metrics.statistics import holm, paired_runs, runs_to_separate


def test_breakdown_against_loops():
    rng = np.random.default_rng(3)
    labels, nearest, values = rng.integers(0, 9, 200), rng.integers(0, 9, 200), rng.random(200)
    names = [f"class {c}" for c in range(9)]
    rows = torch.arange(200)
    scores = Scores({}, {}, {"x": torch.from_numpy(values)}, rows, rows, 0, ())
    rescoring: Any = None
    sides = torch.from_numpy(labels), torch.from_numpy(nearest)
    evaluation = Evaluation(scores, *sides, names, [""] * 200, 9, [], None, rescoring)
    found = evaluation.class_figures()
    assert [one.metrics["x"] for one in found] == pytest.approx([values[labels == c].mean() for c in range(9)])
    assert [(one.name, one.queries) for one in found] == [(names[c], (labels == c).sum()) for c in range(9)]
    pairs = evaluation.confusions()
    assert sum(pair.queries for pair in pairs) == (labels != nearest).sum()
    assert [pair.queries for pair in pairs] == sorted((pair.queries for pair in pairs), reverse=True)
    for pair in pairs:
        own, other = names.index(pair.name), names.index(pair.taken_for)
        assert pair.queries == ((labels == own) & (nearest == other)).sum()
        assert pair.share == pair.queries / (labels == own).sum()


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


def holm_by_definition(p_values: list[float], level: float) -> set[int]:
    """Holm 1979: the smallest p is held against level / n, the next against level / (n - 1) ... until one fails."""
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
