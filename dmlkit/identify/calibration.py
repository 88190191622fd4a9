"""Calibration of ``dmlkit identify``: the minimum probability for giving an image one of a gallery's labels.

The rates are those of open-set identification (ISO/IEC 19795-1): the false-positive identification rate (FPIR) is the
share of the images of absent labels that get a label, the false-negative identification rate (FNIR) the share of the
images of labels in the gallery that do not get their own. A threshold for pairs answers another question: an image is
compared with every label at once, so that some label exceeds it more often the more labels there are.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.escape import command_word
from dmlkit.files.outputs import check_writable, writing
from dmlkit.files.source import PLACE
from dmlkit.gallery.files import IDENTIFICATION, CalibrationSummary
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.sources import open_points, open_queries, split_points
from dmlkit.identify.answers import Rule, Sigmoid
from dmlkit.identify.decisions import Decider
from dmlkit.identify.probability import (
    LEAST,
    Trials,
    estimate_probability,
    tried_together,
)
from dmlkit.identify.rates import (
    Rate,
    SizedRates,
    Strangers,
    best_fit,
    drawn_strangers,
    rate_of,
    rates_by_size,
    reliability_of,
    stored_strangers,
    trials_on,
    write_strangers,
)
from dmlkit.identify.scored import MatchedSpace, PlaceFusion, matched_gallery, place_gallery, place_queries
from dmlkit.metrics.reliability import Reliability, Share
from dmlkit.metrics.verification import lowest_share
from dmlkit.nearest.near_pairs import check_reachable, components_of, near_pairs
from dmlkit.nearest.scored import PlacedSpace
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import OWN_MODEL, ModelChoice
from dmlkit.vectors.items import PointItem
from dmlkit.vectors.points import PointSet, PointsInMemory, all_points, in_memory, load_same_model, require_one_label
from dmlkit.vectors.progress_bar import Bar, no_bar

USUAL_FPIR = 0.01
"""Requested FPIR, if none is given and the images allow it."""
LEAST_ACCEPTED = 5  # images of absent labels that get a label: fewer say little about their rate
SECOND_IMAGE = "add a second image of some labels"  # an image is decided on without itself
MORE_IMAGES = (
    f"add images until there are {LEAST_ACCEPTED + 1} with at least 2 labels, or name images of other labels with "
    "--strangers IMAGES"
)
STALE = 0.2  # share of the images that may change before a gallery is calibrated again


class Identification(CalibrationSummary, frozen=True, extra="forbid"):
    """``identification.json``: the calibration of ``dmlkit identify`` that is kept in a gallery."""

    gallery_version: NonNegativeInt
    """Version of the gallery that was calibrated."""
    images: NonNegativeInt
    """Its number of images."""
    near: float | None
    """Similarity from which on images of one label are near-duplicates, which are left out together."""
    requested: Share
    """Requested FPIR."""
    threshold: NonNegativeFloat
    """Minimum probability of an answer; lower ones are `UNKNOWN`."""
    margin_slope: float
    score_slope: float
    offset: float
    """The probability, see `Sigmoid`."""
    fpir: Rate
    """Above the requested one if the images of one label have the highest probabilities."""
    fnir: Rate
    guessed: Share
    """Share of the images of the gallery's labels whose guess is right, also below the threshold (rank 1)."""
    reliability: Reliability
    sizes: tuple[SizedRates, ...]
    """Rates with a quarter, half and all of the labels, and extrapolated to 10 times as many; empty below 8 labels."""
    strangers: tuple[NonNegativeInt, ...]
    """Classes of the images in ``strangers.npy``, whose labels are not in the gallery."""
    trained_labels: tuple[str, ...] | None
    """Labels that the model was trained on; null if the run was not there."""
    is_optimistic: bool | None
    """Whether the rates are of labels that the model was trained on, which separate better than others; null if the
    run was not there."""

    @classmethod
    def of(cls, gallery: GalleryFolder) -> "Identification | None":
        """Return the calibration of a gallery; None if it has none, or one of another model.

        Raises:
            UserError: the calibration is damaged.
        """
        file = gallery.path / IDENTIFICATION
        found = cls.read(file) if file.exists() else None
        return found if found and found.gallery_model == gallery.manifest.current else None

    @property
    def acceptance(self) -> "Acceptance":
        """Probability of a guess, and its threshold."""
        return Acceptance(Sigmoid(self.margin_slope, self.score_slope, self.offset), self.threshold)


class Acceptance(NamedTuple):
    """Rule by which an image gets a label."""

    sigmoid: Sigmoid
    threshold: float  # minimum probability
    note: str | None = None  # message for the user


def calibrate_gallery(
    path: Path,
    *,
    fpir: float | None = None,
    strangers: Path | None = None,
    near: float | None = None,
    place: PlaceFusion | None = None,
    model: ModelChoice = OWN_MODEL,
    bar: Bar = no_bar,
) -> Identification:
    """Choose the minimum probability for giving a label, and write it into the gallery.

    Images of absent labels are those of the gallery, each with its whole label left out, and strangers. Images of the
    gallery's labels are decided on without themselves. Labels that the model was trained on are left out of both if
    there are enough others.

    Args:
        fpir: the expected share of the images of other absent labels that get a label, in (0, 1). Default: 0.01, or the
            lowest share that the images allow.
        strangers: images whose labels are not in the gallery, see `open_queries`. Default: the run's validation images
            of such labels.
        near: similarity above which images of one label are near-duplicates, which are left out together.
        place: weight of the evidence of place and time. Then nothing is written, because `identify` calibrates places
            itself, and strangers are from a table with such columns. Default of strangers: none.
        model: run of the gallery, if it was moved, and device.

    Raises:
        UserError: the gallery has too few labels or images for ``fpir``; the message names the lowest possible one; or
            no similarity is ``near``.
    """
    if fpir is not None and not 0 < fpir < 1:
        raise UserError(f"--fpir {fpir:g}: expected a share between 0 and 1, e.g. 0.01")
    if place is None:
        check_writable(path)
    gallery = open_points(path)
    assert isinstance(gallery, GalleryFolder)
    if near is not None:
        check_reachable(gallery.manifold, near, "--near")
    matched = matched_gallery(gallery) if place is None else None
    names, decider = labeled_decider(place_gallery(gallery, place) if place else matched or gallery, near=near)
    home, asked = model.run or gallery.run, None
    if strangers is not None:
        asked = open_queries(strangers, gallery, model=model, bar=bar)
        asked = asked if place is None else place_queries(strangers, asked, place)
    elif place is None and home is not None and RunFolder(home).recipe().dataset.validates:
        fabric = model.start()
        asked = split_points(RunFolder(home), load_same_model(gallery, model, fabric), fabric, "validation", bar)
    trained = None if home is None else RunFolder(home).training_classes()
    others = drawn_strangers(asked, names, matched, model, bar)
    found = _calibrated(gallery, names, decider, others, fpir, near, trained)
    if place is not None:
        return found
    with writing(path):
        write_strangers(path, others, decider)
        found.write(path / IDENTIFICATION)
    return found


def labeled_decider(
    searched: PointSet, rule: Rule = "nearest", k: int | None = None, near: float | None = None
) -> tuple[list[str], Decider]:
    """Return the labels of points, sorted, and the rule that decides by them; images without a label do not count.

    Raises:
        UserError: no image has a label, or one has several.
    """
    require_one_label(searched)
    alone = (searched.stored if isinstance(searched, PointsInMemory) else None) or searched
    if None in searched.labels:
        searched = LabeledPoints.of(searched)
    if not len(searched):
        raise UserError(f"{alone.source}: no image has a label; add images with their labels")
    names, codes = np.unique(np.array(searched.labels, dtype=object), return_inverse=True)
    groups = None if near is None else near_groups(alone, codes, near)
    return [str(name) for name in names], Decider(searched, codes, rule, k, groups)


@dataclass(frozen=True)
class LabeledPoints(PointsInMemory):
    """Those of some points that have a label.

    Args:
        whole: all points.
        kept: (N,) int64, their rows.
    """

    whole: PointSet = field(kw_only=True)
    kept: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, whole: PointSet) -> "LabeledPoints":
        """Return the points with a label."""
        kept = torch.tensor([row for row, label in enumerate(whole.labels) if label is not None], dtype=torch.int64)
        return cls(**vars(in_memory(whole).part(kept)), whole=whole, kept=kept)

    def items_at(self, rows: Tensor) -> list[PointItem]:
        return self.whole.items_at(self.kept[rows])


def lacks_absent(gallery: GalleryFolder, decider: Decider) -> bool:
    """Return whether `calibrate_gallery` would find too few images of absent labels for any rate.

    They are the gallery's own, each with its label left out, and the validation images of its run.
    """
    if lowest_share(LEAST_ACCEPTED, len(decider.codes) if len(decider.sizes) > 1 else 0) < 1:
        return False
    with suppress(UserError):  # the run is damaged
        return gallery.run is None or not RunFolder(gallery.run).recipe().dataset.validates
    return True


def near_groups(searched: PointSet, codes: np.ndarray, near: float) -> np.ndarray:
    """Return the group (N,) of each labeled image: near-duplicates with the same code have the same one."""
    labeled = torch.tensor([label is not None for label in searched.labels])
    pairs = near_pairs(searched.manifold, all_points(searched)[labeled], None, near)
    same = torch.from_numpy(codes[pairs.first.numpy()] == codes[pairs.second.numpy()])
    return components_of(pairs.first[same], pairs.second[same], len(codes))


def acceptance_of(gallery: GalleryFolder, names: Sequence[str], decider: Decider) -> Acceptance | None:
    """Return the acceptance of a calibrated gallery; None if it is not calibrated.

    If more than `STALE` of the images have changed, the gallery is calibrated again, with the same strangers. For
    another rule than ``nearest``, with places, and without the matches of a gallery that has local features, the
    acceptance is computed but not kept. The places of strangers are not known, so that only images of the gallery count
    then.

    Raises:
        UserError: the calibration is damaged, or with places there are too few images.
    """
    file, stored = gallery.path / IDENTIFICATION, Identification.of(gallery)
    if stored is None:
        return None
    changed, space = _changed(gallery, stored), decider.searched.manifold
    is_placed, is_matched = isinstance(space, PlacedSpace), isinstance(space, MatchedSpace)
    is_kept = decider.rule == "nearest" and not is_placed and is_matched == (gallery.manifest.local is not None)
    if is_kept and changed <= STALE * stored.images:
        return stored.acceptance
    if stored.near is not None:
        decider = decider.grouped(near_groups(gallery, decider.codes, stored.near))
    advice = f"calibrate again with dmlkit calibrate {command_word(gallery.path)}"
    others = stored_strangers(gallery, stored.strangers, decider)
    try:
        if not is_kept:
            trials, is_optimistic = _measured(gallery, names, decider, others, stored.trained_labels)
            fit = best_fit(trials, _allowed(stored.requested, trials))
            trained = ", which the model was trained on, so it is optimistic" if is_optimistic else ""
            note = f"the probability for --with {PLACE} is calibrated on labels of the gallery alone{trained}"
            return Acceptance(fit.sigmoid, fit.threshold, note if is_placed else None)
        found = _calibrated(gallery, names, decider, others, stored.requested, stored.near, stored.trained_labels)
    except UserError as error:
        if is_placed:
            raise UserError(f"--with {PLACE}: {error}; {advice}") from None
        return stored.acceptance._replace(note=f"the gallery has changed, and {error}; {advice}")
    note = f"{changed} images have changed since the gallery was calibrated, so it was calibrated again"
    try:
        with writing(file):
            found.write(file)
    except UserError as error:
        note += f", but this could not be stored: {error}"
    return found.acceptance._replace(note=note)


def group_probability(gallery: PointSet, names: Sequence[str], decider: Decider, size: int) -> Sigmoid | None:
    """Return the probability of guesses on groups of ``size`` images.

    It is fitted to random groups of images of one label: those of the gallery without themselves and without their
    label, and in a calibrated gallery the strangers too. Return None if there are fewer than `LEAST` groups.

    Raises:
        UserError: the calibration is damaged.
    """
    stored = Identification.of(gallery) if isinstance(gallery, GalleryFolder) else None
    if not isinstance(gallery, GalleryFolder) or stored is None:
        return estimate_probability(decider, size)
    if stored.near is not None:
        decider = decider.grouped(near_groups(gallery, decider.codes, stored.near))
    others = stored_strangers(gallery, stored.strangers, decider)
    is_trained = np.isin(names, stored.trained_labels or ())
    found = Trials.all(
        trials_on(part, is_trained, others.together(size, seed), again=True)[0]
        for seed, part in tried_together(decider, size)
    )
    return None if (~found.absent).sum() < LEAST else found.fit(by_score=stored.margin_slope == 0)


def _calibrated(
    gallery: GalleryFolder,
    names: Sequence[str],
    decider: Decider,
    strangers: Strangers,
    fpir: float | None,
    near: float | None,
    trained: Sequence[str] | None,
) -> Identification:
    """Measure decisions on images whose answer is known, and choose the threshold on them."""
    trials, is_optimistic = _measured(gallery, names, decider, strangers, trained)
    fpir = _allowed(fpir, trials)
    fit = best_fit(trials, fpir)
    absent, present = trials.absent, ~trials.absent
    measured_fpir = rate_of(fit.accepted, trials.chosen(absent))
    measured_fnir = rate_of(fit.missed, trials.chosen(present))
    known = [name for name in names if name in (trained or ())]
    everything = SizedRates(labels=len(names), fpir=measured_fpir.rate, fnir=measured_fnir.rate)
    return Identification(
        gallery_model=gallery.manifest.current,
        gallery_version=gallery.version,
        images=len(gallery),
        near=near,
        requested=fpir,
        threshold=fit.threshold,
        **fit.sigmoid._asdict(),
        fpir=measured_fpir,
        fnir=measured_fnir,
        guessed=float(trials.right[present].mean()),
        reliability=reliability_of(trials, by_score=fit.sigmoid.margin_slope == 0),
        sizes=rates_by_size(decider, np.isin(names, known), strangers, fit, everything),
        strangers=tuple(strangers.classes.tolist()),
        trained_labels=None if trained is None else tuple(known),
        is_optimistic=None if trained is None else is_optimistic,
    )


def _measured(
    gallery: GalleryFolder,
    names: Sequence[str],
    decider: Decider,
    strangers: Strangers,
    trained: Sequence[str] | None,
) -> tuple[Trials, bool]:
    """Return `trials_on` the images of a gallery and strangers.

    Raises:
        UserError: no label has two images.
    """
    trials, is_optimistic = trials_on(decider, np.isin(names, trained or ()), strangers)
    if trials.absent.all():
        raise UserError(
            f"{gallery.path}: each label has a single image, so that neither probabilities nor the rate of misses can "
            f"be measured; {SECOND_IMAGE}"
        )
    return trials, is_optimistic


def _allowed(fpir: float | None, trials: Trials) -> float:
    """Return the requested FPIR; without one `USUAL_FPIR`, or the lowest that the images of absent labels allow.

    Raises:
        UserError: there are too few images for ``fpir``, or for any rate.
    """
    count = int(trials.absent.sum())
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


def _changed(gallery: GalleryFolder, stored: Identification) -> int:
    """Return how many images were added or removed since the calibration, as far as versions are recorded."""
    later = [one.images for one in gallery.manifest.versions if one.number > stored.gallery_version]
    counts = [stored.images, *later, len(gallery)]
    return int(np.abs(np.diff(counts)).sum())
