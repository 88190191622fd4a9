"""Probability that two images are of the same class: a logistic function of their similarity (Platt 1999).

It is fitted to pairs of validation images, and holds if every second pair is of the same class. Pairs of the same class
are rare among all pairs, so that the share to expect depends on where the pairs come from; `probability_at` takes it.
"""

from itertools import combinations_with_replacement
from math import log

import numpy as np
import torch

from dmlkit.errors import UserError
from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.probability import fit_sigmoid
from dmlkit.metrics.base import Points
from dmlkit.metrics.reliability import Reliability, balanced, measure_reliability
from dmlkit.metrics.statistics import LEAST_CLASSES
from dmlkit.run_folder.threshold import PairProbability

MOST = 2**14  # pairs of each kind: the variance of more pairs is small compared with that of the classes
FOLDS = 5


def check_prior(prior: float) -> None:
    """Check the share of the pairs that are expected to be of the same class.

    Raises:
        UserError: it is not in (0, 1).
    """
    if not 0 < prior < 1:
        raise UserError(f"--prior {prior:g}: expected a share between 0 and 1, e.g. 0.5")


def probability_at(score: float, given: PairProbability, prior: float = 0.5) -> float:
    """Return the probability that two images are of the same class.

    Args:
        score: their similarity.
        given: the fit.
        prior: share of the pairs that are of the same class, in (0, 1).

    Example:
        >>> given = PairProbability(slope=2.0, offset=-1.0, reliability=None)
        >>> probability_at(0.5, given), round(probability_at(0.5, given, prior=0.1), 3)
        (0.5, 0.1)
    """
    return Sigmoid(0.0, given.slope, given.offset + log(prior / (1 - prior))).at(None, score)


def fit_pair_probability(points: Points) -> PairProbability:
    """Fit the probability to pairs of points, at most `MOST` of each kind.

    Args:
        points: points of classes that the model was not trained on; they have pairs of both kinds.
    """
    first, second = sampled_pairs(points.labels.cpu().numpy())
    sides = (points.embeddings[torch.from_numpy(rows).to(points.embeddings.device)] for rows in (first, second))
    scores = points.manifold.paired_similarity(*(side.double() for side in sides)).cpu().numpy()
    classes = points.labels.cpu().numpy()[np.stack([first, second], axis=1)]
    fitted = _fit(scores, classes)
    return PairProbability(
        slope=fitted.score_slope, offset=fitted.offset, reliability=held_out_reliability(scores, classes)
    )


def held_out_reliability(scores: np.ndarray, classes: np.ndarray) -> Reliability | None:
    """Measure the probabilities of pairs, each by a fit to pairs of other classes; None for fewer than 5 classes.

    Args:
        scores: (P,) float64.
        classes: (P, 2) int64.
    """
    if len(np.unique(classes)) < LEAST_CLASSES:
        return None
    same = classes[:, 0] == classes[:, 1]
    return measure_reliability(held_out_probabilities(scores, classes), same, same, classes)


def held_out_probabilities(scores: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the probabilities (P,), each by a fit to pairs both of whose classes are in other folds."""
    codes = np.unique(classes, return_inverse=True)[1].reshape(classes.shape)
    folds = (np.random.default_rng(0).permutation(codes.max() + 1) % FOLDS)[codes]
    found = np.empty(len(scores))
    for one, other in combinations_with_replacement(range(FOLDS), 2):
        own = (folds.min(1) == one) & (folds.max(1) == other)
        others = ~np.isin(folds, (one, other)).any(1)
        if own.any():
            found[own] = _fit(scores[others], classes[others]).of(np.zeros(own.sum()), scores[own])
    return found


def sampled_pairs(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw pairs of points, at most `MOST` of the same class and as many of different classes; all if there are fewer.

    Args:
        labels: (N,) int64.

    Returns:
        Rows (P,) of the first and of the second points.

    Example:
        >>> first, second = sampled_pairs(np.array([7, 8, 7, 8]))
        >>> sorted(zip(first.tolist(), second.tolist()))
        [(0, 1), (0, 2), (0, 3), (1, 3), (2, 1), (2, 3)]
    """
    order, generator = np.argsort(labels, kind="stable"), np.random.default_rng(0)
    ordered, rows = labels[order], np.arange(len(labels))
    ends = np.searchsorted(ordered, ordered, side="right")
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for starts, counts in ((rows + 1, ends - rows - 1), (ends, len(rows) - ends)):  # partners of each row
        last = counts.cumsum()
        drawn = np.arange(last[-1]) if last[-1] <= MOST else generator.choice(last[-1], MOST, replace=False)
        first = np.searchsorted(last, drawn, side="right")
        found.append((order[first], order[starts[first] + drawn - (last - counts)[first]]))
    same, different = found
    return np.concatenate([same[0], different[0]]), np.concatenate([same[1], different[1]])


def _fit(scores: np.ndarray, classes: np.ndarray) -> Sigmoid:
    same = classes[:, 0] == classes[:, 1]
    return fit_sigmoid(np.zeros(len(scores)), scores, same, balanced(np.ones(len(scores)), same))
