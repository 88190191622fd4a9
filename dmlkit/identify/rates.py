"""Rates of open-set identification: trials on images of absent and present labels, their threshold and intervals.

Images of labels that are not in the gallery (strangers) calibrate it, and are kept for the next calibration.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from pydantic import BaseModel, NonNegativeInt

from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import command_word
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.decisions import Decider, random_groups
from dmlkit.identify.probability import SAMPLE_MATCHED, Trials, drawn_rows, repeated_rows
from dmlkit.identify.scored import MatchedSpace, matched_queries
from dmlkit.manifolds.base import check_points
from dmlkit.metrics.reliability import Reliability, Share, measure_reliability
from dmlkit.metrics.statistics import LEAST_CLASSES
from dmlkit.nearest.scored import PlacedSpace
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointSet, PointsInMemory, all_points
from dmlkit.vectors.progress_bar import Bar

MOST = 4000  # images of each kind that are decided on: 0.5 s in a gallery of 10 000
MOST_MATCHED = 1000  # the same where matches are compared, which take 8 ms each
MOST_SIZED = 2**18  # images in memory while smaller galleries are tried
FOLDS, DRAWS = 5, 3
LARGER = 10  # times as many labels, to which the rates are extrapolated


class Rate(BaseModel, frozen=True, extra="forbid"):
    """Rate with its 95 % interval over as many other labels; null for fewer than 5 labels."""

    rate: Share
    interval: tuple[Share, Share] | None
    labels: NonNegativeInt
    images: NonNegativeInt


class SizedRates(BaseModel, frozen=True, extra="forbid"):
    """Rates at the same threshold with fewer labels in the gallery, or extrapolated to more."""

    labels: NonNegativeInt
    fpir: Share | None
    """Null for an extrapolation from a rate that is 0 or 1."""
    fnir: Share | None


class Strangers(NamedTuple):
    """Points whose labels are not in a gallery."""

    points: torch.Tensor  # (M, D), or (M, n, D) for groups of n points
    classes: np.ndarray  # (M,) int64 from 0

    def drawn(self, most: int) -> Self:
        """Return at most so many of the points."""
        if len(self.classes) <= most:
            return self
        rows = drawn_rows(np.arange(len(self.classes)), self.classes, most)
        return type(self)(self.points[torch.from_numpy(rows)], self.classes[rows])

    def together(self, size: int, seed: int) -> Self:
        """Return random groups of ``size`` points of one class, (G, size, D)."""
        if size == 1:
            return self
        groups = random_groups(self.classes, size, seed)
        return type(self)(self.points[torch.from_numpy(groups)], self.classes[groups[:, 0]])


def most_trials(decider: Decider, *, again: bool = False) -> int:
    """Return how many images, or groups of images, of each kind are decided on at most, see `trials_on`."""
    if not decider.compares_matches:
        return MOST
    return (SAMPLE_MATCHED if again else MOST_MATCHED) // decider.size


def trials_on(
    decider: Decider, is_trained: np.ndarray, strangers: Strangers, *, again: bool = False
) -> tuple[Trials, bool]:
    """Decide on images whose answer is known; return also whether some labels of either kind were trained on.

    Args:
        is_trained: (L,) bool, which labels were trained on.
        again: decide on fewer images where matches are compared, because this is one of several measurements.
    """
    most = most_trials(decider, again=again)
    strangers = strangers.drawn(most)
    codes, labels = decider.codes, len(decider.sizes)
    untrained = ~is_trained[codes]

    def own(rows: np.ndarray, *, absent: bool) -> Trials:
        return Trials.of(decider, decider.trial_points(rows), codes[rows], rows, absent=absent)

    rows = repeated_rows(decider, most, untrained)
    is_optimistic = len(np.unique(codes[rows])) < LEAST_CLASSES and bool(is_trained.any())
    found = own(repeated_rows(decider, most) if is_optimistic else rows, absent=False)
    few = len(np.unique(codes[untrained])) + len(np.unique(strangers.classes)) < LEAST_CLASSES
    allowed = np.ones(len(codes), bool) if few else untrained
    if labels > 1 and allowed.any():
        found = found.joined(own(drawn_rows(np.flatnonzero(allowed & decider.tried), codes, most), absent=True))
    if len(strangers.points):
        found = found.joined(Trials.of(decider, strangers.points, labels + strangers.classes, absent=True))
    return found, is_optimistic or (few and bool(is_trained.any()))


class Fit(NamedTuple):
    """Probability of a guess, the threshold for it, and the errors that it makes."""

    sigmoid: Sigmoid
    threshold: float
    accepted: np.ndarray  # (A,) bool, which images of absent labels get a label, see `threshold_for`
    missed: np.ndarray  # (P,) bool, which images of present labels do not get their own


def best_fit(trials: Trials, fpir: float) -> Fit:
    """Fit the probability to margin and score, or to the score alone if that misses fewer images at the same FPIR.

    Which of them does depends on the gallery, so both are tried.
    """
    fits: list[Fit] = []
    for by_score in (False, True):
        sigmoid = trials.fit(by_score=by_score)
        said = sigmoid.of(trials.margins, trials.scores)
        threshold, accepted = threshold_for(said[trials.absent], trials.chosen(trials.absent), fpir)
        missed = ~(trials.right & (said >= threshold))[~trials.absent]
        fits.append(Fit(sigmoid, threshold, accepted, missed))
    return min(fits, key=lambda fit: float(fit.missed.mean()))


def held_out_probabilities(trials: Trials, *, by_score: bool = False) -> np.ndarray:
    """Return the probabilities (M,), each by a fit to other classes; see `Trials.fit`."""
    classes = np.unique(trials.classes, return_inverse=True)[1]
    fold = np.random.default_rng(0).permutation(classes.max() + 1)[classes] % FOLDS
    found = np.empty(len(fold))
    for number in range(FOLDS):
        own = fold == number
        others = trials.chosen(~own)
        fitted = trials if others.absent.all() else others  # few classes: no other has images in the gallery
        found[own] = fitted.fit(by_score=by_score).of(trials.margins[own], trials.scores[own])
    return found


def threshold_for(values: np.ndarray, trials: Trials, fpir: float) -> tuple[float, np.ndarray]:
    """Choose the threshold that a share ``fpir`` of the images of other absent labels is expected to reach, or less.

    A threshold that this share of these images reaches would be too low, because it is fitted to them: 0.057 of others
    reached it with 20 labels where 0.05 was asked for. So each label meets the threshold that the others choose,
    without the images whose guess is this label, for the largest share that leads to ``fpir``.

    Args:
        values: (M,) scores or probabilities.
        trials: decisions on the M images, whose labels are absent.

    Returns:
        The threshold, and which images reach that of the others, (M,) bool. They are more than asked for if the highest
        values are of one label; the threshold is then above all values.
    """
    ordered, reach = np.sort(values), np.empty(len(values))
    for code in np.unique(trials.classes):
        own = trials.classes == code
        left_out = own | (trials.guesses == code)
        reach[own] = _reach(values[own], ordered) - _reach(values[own], np.sort(values[left_out]))
        reach[own] /= max(1, len(values) - left_out.sum())
    limit = np.sort(reach)[int(fpir * len(values) + 1e-9)]
    accepted = (reach < limit) | (reach == 0)
    count = int(reach[accepted].max(initial=0) * len(values) + 1e-9)
    return float(np.nextafter(ordered[-1 - count], np.inf)), accepted


def _reach(thresholds: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return how many ascending values (M,) reach each threshold (N,)."""
    return len(ordered) - np.searchsorted(ordered, thresholds)


def rate_of(errors: np.ndarray, trials: Trials) -> Rate:
    """Return the rate of errors with its 95 % interval: the rates that as many other labels would show.

    These labels and others are samples, so that the variance of the difference of their rates is twice that of the
    rate. The interval is the score interval of two binomial samples (Krishnamoorthy & Peng 2011) for as many
    independent images as have this variance (Korn & Graubard 1998). Images of one label count together, and so do those
    of two labels that are taken for each other. Few labels, or few with most of the errors, estimate the variance
    roughly: the quantile is that of Student's t with the degrees of freedom of Satterthwaite (1946).

    Args:
        errors: (M,) bool.
        trials: decisions on the M images.
    """
    from scipy.special import stdtrit

    rate, images = float(errors.mean()), len(errors)
    codes, sizes = np.unique(trials.classes, return_inverse=True, return_counts=True)[1:]
    count = len(sizes)
    if count < LEAST_CLASSES:
        return Rate(rate=rate, interval=None, labels=count, images=images)
    size, freedom = images**2 / (sizes @ sizes), count - 1.0
    if 0 < rate < 1:
        squares = np.bincount(codes, errors - rate) ** 2
        total = max(squares.sum(), 1e-9)
        together = total + max(0.0, _mutual(errors - rate, trials))
        size = rate * (1 - rate) * images**2 * (count - 1) / (count * together)
        kurtosis = count * (squares @ squares) / total**2
        freedom = min(freedom, 2 * count / max(kurtosis - 1, 1e-9))
    # with q = (rate + other) / 2 it is (other - rate)^2 = step q (1 - q) at both ends
    step = 2 * stdtrit(freedom, 0.975) ** 2 / min(max(size, 1.0), images)
    middle, whole = step * (1 - 2 * rate) / 4, 1 + step / 4
    half = (middle**2 + whole * step * rate * (1 - rate)) ** 0.5
    low, high = (float(rate + (middle + side) / whole) for side in (-half, half))
    return Rate(rate=rate, interval=(max(0.0, low), min(1.0, high)), labels=count, images=images)


def _mutual(values: np.ndarray, trials: Trials) -> float:
    """Return the sum of the products of values (M,) of images of two labels that are taken for each other."""
    most = int(max(trials.classes.max(), trials.guesses.max())) + 1
    pairs, places = np.unique(trials.classes * most + trials.guesses, return_inverse=True)
    mirrored, sums = pairs % most * most + pairs // most, np.bincount(places, values)
    there = np.isin(mirrored, pairs) & (mirrored != pairs)
    return float(sums[there] @ sums[np.searchsorted(pairs, mirrored[there])])


def reliability_of(trials: Trials, *, by_score: bool) -> Reliability:
    """Compare the probabilities of fits to other classes with what was right, if every second image has none of the
    labels; see `Trials.fit`.
    """
    said = held_out_probabilities(trials, by_score=by_score)
    return measure_reliability(said, trials.right, trials.absent, trials.classes)


def rates_by_size(
    decider: Decider, is_trained: np.ndarray, strangers: Strangers, fit: Fit, everything: SizedRates
) -> tuple[SizedRates, ...]:
    """Measure the rates with a quarter and half of the labels, and extrapolate them to `LARGER` times as many.

    Args:
        is_trained: (L,) bool, see `trials_on`.
        fit: probability and threshold that all sizes use.
        everything: rates with all labels.

    Returns:
        Rates by number of labels, ascending; none for fewer than 8 labels, more than `MOST_SIZED` images, or if a part
        has no label with two images.
    """
    labels = len(decider.sizes)
    if labels < 8 or len(decider.codes) > MOST_SIZED:
        return ()
    points, generator = all_points(decider.searched), np.random.default_rng(0)
    measured: list[SizedRates] = []
    for count in (labels // 4, labels // 2):
        rates: list[tuple[float, float]] = []
        for _ in range(DRAWS):
            chosen = np.sort(generator.permutation(labels)[:count])
            trials = trials_on(_part(decider, points, chosen), is_trained[chosen], strangers, again=True)[0]
            accepted = fit.sigmoid.of(trials.margins, trials.scores) >= fit.threshold
            if trials.absent.all():
                return ()
            missed = ~(trials.right & accepted)[~trials.absent]
            rates.append((float(accepted[trials.absent].mean()), float(missed.mean())))
        fpir, fnir = np.mean(rates, axis=0).tolist()
        measured.append(SizedRates(labels=count, fpir=fpir, fnir=fnir))
    measured.append(everything)
    sizes = [one.labels for one in measured]
    fpir, fnir = (
        extrapolated(sizes, [getattr(one, name) for one in measured], LARGER * labels) for name in ("fpir", "fnir")
    )
    return (*measured, SizedRates(labels=LARGER * labels, fpir=fpir, fnir=fnir))


def extrapolated(sizes: Sequence[int], rates: Sequence[float], size: int) -> float | None:
    """Extrapolate a rate, whose log odds are taken as a line over the logarithm of the size.

    Return None if a rate is 0 or 1, whose log odds are infinite.

    Example:
        >>> odds = [0.1, 0.2, 0.4]  # double with the size
        >>> round(extrapolated([10, 20, 40], [one / (1 + one) for one in odds], 400) or 0, 3)
        0.8
        >>> extrapolated([10, 20, 40], [0, 0, 0.02], 400)
    """
    from scipy.special import expit, logit

    if not all(0 < rate < 1 for rate in rates):
        return None
    line = np.polyfit(np.log(sizes), logit(rates), 1)
    return float(expit(np.polyval(line, np.log(size))))


def _part(decider: Decider, points: torch.Tensor, chosen: np.ndarray) -> Decider:
    """Return the decider of some of the labels, given by their codes."""
    kept = np.isin(decider.codes, chosen)
    own, codes = points[torch.from_numpy(kept)], np.unique(decider.codes[kept], return_inverse=True)[1]
    nothing = [""] * len(own)
    searched = PointsInMemory(decider.searched.source, decider.searched.manifold, own, nothing, nothing)
    return Decider(searched, codes, decider.rule, decider.k, decider.groups[kept])


STRANGERS, FEATURES = "strangers.npy", "strangers_local.npy"


def drawn_strangers(
    points: PointSet | None, names: Sequence[str], matched: PointsInMemory | None, model: ModelChoice, bar: Bar
) -> Strangers:
    """Return the points whose labels are not in a gallery, at most `MOST`; those without a label are one class each.

    Raises:
        UserError: the gallery has local features, and the images have not, see `matched_queries`.
    """
    if points is None:
        return Strangers(torch.empty(0, 1), np.empty(0, np.int64))
    given = [label or f"/{row}" for row, label in enumerate(points.labels)]
    codes = np.unique(np.array(given), return_inverse=True)[1]
    allowed = np.flatnonzero(~np.isin(given, names))
    drawn = drawn_rows(allowed, codes, MOST if matched is None else MOST_MATCHED)
    rows, classes = torch.from_numpy(drawn), np.unique(codes[drawn], return_inverse=True)[1]
    if matched is None:
        return Strangers(points.points_at(rows), classes)
    return Strangers(matched_queries(matched, points, model, rows, bar).points, classes)


def write_strangers(path: Path, strangers: Strangers, decider: Decider) -> None:
    """Write the points of strangers into a gallery, and their local features if they are compared."""
    files, space = {STRANGERS: strangers.points}, decider.searched.manifold
    if isinstance(space, MatchedSpace):
        points, numbers = strangers.points[:, :-1].float(), strangers.points[:, -1].long()
        files = {STRANGERS: points, FEATURES: space.store.at(numbers)}
    for name, array in files.items():
        with atomic_write(path / name) as partial, partial.open("wb") as file:
            np.save(file, array.numpy(), allow_pickle=False)


def stored_strangers(gallery: GalleryFolder, classes: Sequence[int], decider: Decider) -> Strangers:
    """Return the strangers of a calibration, given their M classes; none with places, which are not kept.

    Raises:
        UserError: a file is missing or damaged.
    """
    space, count = decider.searched.manifold, len(classes)
    if isinstance(space, PlacedSpace):
        return Strangers(torch.empty(0, 0), np.empty(0, np.int64))
    advice = f"calibrate again with dmlkit calibrate {command_word(gallery.path)}"

    def read(name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = np.array(read_array(gallery.path / name))
        if len(found) != count or (count and found.shape[1:] != shape) or found.dtype != kind:
            expected = f"{kind} {(count, *shape)}"
            raise UserError(f"{gallery.path / name}: this file is damaged: expected {expected}; {advice}")
        return torch.from_numpy(found)

    points = read(STRANGERS, "float32", (gallery.manifold.point_dim,))
    if count:
        check_points(gallery.manifold, points, lambda row: f"{gallery.path / STRANGERS}: row {row}", advice)
    if isinstance(space, MatchedSpace):
        points = space.matched(points, space.store.add(read(FEATURES, "float16", space.store.local.shape)))
    return Strangers(points, np.array(classes, np.int64))
