"""Probability that two images are of the same class: a logistic function of their similarity (Platt 1999).

It is fitted to pairs of validation images, and holds if every second pair is of the same class. Pairs of the same class
are rare among all pairs, so that the share to expect depends on where the pairs come from; `probability_at` takes it.
"""

from math import log

import numpy as np
import torch
from torch import Tensor

from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.probability import Trials
from dmlkit.metrics.base import Points
from dmlkit.metrics.statistics import LEAST_CLASSES
from dmlkit.run_folder.threshold import PairProbability

MOST = 2**14  # pairs of each kind: the variance of more pairs is small compared with that of the classes


def probability_at(score: float, given: PairProbability, prior: float = 0.5) -> float:
    """Return the probability that two images are of the same class.

    Args:
        prior: share of the pairs that are of the same class, in (0, 1).

    Example:
        >>> given = PairProbability(slope=2.0, offset=-1.0, reliability=None)
        >>> probability_at(0.5, given), round(probability_at(0.5, given, prior=0.1), 3)
        (0.5, 0.1)
    """
    return Sigmoid(0.0, given.slope, given.offset + log(prior / (1 - prior))).at(None, score)


def fit_pair_probability(points: Points) -> PairProbability:
    """Fit the probability to pairs of points of classes that the model was not trained on, at most `MOST` of a kind."""
    pairs = sampled_pairs(points.labels)
    sides = (points.embeddings[rows.to(points.embeddings.device)].double() for rows in pairs)
    scores = points.manifold.paired_similarity(*sides).cpu().numpy()
    return fit_scores(scores, points.labels.cpu()[torch.stack(pairs, 1)].numpy())


def fit_scores(scores: np.ndarray, classes_of: np.ndarray) -> PairProbability:
    """Fit the probability to the scores (P,) float64 of pairs of images of classes (P, 2) int64."""
    same, nothing = classes_of[:, 0] == classes_of[:, 1], np.zeros(len(scores))
    trials = Trials(nothing, scores, same, ~same, classes_of, classes_of)
    fitted, classes = trials.fit(), len(np.unique(trials.classes))
    reliability = trials.reliability() if classes >= LEAST_CLASSES else None
    return PairProbability(slope=fitted.score_slope, offset=fitted.offset, reliability=reliability)


def sampled_pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Draw pairs of points, at most `MOST` of the same class and as many of different classes; all if there are fewer.

    Returns:
        Rows (P,) of the first and of the second points.
    """
    classes, generator = labels.cpu().numpy(), np.random.default_rng(0)
    order, rows = np.argsort(classes, kind="stable"), np.arange(len(classes))
    ordered = classes[order]
    ends = np.searchsorted(ordered, ordered, side="right")
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for starts, counts in ((rows + 1, ends - rows - 1), (ends, len(rows) - ends)):  # partners of each row
        last = counts.cumsum()
        drawn = np.arange(last[-1]) if last[-1] <= MOST else generator.choice(last[-1], MOST, replace=False)
        first = np.searchsorted(last, drawn, side="right")
        found.append((order[first], order[starts[first] + drawn - (last - counts)[first]]))
    firsts, seconds = (torch.from_numpy(np.concatenate(side)) for side in zip(*found, strict=True))
    return firsts, seconds
