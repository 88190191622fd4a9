"""Reliability of probabilities: expected calibration error, Brier score, and shares per bin, with their intervals."""

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from dmlkit.metrics.statistics import LEAST_CLASSES, effective_number, share_interval, tail_of

BINS, RESAMPLES = 10, 1000
Share = Annotated[float, Field(ge=0, le=1)]
Ends = tuple[Share, Share]
Values = NDArray[np.float64]


class ReliabilityBin(BaseModel, frozen=True, extra="forbid"):
    """Answers of similar probability."""

    probability: Share
    """Their mean probability."""
    share: Share
    """The share of them that is right."""
    interval: Ends | None
    """95 % interval of the share that many more classes would show; null for fewer than 5 classes."""


class Reliability(BaseModel, frozen=True, extra="forbid"):
    """How far probabilities are from the shares of answers that are right, on classes that did not fit them.

    If answers of both kinds are equally frequent.
    """

    error: Share
    """Expected calibration error: mean distance between probability and share over bins of equal weight."""
    error_interval: Ends | None
    """95 % interval of the error that many more classes would show, for a fit to as many classes as here; null for
    fewer than 5 classes."""
    brier: Share
    """Mean squared distance between the probability and 1 or 0 for right or wrong."""
    brier_interval: Ends | None
    bins: tuple[ReliabilityBin, ...]
    """Up to 10 bins of equal weight, ascending in probability."""


def balanced(counts: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Scale counts (M,) so that both kinds (M,) bool have the same sum; a kind without counts is ignored.

    Example:
        >>> balanced(np.ones(4), np.array([True, False, False, False]))
        array([2.        , 0.66666667, 0.66666667, 0.66666667])
    """
    first, total = float(counts[kinds].sum()), float(counts.sum())
    if first in (0.0, total):
        return counts
    return counts * np.where(kinds, total / (2 * first), total / (2 * (total - first)))


def measure_reliability(
    probabilities: np.ndarray, right: np.ndarray, kinds: np.ndarray, classes: np.ndarray
) -> Reliability:
    """Compare probabilities with what was right, with bootstrap intervals over classes.

    The interval of a bin's share is Wilson's, for the number of independent answers that would have the variance of the
    bootstrap (Korn and Graubard 1998): the percentiles of a bin whose answers are all right would have no width. With
    few classes all intervals are wider, see `dmlkit.metrics.statistics.tail_of`.

    Args:
        probabilities: (M,) probabilities, each by a fit to other classes.
        kinds: (M,) bool, two kinds of answers that have the same weight.
        classes: (M,) int64, the class of each answer, or (M, 2), the classes of a pair. A class that is drawn twice
            counts twice; its copies make no pairs with each other.
    """
    codes = np.unique(classes, return_inverse=True)[1].reshape(len(classes), -1)
    count = int(codes.max()) + 1
    order = np.argsort(probabilities, kind="stable")
    predicted, true, kinds, codes = probabilities[order], right[order].astype(float), kinds[order], codes[order]
    weights = balanced(np.ones(len(predicted)), kinds)
    bins = np.minimum((weights.cumsum() / weights.sum() * BINS).astype(int), BINS - 1)
    starts = np.unique(bins, return_index=True)[1]
    values = np.stack([np.ones(len(predicted)), predicted, true, (predicted - true) ** 2])
    clipped = np.clip(predicted, 1e-12, 1 - 1e-12)  # finite logits
    inputs = np.stack([np.log(clipped / (1 - clipped)), np.ones(len(predicted))], axis=1)
    slopes = np.add.reduceat((weights * predicted * (1 - predicted))[:, None] * inputs, starts) / weights.sum()

    def counted(times: np.ndarray) -> Values:
        """Return the weights (M,) of the answers if each class is there so many times."""
        counts = times[codes[:, 0]]
        if codes.shape[1] == 2:
            counts = counts * np.where(codes[:, 0] == codes[:, 1], 1.0, times[codes[:, 1]])
        return balanced(counts, kinds)

    def sums(times: np.ndarray) -> Values:
        """Return sums (4, bins) of the values, if each class is there so many times."""
        return np.add.reduceat(values * counted(times), starts, axis=1)

    def moved(times: np.ndarray) -> Values:
        """Return the change (bins,) of the mean probability if slope and offset of the logits are fitted to a draw."""
        counts = counted(times)
        excess = inputs.T @ ((counts / counts.sum() - weights / weights.sum()) * (predicted - true))
        hessian = (inputs.T * (counts * predicted * (1 - predicted))) @ inputs / counts.sum()
        return -slopes @ np.linalg.pinv(hessian, hermitian=True) @ excess  # a Newton step

    measured = sums(np.ones(count))
    error, brier = _figures(measured)
    generator = np.random.default_rng(0)
    draws = [np.bincount(generator.integers(count, size=count), minlength=count) for _ in range(RESAMPLES)]
    draws = [times for times in draws if counted(times).any()]  # a draw of one class has no pairs of two
    drawn = np.stack([sums(times) for times in draws])
    ends: list[Ends | None] = [None, None]
    if count >= LEAST_CLASSES:
        tail = tail_of(float(count))
        low, high = np.quantile([_figures(draw)[1] for draw in drawn], [tail, 1 - tail])
        ends = [
            _error_interval(measured, drawn, np.stack([moved(times) for times in draws]), tail),
            (float(low), float(high)),
        ]
    total, sum_predicted, sum_true, _ = measured
    reliability_bins: list[ReliabilityBin] = []
    for number, start in enumerate(starts):
        share = float(sum_true[number] / total[number])
        in_bin = slice(start, starts[number + 1] if number + 1 < len(starts) else len(predicted))
        interval = None
        if count >= LEAST_CLASSES:
            shares = drawn[drawn[:, 0, number] > 0, 2, number] / drawn[drawn[:, 0, number] > 0, 0, number]
            spread = np.bincount(codes[in_bin].ravel(), minlength=count)
            clusters = max(2.0, effective_number(torch.from_numpy(spread).double()))
            interval = share_interval(share, float(np.var(shares)), clusters, in_bin.stop - in_bin.start)
        reliability_bins.append(
            ReliabilityBin(probability=float(sum_predicted[number] / total[number]), share=share, interval=interval)
        )
    return Reliability(
        error=error, error_interval=ends[0], brier=brier, brier_interval=ends[1], bins=tuple(reliability_bins)
    )


def _figures(sums: Values) -> tuple[float, float]:
    """Return the calibration error and the Brier score of sums (4, bins)."""
    total, predicted, true, squared = sums
    return float(np.abs(predicted - true).sum() / total.sum()), float(squared.sum() / total.sum())


def _error_interval(measured: Values, drawn: Values, steps: Values, tail: float) -> Ends:
    """Return the 95 % interval of the calibration error over many more classes.

    The distances in the bins have two parts: the chance with which the probabilities were fitted to these classes, and
    what no slope and offset fits. The first part does not show in the classes of the fit; its size is that of the steps
    of the draws. The second part is measured, but noise adds to it: each draw gives the size from which its noise leads
    to the measured distances. A size and a step of independent draws give one possible error. Percentiles of the
    bootstrap alone would not do, since noise only adds to a mean of distances.

    Args:
        measured, drawn: sums (4, bins) and of each draw (draws, 4, bins).
        steps: (draws, bins) changes of the mean probabilities, see `measure_reliability`.
        tail: share of the possible errors beyond each end.
    """
    gaps = (measured[1] - measured[2]) / measured[0].sum()
    noise = (drawn[:, 1] - drawn[:, 2]) / drawn[:, 0].sum(1, keepdims=True) - gaps + steps  # after the step
    length = np.linalg.norm(gaps)
    direction = gaps / length if length else gaps
    along = noise @ direction
    discriminant = along**2 + length**2 - (noise**2).sum(1)  # |size * direction + noise| = length
    sizes = np.where(discriminant > 0, np.sqrt(np.maximum(discriminant, 0)) - along, 0).clip(0)
    least = np.abs(np.quantile(sizes, tail) * direction + steps).sum(1)
    errors = np.abs(sizes[:, None] * direction + np.roll(steps, 1, axis=0)).sum(1)
    low, high, error = float(np.quantile(least, tail)), float(np.quantile(errors, 1 - tail)), float(np.abs(gaps).sum())
    return min(low, error), min(max(high, error), 1.0)
