"""Probability that a guess is right: a sigmoid of margin and score, fitted to labeled images, each without itself."""

from typing import NamedTuple

import numpy as np
import torch

from dmlkit.embedding.questions.decisions import Decider

SAMPLE = 500  # labeled images on which the probability is estimated
LEAST = 10  # of them; fewer give no probability


class Sigmoid(NamedTuple):
    """Probability 1 / (1 + exp(-z)) with z = margin_slope * margin + score_slope * score + offset.

    Example:
        >>> Sigmoid(2.0, 1.0, -1.0).at(0.0, 1.0)
        0.5
    """

    margin_slope: float
    score_slope: float
    offset: float

    def at(self, margin: float, score: float) -> float:
        """Return the probability of a guess."""
        from scipy.special import expit

        return float(expit(self.margin_slope * margin + self.score_slope * score + self.offset))


def fit_sigmoid(margins: np.ndarray, scores: np.ndarray, right: np.ndarray) -> Sigmoid:
    """Fit the probability of being right, by maximum likelihood with the targets of Platt (1999).

    His targets, (n + 1) / (n + 2) for n right ones and 1 / (m + 2) for m wrong ones, keep the slopes finite where the
    right ones can be separated. The probability never falls with the margin or the score.

    Args:
        margins, scores: (N,) float64.
        right: (N,) bool.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    positive, negative = int(right.sum()), int((~right).sum())
    targets = np.where(right, (positive + 1) / (positive + 2), 1 / (negative + 2))
    features = np.stack([margins, scores], axis=1)
    center, scale = features.mean(axis=0), features.std(axis=0)
    scale[scale == 0] = 1.0
    scaled = (features - center) / scale

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        logits = scaled @ weights[:2] + weights[2]
        excess = expit(logits) - targets
        value = (np.logaddexp(0, logits) - targets * logits).sum()
        return float(value), np.append(excess @ scaled, excess.sum())

    bounds = [(0, None), (0, None), (None, None)]
    options = {"ftol": 1e-12, "gtol": 1e-8}
    found = minimize(loss, np.zeros(3), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    slopes = found[:2] / scale
    return Sigmoid(float(slopes[0]), float(slopes[1]), float(found[2] - slopes @ center))


def estimate_probability(decider: Decider) -> Sigmoid | None:
    """Return the probability of guesses, from a sample of the labeled images whose label others have too.

    Each image of the sample is left out of its own decision. Return None for fewer than `LEAST` images or two labels.
    """
    repeated = np.flatnonzero(decider.sizes[decider.codes] > 1)
    if len(repeated) < LEAST or len(decider.sizes) < 2:
        return None
    drawn = np.random.default_rng(0).permutation(repeated)[:SAMPLE]
    rows = drawn[np.argsort(decider.codes[drawn], kind="stable")]
    decisions = decider.decide(decider.searched.points_at(torch.from_numpy(rows)), torch.from_numpy(rows))
    right = np.array([decision.code for decision in decisions]) == decider.codes[rows]
    margins = np.array([decision.margin or 0.0 for decision in decisions])
    return fit_sigmoid(margins, np.array([decision.score for decision in decisions]), right)
