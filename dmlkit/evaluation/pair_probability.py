"""Probability that two images are of the same class: a logistic function of their similarity (Platt 1999).

It is fitted to pairs of validation images, and holds if every second pair is of the same class. Pairs of the same class
are rare among all pairs, so that the share to expect depends on where the pairs come from; `probability_at` takes it.
"""

from math import log

import numpy as np
import torch

from dmlkit.errors import UserError
from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.probability import Trials
from dmlkit.metrics.base import Points
from dmlkit.metrics.statistics import LEAST_CLASSES
from dmlkit.run_folder.threshold import PairProbability

MOST = 2**14  # pairs of each kind: the variance of more pairs is small compared with that of the classes


def check_prior(prior: float) -> None:
    """Check the share of the pairs that are expected to be of the same class."""
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
    return fit_scores(scores, points.labels.cpu().numpy()[np.stack([first, second], axis=1)])


def fit_scores(scores: np.ndarray, classes_of: np.ndarray) -> PairProbability:
    """Fit the probability to the scores (P,) float64 of pairs of images of classes (P, 2) int64."""
    trials = pair_trials(scores, classes_of)
    fitted, classes = trials.fit(), len(np.unique(trials.classes))
    reliability = trials.reliability() if classes >= LEAST_CLASSES else None
    return PairProbability(slope=fitted.score_slope, offset=fitted.offset, reliability=reliability)


def pair_trials(scores: np.ndarray, classes: np.ndarray) -> Trials:
    """Return decisions by scores (P,) that pairs of classes (P, 2) are of the same class."""
    same, nothing = classes[:, 0] == classes[:, 1], np.zeros(len(scores))
    return Trials(nothing, scores, same, ~same, classes, classes)


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
