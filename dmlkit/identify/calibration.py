"""Calibration of ``dmlkit identify``: the minimum probability for giving an image one of a gallery's labels.

The rates are those of open-set identification (ISO/IEC 19795-1): the false-positive identification rate (FPIR) is the
share of the images of absent labels that get a label, the false-negative identification rate (FNIR) the share of the
images of labels in the gallery that do not get their own. A threshold for pairs answers another question: an image is
compared with every label at once, so that some label exceeds it more often the more labels there are.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, PositiveInt

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError, counted, merged, warn_once
from dmlkit.files.csv_table import own_column
from dmlkit.files.labels import label_of
from dmlkit.files.outputs import check_writable, writing
from dmlkit.files.where import Where, check_values
from dmlkit.gallery.files import IDENTIFICATION, CalibrationSummary
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.sources import open_queries, split_points
from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.decisions import Decider, labeled_decider
from dmlkit.identify.probability import LEAST, NO_STRANGERS, Strangers, Trials, drawn_rows, trials_of
from dmlkit.identify.search import LocalMatches
from dmlkit.metrics.reliability import Reliability, Share
from dmlkit.metrics.statistics import LEAST_CLASSES
from dmlkit.metrics.verification import lowest_share
from dmlkit.nearest.near_pairs import check_reachable
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.points import PointSet, load_same_model
from dmlkit.vectors.progress_bar import Bar, no_bar

USUAL_FPIR = 0.01
"""Requested FPIR, if none is given and the images allow it."""
MOST = 4000  # images of each kind that are decided on: 0.5 s in a gallery of 10 000
MOST_MATCHED = 1000  # the same where matches are compared, which take 8 ms each
LEAST_ACCEPTED = 5  # images of absent labels that get a label: fewer say little about their rate
SECOND_IMAGE = "add a second image of some labels"  # an image is decided on without itself
MORE_IMAGES = (
    f"add images until there are {LEAST_ACCEPTED + 1} with at least 2 labels, or name images of other labels with "
    "--strangers IMAGES"
)
SIZES = (1, 2, 4)  # images of the groups for which probabilities are fitted; larger groups use those of the largest


class Rate(BaseModel, frozen=True, extra="forbid"):
    """Rate with its 95 % interval over as many other labels; null for fewer than 5 labels."""

    rate: Share
    interval: tuple[Share, Share] | None
    labels: NonNegativeInt
    images: NonNegativeInt
    """Images, or groups of images."""


class Fit(BaseModel, frozen=True, extra="forbid"):
    """Probability of guesses by one similarity on groups of so many images, its threshold, and its rates."""

    similarity: str
    size: PositiveInt
    """Number of images of a group; 1 for single images."""
    margin_slope: float
    score_slope: float
    offset: float
    """The probability, see `Sigmoid`."""
    threshold: NonNegativeFloat
    """Minimum probability of an answer; lower ones are `UNKNOWN`."""
    fpir: Rate
    """Above the requested one if the images of one label have the highest probabilities."""
    fnir: Rate
    guessed: Share
    """Share of the images of the gallery's labels whose guess is right, also below the threshold (rank 1)."""

    @property
    def sigmoid(self) -> Sigmoid:
        """Probability of a guess."""
        return Sigmoid(self.margin_slope, self.score_slope, self.offset)


def calibration_file(path: Path, where: Where | None) -> Path:
    """Return the file of the calibration of a gallery; images that fulfill conditions have one of their own."""
    if where is None:
        return path / IDENTIFICATION
    name, suffix = IDENTIFICATION.split(".")
    return path / f"{name}-{crc32(where.meaning.encode()):08x}.{suffix}"


class Identification(CalibrationSummary, frozen=True, extra="forbid"):
    """``identification.json``: the calibration of ``dmlkit identify`` that is kept in a gallery."""

    where: str | None = None
    """Conditions that the images fulfill which were calibrated for, see `Where`; null for all."""
    column: str | None = None
    """Column whose values have calibrations of their own, see `calibrate_by_value`; null for none."""
    gallery_version: NonNegativeInt
    """Version of the gallery that was calibrated."""
    images: NonNegativeInt
    """Its number of images."""
    near: float | None
    """Similarity from which on images of one label are near-duplicates, which are left out together."""
    requested: Share
    """Requested FPIR."""
    fits: tuple[Fit, ...]
    """By similarity and size; first that of single images by the similarity that `identify` uses."""
    reliability: Reliability
    """Reliability of the first one."""
    trained_labels: tuple[str, ...] | None
    """Labels that the model was trained on; null if the run was not there."""
    is_optimistic: bool | None
    """Whether the rates are of labels that the model was trained on, which separate better than others; null if the
    run was not there."""

    @classmethod
    def of(cls, gallery: GalleryFolder) -> "Identification | None":
        """Return the calibration of a gallery; None if it has none, or one of another model."""
        file = calibration_file(gallery.path, gallery.where)
        calibration = cls.read(file) if file.exists() else None
        return calibration if calibration and calibration.gallery_model == gallery.manifest.current else None


def calibrate_gallery(
    path: Path,
    *,
    fpir: float | None = None,
    strangers: Path | None = None,
    near: float | None = None,
    where: Where | None = None,
    model: ModelChoice = OWN_MODEL,
    is_written: bool = True,
    bar: Bar = no_bar,
) -> Identification:
    """Choose the minimum probability for giving a label, and write it into the gallery.

    Images of absent labels are those of the gallery, each with its whole label left out, and strangers. Images of the
    gallery's labels are decided on without themselves. Labels that the model was trained on are left out of both if
    there are enough others. It is chosen for each similarity by which images may be compared, and for single images
    and groups of them.

    Args:
        fpir: the expected share of the images of other absent labels that get a label, in (0, 1). Default: 0.01, or the
            lowest share that the images allow.
        strangers: images whose labels are not in the gallery, see `open_queries`; of a table with the columns of
            ``where`` those that fulfill it. Default: the run's validation images of such labels.
        near: similarity above which images of one label are near-duplicates, which are left out together.
        where: conditions on the images of the gallery, to calibrate for `identify` with the same.
        model: run of the gallery, if it was moved, and device.
        is_written: whether to write it; otherwise it is only returned.
    """
    if fpir is not None and not 0 < fpir < 1:
        raise UserError(f"--fpir {fpir:g}: expected a share between 0 and 1, e.g. 0.01")
    check_writable(path)
    gallery = GalleryFolder(path, where)
    if near is not None:
        check_reachable(gallery.manifold, near, "--near")
    matches, run = LocalMatches.of(gallery), model.run or gallery.run
    run_folder = None if run is None else RunFolder(run)
    names, decider = labeled_decider(gallery, near=near, second=matches)
    deciders = [decider] if matches is None else [decider, labeled_decider(gallery, near=near)[1]]
    others = NO_STRANGERS
    stranger_points = _stranger_points(gallery, names, run_folder, strangers, where, model, bar)
    if stranger_points is not None:
        for line in merged(stranger_points.skipped):  # the same ones for each value of `calibrate_by_value`
            warn_once(line)
        rows, classes = drawn_strangers(stranger_points, names, most_tried(decider))
        numbers = None if matches is None else matches.ask(stranger_points, model, rows, bar)
        others = Strangers(stranger_points.points_at(rows), classes, numbers)
    trained = None if run_folder is None else run_folder.training_classes()
    known = tuple(name for name in names if name in (trained or ()))
    is_trained = np.isin(names, known)
    trials, is_optimistic = trials_of(decider, 1, most_tried(decider), is_trained, others)
    if trials.absent.all():
        raise UserError(
            f"{gallery.path}: each label has a single image, so that neither probabilities nor the rate of misses can "
            f"be measured; {SECOND_IMAGE}"
        )
    fpir = _allowed(fpir, int(trials.absent.sum()))
    fits = [fit_of(trials, fpir, decider.similarity_name)]
    for decider, size in list(product(deciders, SIZES))[1:]:  # as far as there are enough trials
        more_trials = trials_of(decider, size, most_tried(decider) // size, is_trained, others)[0]
        absent = int(more_trials.absent.sum())
        if size == 1 or (len(more_trials.absent) - absent >= LEAST and fpir * absent >= LEAST_ACCEPTED):
            fits.append(fit_of(more_trials, fpir, decider.similarity_name, size))
    calibration = Identification(
        gallery_model=gallery.manifest.current,
        where=None if where is None else where.text,
        gallery_version=gallery.version,
        images=len(gallery),
        near=near,
        requested=fpir,
        fits=tuple(fits),
        reliability=trials.reliability(by_score=fits[0].margin_slope == 0),
        trained_labels=None if trained is None else known,
        is_optimistic=None if trained is None else is_optimistic,
    )
    if is_written:
        with writing(path):
            calibration.write(calibration_file(path, where))
    return calibration


def _stranger_points(
    gallery: GalleryFolder,
    names: Sequence[str],
    run: RunFolder | None,
    strangers: Path | None,
    where: Where | None,
    model: ModelChoice,
    bar: Bar,
) -> PointSet | None:
    """Return the strangers, or the validation images of the run; None if it has none."""
    if strangers is not None:
        limits = None if where is None else Boxes(where=where)
        points = open_queries(strangers, gallery, boxes=limits, model=model, bar=bar)
        of_gallery = {*names}
        known, start = sum(label in of_gallery for label in points.labels), f"--strangers {strangers}"
        images = f"{known:,} of {counted(len(points), 'image has', 'images have')} labels of {gallery.path}"
        if known and known == len(points):
            raise UserError(f"{start}: {images}; expected images of other labels")
        if known:
            warn_once(f"{start}: left out: {images}")
        return points
    if run is None or not run.recipe().dataset.validates:
        return None
    ranks = model.start()
    return split_points(run, load_same_model(gallery, model, ranks), ranks, "validation", bar)


def calibrate_by_value(
    path: Path, column: str, **options: Any
) -> tuple[Identification, dict[str, Identification | UserError]]:
    """Calibrate a gallery for all images, and for those with each value of one of its columns alone.

    `identify` takes the calibration of an image's own value. It is that of the condition ``COLUMN=VALUE``. A value with
    too few images has none, but the error, and `identify` takes that of all images. All are measured before the first
    one is written. For options see `calibrate_gallery`.
    """
    columns = GalleryFolder(path).cells()
    if not columns:
        raise UserError(f"--by {column}: {path} has no columns; create it from a table with the column {column}")
    name = [*columns][own_column([*columns], column, f"--by {column}: {path}")]
    values = sorted({value for cell in columns[name] if (value := label_of(cell)) is not None})
    check_values(values, name)
    whole, calibrations = calibrate_gallery(path, is_written=False, **options), dict[str, Identification | UserError]()
    for value in values:
        try:
            where = Where.of_value(name, value)
            calibrations[value] = calibrate_gallery(path, where=where, is_written=False, **options)
        except UserError as error:
            calibrations[value] = error
    if any(isinstance(outcome, Identification) for outcome in calibrations.values()):
        whole = whole.model_copy(update={"column": name})
    with writing(path):
        for value, outcome in calibrations.items():
            file = calibration_file(path, Where.of_value(name, value))
            if isinstance(outcome, Identification):
                outcome.write(file)
            else:
                file.unlink(missing_ok=True)
        whole.write(calibration_file(path, None))  # last: it says that those of the values hold
    return whole, calibrations


def most_tried(decider: Decider) -> int:
    """Return how many images of each kind are decided on at most, see `trials_of`."""
    return MOST_MATCHED if decider.rescored else MOST


def drawn_strangers(points: PointSet, names: Sequence[str], most: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return rows and classes (M,) of images whose labels are not in a gallery; each one without a label is a class."""
    labels = [label or f"/{row}" for row, label in enumerate(points.labels)]
    codes = np.unique(np.array(labels), return_inverse=True)[1]
    drawn = drawn_rows(np.flatnonzero(~np.isin(labels, names)), codes, most)
    return torch.from_numpy(drawn), np.unique(codes[drawn], return_inverse=True)[1]


def lacks_absent(gallery: GalleryFolder, decider: Decider) -> bool:
    """Return whether `calibrate_gallery` would find too few images of absent labels for any rate.

    They are the gallery's own, each with its label left out, and the validation images of its run.
    """
    if lowest_share(LEAST_ACCEPTED, len(decider.codes) if len(decider.sizes) > 1 else 0) < 1:
        return False
    with suppress(UserError):  # the run is damaged
        return gallery.run is None or not RunFolder(gallery.run).recipe().dataset.validates
    return True


def _allowed(fpir: float | None, count: int) -> float:
    """Return the requested FPIR; without one `USUAL_FPIR`, or the lowest that so many images of absent labels allow."""
    lowest = lowest_share(LEAST_ACCEPTED, count)
    if lowest == 1:
        raise UserError(
            f"a calibration needs at least {LEAST_ACCEPTED + 1} images of absent labels, got {count}; {MORE_IMAGES}"
        )
    fpir = max(USUAL_FPIR, lowest) if fpir is None else fpir
    if fpir * count < LEAST_ACCEPTED:
        raise UserError(
            f"--fpir {fpir:g}: needs at least {LEAST_ACCEPTED / fpir:,.0f} images of absent labels, got {count}; "
            f"the lowest possible is {lowest:g}, or name more images of other labels with --strangers IMAGES"
        )
    return fpir


def fit_of(trials: Trials, fpir: float, similarity: str, size: int = 1) -> Fit:
    """Return the probability, its threshold and the rates of decisions on groups of so many images.

    The probability is fitted to margin and score, or to the score alone if that misses fewer images at the same FPIR.
    Which of them does depends on the gallery, so both are tried.
    """
    absent, present, fits = trials.chosen(trials.absent), trials.chosen(~trials.absent), list[Fit]()
    for by_score in (False, True):
        sigmoid = trials.fit(by_score=by_score)
        probabilities = sigmoid.of(trials.margins, trials.scores)
        threshold, accepted = threshold_for(probabilities[trials.absent], absent, fpir)
        missed = ~(trials.right & (probabilities >= threshold))[~trials.absent]
        fits.append(
            Fit(
                similarity=similarity,
                size=size,
                **sigmoid._asdict(),
                threshold=threshold,
                fpir=rate_of(accepted, absent),
                fnir=rate_of(missed, present),
                guessed=float(present.right.mean()),
            )
        )
    return min(fits, key=lambda fit: fit.fnir.rate)


def threshold_for(values: np.ndarray, trials: Trials, fpir: float) -> tuple[float, np.ndarray]:
    """Choose the threshold that a share ``fpir`` of the images of other absent labels is expected to reach, or less.

    A threshold that this share of these images reaches would be too low, because it is fitted to them: 0.057 of others
    reached it with 20 labels where 0.05 was asked for. So each label meets the threshold that the others choose,
    without the images whose guess is this label, for the largest share that leads to ``fpir``.

    Returns:
        The threshold, and which images reach that of the others, (M,) bool. They are more than asked for if the highest
        values are of one label; the threshold is then above all values.
    """
    order, reach = np.argsort(values), np.empty(len(values))
    ordered = values[order]
    for code in np.unique(trials.classes):
        of_label = trials.classes == code
        others = ordered[~(of_label | (trials.guesses == code))[order]]
        reach[of_label] = len(others) - np.searchsorted(others, values[of_label])
        reach[of_label] /= max(1, len(others))
    limit = np.sort(reach)[int(fpir * len(values) + 1e-9)]
    accepted = (reach < limit) | (reach == 0)
    count = int(reach[accepted].max(initial=0) * len(values) + 1e-9)
    return float(np.nextafter(ordered[-1 - count], np.inf)), accepted


def rate_of(errors: np.ndarray, trials: Trials) -> Rate:
    """Return the rate of errors with its 95 % interval: the rates that as many other labels would show.

    These labels and others are samples, so that the variance of the difference of their rates is twice that of the
    rate. The interval is the score interval of two binomial samples (Krishnamoorthy & Peng 2011) for as many
    independent images as have this variance (Korn & Graubard 1998). Images of one label count together, and so do those
    of two labels that are taken for each other. Few labels, or few with most of the errors, estimate the variance
    roughly: the quantile is that of Student's t with the degrees of freedom of Satterthwaite (1946).
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
    count = int(max(trials.classes.max(), trials.guesses.max())) + 1
    pairs, inverse = np.unique(trials.classes * count + trials.guesses, return_inverse=True)
    mirrored, sums = pairs % count * count + pairs // count, np.bincount(inverse, values)
    is_mutual = np.isin(mirrored, pairs) & (mirrored != pairs)
    return float(sums[is_mutual] @ sums[np.searchsorted(pairs, mirrored[is_mutual])])
