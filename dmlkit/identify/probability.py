"""Probability that a guess is right: a sigmoid of margin and score, fitted to decisions whose right answer is known.

The decisions are on labeled images, each once without itself and once without its whole label, as an image of a label
that is not there. Both kinds have the same weight: the probability holds if every second image has none of the labels.
A calibrated gallery keeps it, see `Identification`; otherwise it is estimated.
"""

from collections.abc import Iterable
from copy import copy
from itertools import combinations_with_replacement
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.decisions import Decider
from dmlkit.metrics.reliability import Reliability, balanced, measure_reliability
from dmlkit.metrics.statistics import LEAST_CLASSES

SAMPLE = 500  # labeled images on which a probability is estimated
SAMPLE_MATCHED = 200  # the same where matches are compared, which take 8 ms each
LEAST = 10  # of them; fewer give no probability
FOLDS = 5


class Trials(NamedTuple):
    """Decisions on M images, or groups of them, whose right answer is known."""

    margins: np.ndarray  # (M,) float64; 0 where there is no other label
    scores: np.ndarray  # (M,) float64
    right: np.ndarray  # (M,) bool
    absent: np.ndarray  # (M,) bool, whether the gallery had no image of the label
    classes: np.ndarray  # (M,) int64, the classes of the images; (M, 2) those of pairs of images
    guesses: np.ndarray  # (M,) int64, the labels that are guessed

    @classmethod
    def of(
        cls,
        decider: Decider,
        points: Tensor,
        classes: np.ndarray,
        own_rows: np.ndarray | None = None,
        *,
        absent: bool,
        numbers: Tensor | None = None,
    ) -> Self:
        """Decide on points (M, D) or groups of them (M, n, D), see `Decider.decide`.

        Args:
            classes: (M,) codes of their labels; unless absent, those of the decider.
            own_rows: (M,) their rows, if they are labeled points themselves.
            absent: whether the decider has no image of their labels, or shall leave them out.
        """
        decisions = decider.decide(points, own_rows, absent=absent and own_rows is not None, numbers=numbers)
        codes = np.array([decision.code for decision in decisions], np.int64)
        return cls(
            np.array([decision.margin or 0.0 for decision in decisions]),
            np.array([decision.score for decision in decisions]),
            np.zeros(len(codes), bool) if absent else codes == classes,
            np.full(len(codes), absent),
            classes,
            codes,
        )

    @classmethod
    def joined(cls, several: Iterable[Self]) -> Self:
        """Return the decisions of at least one series of trials."""
        return cls(*(np.concatenate(columns) for columns in zip(*several, strict=True)))

    def chosen(self, rows: np.ndarray) -> Self:
        """Return some of the decisions."""
        return type(self)(*(column[rows] for column in self))

    def fit(self, *, by_score: bool = False) -> Sigmoid:
        """Fit the probability, or one that ignores the margin; both kinds of images have the same weight."""
        margins = np.zeros_like(self.margins) if by_score else self.margins
        return fit_sigmoid(margins, self.scores, self.right, balanced(np.ones(len(self.absent)), self.absent))

    def held_out_probabilities(self, *, by_score: bool = False) -> np.ndarray:
        """Return the probabilities (M,), each by a fit to images, or pairs of them, all of whose classes are others."""
        classes = np.unique(self.classes, return_inverse=True)[1].reshape(len(self.classes), -1)
        folds = (np.random.default_rng(0).permutation(classes.max() + 1) % FOLDS)[classes]
        probabilities = np.empty(len(folds))
        for first, last in combinations_with_replacement(range(FOLDS), 2):
            tested = (folds.min(1) == first) & (folds.max(1) == last)
            if tested.any():
                others = self.chosen(np.flatnonzero(~np.isin(folds, (first, last)).any(1)))
                fitted = self if others.absent.all() else others  # few classes: no other has images in the gallery
                probabilities[tested] = fitted.fit(by_score=by_score).of(self.margins[tested], self.scores[tested])
        return probabilities

    def reliability(self, *, by_score: bool = False) -> Reliability:
        """Compare probabilities of fits to other classes with what was right; both kinds have the same weight."""
        probabilities = self.held_out_probabilities(by_score=by_score)
        return measure_reliability(probabilities, self.right, self.absent, self.classes)


class Strangers(NamedTuple):
    """Points whose labels are not in a gallery."""

    points: Tensor  # (M, D), or (M, n, D) for groups of n points
    classes: np.ndarray  # (M,) int64 from 0
    numbers: Tensor | None = None  # (M,) or (M, n) int64, those of the images for a second similarity

    def together(self, size: int, seed: int, most: int) -> Self:
        """Return random groups of ``size`` points of one class, (G, size, D), at most so many."""
        rows = np.arange(len(self.classes)) if size == 1 else random_groups(self.classes, size, seed)
        first = rows.reshape(len(rows), size)[:, 0]
        drawn = np.arange(len(first))
        drawn = drawn if len(first) <= most else drawn_rows(drawn, self.classes[first], most)
        picked, numbers = torch.from_numpy(rows[drawn]), self.numbers
        return type(self)(self.points[picked], self.classes[first[drawn]], None if numbers is None else numbers[picked])


NO_STRANGERS = Strangers(torch.empty(0, 1), np.empty(0, np.int64))


def trials_of(
    decider: Decider, size: int, most: int, is_trained: np.ndarray | None = None, strangers: Strangers = NO_STRANGERS
) -> tuple[Trials, bool]:
    """Decide on images whose answer is known, or on random groups of ``size`` images of one label.

    Images of the gallery are decided on without their own group, and without their whole label, like strangers. Several
    draws of groups have `SAMPLE` of them or more; where matches are compared, each image is in one group at most.

    Args:
        most: how many are decided on of each kind and draw.
        is_trained: (L,) bool, labels that the model was trained on, which count only if there are fewer than 5 others.

    Returns:
        The decisions, and whether labels that the model was trained on are among them.
    """
    codes, labels = decider.codes, len(decider.sizes)
    trained = np.zeros(labels, bool) if is_trained is None else is_trained
    draws = 1 if size == 1 or decider.rescored else min(size, -(-SAMPLE * size // len(codes)))
    series, is_optimistic = list[Trials](), False
    for seed in range(draws):
        part, groups = together(decider, size, seed)
        first, others = groups[:, 0], strangers.together(size, seed, most)
        untrained, repeated = ~trained[codes[first]], are_repeated(part)[first]
        optimistic = len(np.unique(codes[first[repeated & untrained]])) < LEAST_CLASSES and bool(trained.any())
        is_few = len(np.unique(codes[~trained[codes]])) + len(np.unique(others.classes)) < LEAST_CLASSES
        is_optimistic |= optimistic or (is_few and bool(trained.any()))
        kinds = [(repeated if optimistic else repeated & untrained, False)]
        kinds += [(np.ones(len(first), bool) if is_few else untrained, True)] if labels > 1 else []
        for allowed, absent in kinds:
            drawn = drawn_rows(np.flatnonzero(allowed), codes[first], most)
            rows, points = first[drawn], part.points_of(groups[drawn])
            numbers = part.numbers[torch.from_numpy(groups[drawn])].reshape(points.shape[:-1])
            series.append(Trials.of(part, points, codes[rows], rows, absent=absent, numbers=numbers))
        if len(others.classes):
            points, classes, numbers = others
            series.append(Trials.of(part, points, labels + classes, absent=True, numbers=numbers))
    return Trials.joined(series), is_optimistic


def together(decider: Decider, size: int, seed: int) -> tuple[Decider, np.ndarray]:
    """Draw random groups of ``size`` images of one label; single images are all, in their order.

    A group has one image of each of ``size`` of the decider's own groups, e.g. no two near-duplicates. Images of a
    label that do not fill a group are left over.

    Returns:
        A decider that leaves the images of a group out together, and their rows (G, size).
    """
    if size == 1:
        return decider, np.arange(len(decider.codes))[:, None]
    one_each = np.random.default_rng(seed).permutation(len(decider.codes))
    one_each = one_each[np.unique(decider.groups[one_each], return_index=True)[1]]
    rows = one_each[random_groups(decider.codes[one_each], size, seed)]
    merged_decider, merged = copy(decider), np.arange(decider.groups.max() + 1)
    merged[decider.groups[rows]] = decider.groups[rows[:, :1]]
    merged_decider.groups = merged[decider.groups]
    return merged_decider, rows[rows[:, 0].argsort()]


def are_repeated(decider: Decider) -> np.ndarray:
    """Return whether the label of each image (N,) has images outside of its group."""
    pairs = np.unique(np.stack([decider.codes, decider.groups]), axis=1)
    return np.bincount(pairs[0], minlength=len(decider.sizes))[decider.codes] > 1


def random_groups(codes: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Divide items at random into groups (G, size) of one code each; those that do not fill a group are left out.

    Example:
        >>> rows = random_groups(np.array([7, 8, 7, 8, 7]), 2, seed=0)
        >>> rows.shape, np.array([7, 8, 7, 8, 7])[rows].tolist()
        ((2, 2), [[7, 7], [8, 8]])
    """
    order = np.random.default_rng(seed).permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    counts = np.unique(codes, return_counts=True)[1]
    position = np.arange(len(codes)) - np.repeat(counts.cumsum() - counts, counts)  # within its code
    return order[position < np.repeat(counts - counts % size, counts)].reshape(-1, size)


def fit_sigmoid(
    margins: np.ndarray, scores: np.ndarray, right: np.ndarray, weights: np.ndarray | None = None
) -> Sigmoid:
    """Fit the probability of being right, by maximum likelihood with the targets of Platt (1999).

    His targets, (n + 1) / (n + 2) for n right ones and 1 / (m + 2) for m wrong ones, keep the slopes finite where the
    right ones can be separated. The probability never falls with the margin or the score.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    positive, negative = int(right.sum()), int((~right).sum())
    targets = np.where(right, (positive + 1) / (positive + 2), 1 / (negative + 2))
    features = np.stack([margins, scores], axis=1)
    center, scale = features.mean(axis=0), features.std(axis=0)
    scale[scale == 0] = 1.0
    scaled = (features - center) / scale
    sample_weights = np.ones(len(right)) if weights is None else weights

    def loss(slopes: np.ndarray) -> tuple[float, np.ndarray]:
        logits = scaled @ slopes[:2] + slopes[2]
        excess = sample_weights * (expit(logits) - targets)
        value = sample_weights @ (np.logaddexp(0, logits) - targets * logits)
        return float(value), np.append(excess @ scaled, excess.sum())

    bounds = [(0, None), (0, None), (None, None)]
    options = {"ftol": 1e-12, "gtol": 1e-8}
    solution = minimize(loss, np.zeros(3), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    slopes = solution[:2] / scale
    return Sigmoid(float(slopes[0]), float(slopes[1]), float(solution[2] - slopes @ center))


def estimate_probability(decider: Decider, size: int = 1) -> Sigmoid | None:
    """Return the probability of guesses on ``size`` images, from a sample of the labeled ones.

    Return None for fewer than `LEAST` groups of images whose label others have too, or for one label.
    """
    if len(decider.sizes) < 2:
        return None
    trials = trials_of(decider, size, SAMPLE_MATCHED // size if decider.rescored else SAMPLE)[0]
    return None if (~trials.absent).sum() < LEAST else trials.fit()


def drawn_rows(rows: np.ndarray, codes: np.ndarray, most: int) -> np.ndarray:
    """Draw at most so many of some rows, in the order of their codes."""
    drawn = np.random.default_rng(0).permutation(rows)[:most]
    return drawn[np.argsort(codes[drawn], kind="stable")]
