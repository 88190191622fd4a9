"""Probability that a guess is right: a sigmoid of margin and score, fitted to decisions whose right answer is known.

The decisions are on labeled images, each once without itself and once without its whole label, as an image of a label
that is not there. Both kinds have the same weight: the probability holds if every second image has none of the labels.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.decisions import Decider
from dmlkit.metrics.reliability import balanced

SAMPLE = 500  # labeled images on which the probability is estimated
SAMPLE_MATCHED = 200  # the same where matches are compared, which take 8 ms each
LEAST = 10  # of them; fewer give no probability


class Trials(NamedTuple):
    """Decisions on M images whose right answer is known."""

    margins: np.ndarray  # (M,) float64; 0 where there is no other label
    scores: np.ndarray  # (M,) float64
    right: np.ndarray  # (M,) bool
    absent: np.ndarray  # (M,) bool, whether the gallery had no image of the label
    classes: np.ndarray  # (M,) int64, the classes of the images
    guesses: np.ndarray  # (M,) int64, the labels that are guessed

    @classmethod
    def of(
        cls, decider: Decider, points: Tensor, classes: np.ndarray, own: np.ndarray | None = None, *, absent: bool
    ) -> Self:
        """Decide on points (M, D), see `Decider.decide`.

        Args:
            classes: (M,) codes of their labels; unless absent, those of the decider.
            own: (M,) their rows, if they are labeled points themselves.
            absent: whether the decider has no image of their labels, or shall leave them out.
        """
        found = decider.decide(points, own, absent=absent and own is not None)
        codes = np.array([decision.code for decision in found], np.int64)
        return cls(
            np.array([decision.margin or 0.0 for decision in found]),
            np.array([decision.score for decision in found]),
            np.zeros(len(codes), bool) if absent else codes == classes,
            np.full(len(codes), absent),
            classes,
            codes,
        )

    def joined(self, others: Self) -> Self:
        """Return these and other decisions."""
        return self.all([self, others])

    @classmethod
    def all(cls, several: Iterable[Self]) -> Self:
        """Return the decisions of at least one series of trials."""
        return cls(*(np.concatenate(columns) for columns in zip(*several, strict=True)))

    def chosen(self, rows: np.ndarray) -> Self:
        """Return some of the decisions."""
        return type(self)(*(column[rows] for column in self))

    @property
    def weights(self) -> np.ndarray:
        """Weights (M,) with mean 1, with which both kinds have the same sum; all 1 if there is one kind."""
        return balanced(np.ones(len(self.absent)), self.absent)

    def fit(self, *, by_score: bool = False) -> Sigmoid:
        """Fit the probability, or one that ignores the margin."""
        margins = np.zeros_like(self.margins) if by_score else self.margins
        return fit_sigmoid(margins, self.scores, self.right, self.weights)


def fit_sigmoid(
    margins: np.ndarray, scores: np.ndarray, right: np.ndarray, weights: np.ndarray | None = None
) -> Sigmoid:
    """Fit the probability of being right, by maximum likelihood with the targets of Platt (1999).

    His targets, (n + 1) / (n + 2) for n right ones and 1 / (m + 2) for m wrong ones, keep the slopes finite where the
    right ones can be separated. The probability never falls with the margin or the score.

    Args:
        margins, scores: (N,) float64.
        right: (N,) bool.
        weights: (N,) positive. Default: 1 each.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    positive, negative = int(right.sum()), int((~right).sum())
    targets = np.where(right, (positive + 1) / (positive + 2), 1 / (negative + 2))
    features = np.stack([margins, scores], axis=1)
    center, scale = features.mean(axis=0), features.std(axis=0)
    scale[scale == 0] = 1.0
    scaled = (features - center) / scale
    given = np.ones(len(right)) if weights is None else weights

    def loss(slopes: np.ndarray) -> tuple[float, np.ndarray]:
        logits = scaled @ slopes[:2] + slopes[2]
        excess = given * (expit(logits) - targets)
        value = given @ (np.logaddexp(0, logits) - targets * logits)
        return float(value), np.append(excess @ scaled, excess.sum())

    bounds = [(0, None), (0, None), (None, None)]
    options = {"ftol": 1e-12, "gtol": 1e-8}
    found = minimize(loss, np.zeros(3), jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    slopes = found[:2] / scale
    return Sigmoid(float(slopes[0]), float(slopes[1]), float(found[2] - slopes @ center))


def estimate_probability(decider: Decider, size: int = 1) -> Sigmoid | None:
    """Return the probability of guesses on ``size`` images, from a sample of those whose label others have too.

    Return None for fewer than `LEAST` trials or two labels.
    """
    if len(decider.sizes) < 2:
        return None
    found: list[Trials] = []
    for _, part in tried_together(decider, size):
        rows = repeated_rows(part, SAMPLE_MATCHED // size if part.compares_matches else SAMPLE)
        points, classes = part.trial_points(rows), part.codes[rows]
        found += [Trials.of(part, points, classes, rows, absent=absent) for absent in (False, True)]
    return None if sum(len(trials.right) for trials in found) < 2 * LEAST else Trials.all(found).fit()


def tried_together(decider: Decider, size: int) -> Iterator[tuple[int, Decider]]:
    """Yield a seed and a decider that is tried on random groups of ``size`` images, `SAMPLE` groups or more in all.

    Where matches are compared, each image is in one group at most.
    """
    if size == 1:
        yield 0, decider
        return
    draws = 1 if decider.compares_matches else min(size, -(-SAMPLE * size // len(decider.codes)))
    for seed in range(max(1, draws)):
        yield seed, decider.together(size, seed)


def repeated_rows(decider: Decider, most: int, allowed: np.ndarray | None = None) -> np.ndarray:
    """Draw rows whose label has images outside of their group, at most so many, in the order of their labels.

    They are drawn from the rows allowed, (N,) bool. Default: all.
    """
    pairs = np.unique(np.stack([decider.codes, decider.groups]), axis=1)
    repeated = (np.bincount(pairs[0], minlength=len(decider.sizes))[decider.codes] > 1) & decider.tried
    return drawn_rows(np.flatnonzero(repeated if allowed is None else repeated & allowed), decider.codes, most)


def drawn_rows(rows: np.ndarray, codes: np.ndarray, most: int) -> np.ndarray:
    """Draw at most so many of some rows, in the order of their codes."""
    drawn = np.random.default_rng(0).permutation(rows)[:most]
    return drawn[np.argsort(codes[drawn], kind="stable")]
