"""Reliability of probabilities against loops, and its intervals against planted truth."""

import numpy as np
import pytest
from scipy.stats import norm

from dmlkit.identify.probability import fit_sigmoid
from dmlkit.metrics import reliability
from dmlkit.metrics.reliability import measure_reliability
from dmlkit.metrics.statistics import tail_of


@pytest.mark.parametrize("paired", [False, True])
def test_intervals_are_those_of_a_loop_over_draws(paired: bool, monkeypatch: pytest.MonkeyPatch):
    """Each draw repeats the answers of its classes; a pair of two classes is there once per pair of their copies."""
    monkeypatch.setattr(reliability, "RESAMPLES", 30)
    generator = np.random.default_rng(1)
    said, kinds = generator.random(200), np.arange(200) % 4 == 0
    right = generator.random(200) < said**2
    classes = generator.integers(6, size=(200, 2) if paired else 200)
    found = measure_reliability(said, right, kinds, classes)

    def figures(rows: list[int], bins: np.ndarray) -> tuple[float, float, list[float]]:
        first = sum(kinds[rows])
        weights = np.array([len(rows) / (2 * (first if kinds[row] else len(rows) - first)) for row in rows])
        error, squares, shares = 0.0, 0.0, []
        for bin_ in range(10):
            own = np.array([bins[row] == bin_ for row in rows])
            total = weights[own].sum()
            error += abs((weights * (said[rows] - right[rows]))[own].sum()) / weights.sum()
            squares += (weights * (said[rows] - right[rows]) ** 2)[own].sum() / weights.sum()
            shares.append((weights * right[rows])[own].sum() / total if total else np.nan)
        return error, squares, shares

    bins, total = np.empty(200, int), 0.0
    for row in np.argsort(said):
        total += 2.0 if kinds[row] else 2 / 3
        bins[row] = min(9, int(total / 200 * 10))
    error, brier, shares = figures(list(range(200)), bins)
    assert (found.error, found.brier) == pytest.approx((error, brier))
    assert [one.share for one in found.bins] == pytest.approx(shares)

    draws, generator = [], np.random.default_rng(0)
    for _ in range(30):
        drawn = generator.integers(6, size=6).tolist()
        rows: list[int] = []
        for row in range(200):
            first, second = classes[row] if paired else (classes[row], classes[row])
            copies = drawn.count(first) * (drawn.count(second) if first != second else 1)
            rows += [row] * copies
        draws.append(figures(rows, bins))
    tail = tail_of(6.0)
    expected = np.quantile([one[1] for one in draws], [tail, 1 - tail])
    assert found.brier_interval == pytest.approx(tuple(expected))
    # Wilson's interval solves (p - share)^2 = z^2 p (1 - p) / n at both ends
    one = found.bins[4]
    variance = float(np.nanvar([draw[2][4] for draw in draws]))
    times = np.bincount(np.ravel(classes[bins == 4]), minlength=6)
    z = norm.ppf(tail_of(times.sum() ** 2 / (times**2).sum()))
    size = min(one.share * (1 - one.share) / variance, (bins == 4).sum())
    assert one.interval is not None
    for end in one.interval:
        assert (end - one.share) ** 2 == pytest.approx(z**2 * end * (1 - end) / size)


@pytest.mark.parametrize(("labels", "is_step"), [(20, True), (40, False)])
def test_the_intervals_hold_the_truth(labels: int, is_step: bool, monkeypatch: pytest.MonkeyPatch):
    """Probabilities are fitted to labels whose answers are right together; the true error is an integral.

    95 % of 60 repetitions are 57, and fewer than 51 have a probability below 1 in 500. An interval that takes the
    probabilities as given held the truth in 42 to 49.
    """
    monkeypatch.setattr(reliability, "RESAMPLES", 200)
    generator, inside, errors = np.random.default_rng(3), [], []
    scores = 2 * norm.ppf((np.arange(2000) + 0.5) / 2000)
    effects = 2 * norm.ppf((np.arange(500) + 0.5) / 500)

    def chance(logits: np.ndarray) -> np.ndarray:
        return np.where(logits > 0, 0.9, 0.2) if is_step else 1 / (1 + np.exp(-logits))

    marginal = chance(scores[:, None] + effects).mean(1)
    for _ in range(60):
        classes = np.repeat(np.arange(labels), 20)
        own = 2 * generator.normal(size=len(classes))
        right = generator.random(len(classes)) < chance(own + 2 * generator.normal(size=labels)[classes])
        held_out = np.empty(len(classes))
        for fold in range(5):
            others = classes % 5 != fold
            fitted = fit_sigmoid(np.zeros(others.sum()), own[others], right[others])
            held_out[~others] = fitted.of(np.zeros((~others).sum()), own[~others])
        found = measure_reliability(held_out, right, classes < 0, classes)
        said = fit_sigmoid(np.zeros(len(own)), own, right).of(np.zeros(2000), scores)
        truth = np.abs((said - marginal).reshape(10, -1).mean(1)).mean()
        errors.append(found.error_interval[0] <= truth <= found.error_interval[1])
        shares = [np.interp(one.probability, said, marginal) for one in found.bins]
        pairs = zip(shares, found.bins, strict=True)
        inside += [one.interval[0] <= share <= one.interval[1] for share, one in pairs if one.interval]
    assert sum(errors) >= 51
    assert len(inside) == 600 and 0.9 < np.mean(inside) <= 0.995


def test_a_bin_that_is_all_right_has_an_interval_of_some_width():
    said = np.linspace(0.9, 1, 100)
    found = measure_reliability(said, said > 0, said < 0, np.arange(100) % 10)
    assert all(one.share == 1 and one.interval and one.interval[0] < 0.8 for one in found.bins)
    few = measure_reliability(said, said > 0, said < 0, np.arange(100) % 4)
    assert few.error_interval is None and few.brier_interval is None
    assert all(one.interval is None for one in few.bins)
    enough = measure_reliability(said, said > 0, said < 0, np.arange(100) % 5)
    assert enough.error_interval and enough.brier_interval and all(one.interval for one in enough.bins)


def test_the_error_of_true_probabilities_has_a_short_interval_that_begins_near_0():
    generator, classes = np.random.default_rng(0), np.repeat(np.arange(40), 20)
    said = generator.random(800)
    found = measure_reliability(said, generator.random(800) < said, classes < 0, classes)
    assert found.error_interval is not None
    assert found.error_interval[0] < 0.01 < found.error < found.error_interval[1] < 2 * found.error
