"""The probability of a guess: the sigmoid by scikit-learn, and the shares of new images that are right."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.probability import estimate_probability, fit_sigmoid
from tests.identify.test_grouped import decider_of, drawn


@pytest.mark.parametrize(("slopes", "offset", "unit"), [((2.0, 1.0), 0.5, 1.0), ((2.0, 3.0), 1.0, 0.01)])
def test_the_sigmoid_is_that_of_logistic_regression(slopes: tuple[float, float], offset: float, unit: float):
    """With soft targets: each image counts as right with weight t and as wrong with weight 1 - t."""
    generator = np.random.default_rng(3)
    features = generator.exponential(size=(300, 2)) * [unit, 1.0] - [0.0, 1.0]
    logits = (features / [unit, 1.0]) @ np.array(slopes) + offset
    right = generator.random(300) < 1 / (1 + np.exp(-logits))
    found = fit_sigmoid(*features.T, right)
    targets = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))
    both, weights = np.concatenate([features, features]) / [unit, 1.0], np.concatenate([targets, 1 - targets])
    fitted = LogisticRegression(C=1e8, tol=1e-10).fit(both, np.repeat([1, 0], 300), sample_weight=weights)
    assert (fitted.coef_ > 0).all()
    for margin, score in ((0.0, 0.0), (0.3, -1.0), (3.0, 0.5)):
        expected = fitted.predict_proba([[margin, score]])[0, 1]
        assert found.at(margin * unit, score) == pytest.approx(expected, abs=1e-4)


def test_the_sigmoid_stays_finite_and_never_falls():
    margins, scores = np.linspace(0, 1, 40), np.zeros(40)
    always = fit_sigmoid(margins, scores, np.ones(40, bool))
    assert 0.95 < always.at(0.0, 0.0) <= always.at(1.0, 0.0) < 1
    separate = fit_sigmoid(margins, scores, margins > 0.5)
    assert separate.at(0.0, 0.0) < 0.1 < 0.9 < separate.at(1.0, 0.0) < 1
    by_score = fit_sigmoid(scores, margins, margins > 0.5)
    assert by_score.at(0.0, 0.0) < 0.1 < 0.9 < by_score.at(0.0, 1.0) < 1
    falling = fit_sigmoid(margins, 1 - margins, margins < 0.5)
    assert falling.margin_slope == 0 and falling.score_slope > 0
    falling = fit_sigmoid(margins, scores, margins < 0.5)
    assert falling.margin_slope == 0 and falling.at(0.0, 0.0) == pytest.approx(0.5)
    same = fit_sigmoid(np.zeros(10), np.zeros(10), np.arange(10) < 4)
    assert isinstance(same, Sigmoid) and 0.35 < same.at(0.0, 0.0) < 0.45


def test_the_probabilities_are_those_of_new_images():
    """Of new images, half of them of labels that the estimate has not seen, as many are right as it says."""
    codes = np.arange(900) % 6
    decider, asked = decider_of(codes, drawn(codes, 0)), np.tile(codes, 4)
    sigmoid = estimate_probability(decider)
    assert sigmoid is not None
    strangers = torch.randn(3600, 8, generator=torch.Generator().manual_seed(8))
    found = decider.decide(torch.cat([drawn(asked, 1), torch.nn.functional.normalize(strangers, dim=1)]))
    right = np.array([decision.code for decision in found]) == np.append(asked, np.full(3600, -1))
    said = np.array([sigmoid.at(decision.margin or 0.0, decision.score) for decision in found])
    assert 0.15 < right.mean() < 0.45
    for third in np.array_split(said.argsort(), 3):
        assert said[third].mean() == pytest.approx(right[third].mean(), abs=0.08)
