"""Decisions of the nearest images, and the probability that one is right. This module imports no torch."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Rule = Literal["nearest", "vote", "mean"]


class Decision(NamedTuple):
    """Decision on one image."""

    code: int  # of the label
    score: float  # similarity of the label's nearest picture, or of its mean
    margin: float | None  # the score less that of the best other label; None where there is no other


def vote(near: Sequence[int], similarities: Sequence[float], voters: int = 1) -> Decision:
    """Return the label of most voters, if tied that of the nearest, with its score and margin.

    Args:
        near: labels of images as integers, those of the nearest first; with several labels if there are several.
        similarities: similarities of these images.
        voters: number of images that vote.

    Example:
        >>> vote([7, 8, 8], [0.75, 0.5, 0.25], voters=3)
        Decision(code=8, score=0.5, margin=-0.25)
    """
    winner = Counter(near[:voters]).most_common(1)[0][0]  # in the order in which they come first
    others = [similarity for code, similarity in zip(near, similarities, strict=True) if code != winner]
    score = similarities[near.index(winner)]
    return Decision(winner, score, score - others[0] if others else None)


class Sigmoid(NamedTuple):
    """Probability 1 / (1 + exp(-z)) with z = margin_slope * margin + score_slope * score + offset.

    Example:
        >>> Sigmoid(2.0, 1.0, -1.0).at(0.0, 1.0)
        0.5
    """

    margin_slope: float
    score_slope: float
    offset: float

    def at(self, margin: float | None, score: float) -> float:
        """Return the probability of a guess; without another label, whose margin is None, from the score."""
        return float(self.of(np.array([margin or 0.0]), np.array([score]))[0])

    def of(self, margins: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities (N,) of guesses; without scipy, whose import takes as long as that of NumPy."""
        logits = self.margin_slope * margins + self.score_slope * scores + self.offset
        small = np.exp(-np.abs(logits))  # never overflows
        return np.where(logits < 0, small, 1.0) / (1 + small)
