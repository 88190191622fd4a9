"""Probability of pairs against scikit-learn, Bayes' rule, and pairs of new classes."""

from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dmlkit.evaluation import calibration
from dmlkit.evaluation.calibration import fit_pair_probability, probability_at, sampled_pairs
from dmlkit.identify.probability import Trials
from dmlkit.metrics import reliability
from dmlkit.metrics.base import Points
from tests.evaluation.test_calibration import clusters


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of intervals, whose ends no test here looks at: 1 000 draws of 20 000 pairs take a second."""
    monkeypatch.setattr(reliability, "RESAMPLES", 20)


def pairs_of(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes of all pairs."""
    x, labels = points.embeddings.double().numpy(), points.labels.tolist()
    pairs = list(combinations(range(len(labels)), 2))
    return np.array([x[i] @ x[j] for i, j in pairs]), np.array([(labels[i], labels[j]) for i, j in pairs])


def platt(scores: np.ndarray, same: np.ndarray) -> LogisticRegression:
    """Logistic regression in which both kinds of pairs have the same weight, with Platt's targets as two rows each."""
    targets = np.where(same, (same.sum() + 1) / (same.sum() + 2), 1 / ((~same).sum() + 2))
    weights = len(same) / 2 / np.where(same, same.sum(), (~same).sum())
    both = np.concatenate([weights * targets, weights * (1 - targets)])
    twice = np.repeat([1, 0], len(same))
    return LogisticRegression(C=1e8, tol=1e-10).fit(np.tile(scores, 2)[:, None], twice, sample_weight=both)


def test_the_fit_is_that_of_balanced_logistic_regression():
    points = clusters(8, seed=2)
    found = fit_pair_probability(points)
    scores, classes = pairs_of(points)
    same = classes[:, 0] == classes[:, 1]
    model = platt(scores, same)
    for score in (-0.5, 0.2, 0.6, 0.9):
        expected = model.predict_proba([[score]])[0, 1]
        assert probability_at(score, found) == pytest.approx(expected, abs=1e-4)
        odds = expected / (1 - expected) * 0.02 / 0.98  # Bayes' rule
        assert probability_at(score, found, prior=0.02) == pytest.approx(odds / (1 + odds), abs=1e-4)


def test_pairs_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch):
    labels = torch.from_numpy(np.random.default_rng(0).integers(5, size=60))
    kinds = {kind: [pair for pair in combinations(range(60), 2) if (labels[pair[0]] == labels[pair[1]]) == kind]
             for kind in (True, False)}  # fmt: skip
    first, second = sampled_pairs(labels)
    found = {tuple(sorted(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert found == {*kinds[True], *kinds[False]} and len(first) == len(found)
    monkeypatch.setattr(calibration, "MOST", 300)
    first, second = sampled_pairs(labels)
    found = {tuple(sorted(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    same = labels[first] == labels[second]
    assert len(found) == 600 and same.sum() == 300
    # the share of draws with an image of the first half is that of all pairs, within 4 deviations
    for kind, own in ((True, same), (False, ~same)):
        expected = np.mean([i < 30 for pair in kinds[kind] for i in pair])
        drawn = torch.cat([first[own], second[own]])
        assert float((drawn < 30).double().mean()) == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 600))


def test_reliability_is_of_pairs_whose_classes_did_not_fit():
    scores, classes = pairs_of(clusters(10, seed=5))
    same, nothing = classes[:, 0] == classes[:, 1], np.zeros(len(scores))
    trials = Trials(nothing, scores, same, ~same, classes, classes)
    found = trials.reliability()
    assert found.error_interval is not None
    folds = np.random.default_rng(0).permutation(10) % 5
    said = np.empty(len(scores))
    for row, (a, b) in enumerate(classes):
        if row % 293:
            continue
        kept = [p for p, pair in enumerate(classes) if not {folds[a], folds[b]} & {folds[pair[0]], folds[pair[1]]}]
        model = platt(scores[kept], classes[kept, 0] == classes[kept, 1])
        said[row] = model.predict_proba(scores[row : row + 1, None])[0, 1]
    rows = np.arange(0, len(scores), 293)
    fitted = trials.held_out_probabilities()
    assert fitted[rows] == pytest.approx(said[rows], abs=1e-4)
    weights = np.where(same, 0.5 / same.sum(), 0.5 / (~same).sum())
    assert found.brier == pytest.approx(weights @ (fitted - same) ** 2)
    assert fit_pair_probability(clusters(4, seed=5)).reliability is None


def test_probabilities_hold_for_pairs_of_other_classes():
    errors = []
    for seed in range(4):
        points = clusters(40, seed=200 + seed)
        sides = [
            Points(points.embeddings[kept], points.labels[kept].unique(return_inverse=True)[1], points.manifold)
            for kept in (points.labels < 20, points.labels >= 20)
        ]
        fitted = fit_pair_probability(sides[0])
        scores, classes = pairs_of(sides[1])
        same = classes[:, 0] == classes[:, 1]
        said = np.array([probability_at(score, fitted) for score in scores[::7]])
        same, weights = same[::7], np.where(same, 0.5 / same.sum(), 0.5 / (~same).sum())[::7]
        weights /= weights.sum()
        for low, high in ((0, 0.2), (0.2, 0.8), (0.8, 1.01)):
            own = (said >= low) & (said < high)
            errors.append((weights[own] @ said[own] - weights[own] @ same[own]) / weights[own].sum())
        assert fitted.reliability is not None and fitted.reliability.error < 0.1
    assert np.abs(np.reshape(errors, (4, 3)).mean(0)).max() < 0.1
