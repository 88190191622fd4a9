"""Calibration of ``dmlkit identify``: the probability from which on a gallery's label is given to an image.

The rates are those of open-set identification (ISO/IEC 19795-1): the false-positive identification rate (FPIR) is the
share of the images of absent labels that get a label, the false-negative identification rate (FNIR) the share of the
images of labels in the gallery that do not get their own. A threshold for pairs answers another question: an image is
compared with every label at once, so that some label exceeds it more often the more labels there are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import NonNegativeInt

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.near_pairs import near_pairs
from dmlkit.embedding.points import PointSet, all_points, load_same_model
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.decisions import Decider, Rule
from dmlkit.embedding.questions.probability import Sigmoid, drawn_rows
from dmlkit.embedding.questions.rates import (
    MOST,
    Rate,
    Reliability,
    Share,
    SizedRates,
    Strangers,
    best_fit,
    fnir_at,
    fpir_at,
    rates_by_size,
    reliability_of,
    trials_on,
)
from dmlkit.embedding.sources import open_points, open_queries, split_points
from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.manifolds.numerics.check_points import check_points
from dmlkit.run_folder.documents import TrainingClasses
from dmlkit.run_folder.folder import RunFolder

FILE, STRANGERS = "identification.json", "strangers.npy"
LEAST_ACCEPTED = 5  # images of absent labels that get a label: fewer say little about their rate
STALE = 0.2  # share of the images that may change before a gallery is calibrated again


class Identification(Document, frozen=True):
    """``identification.json``: the calibration of ``dmlkit identify`` that is kept in a gallery."""

    kind: ClassVar[str] = "calibration of a gallery"

    weights: str
    """Fingerprint of the model."""
    gallery_version: NonNegativeInt
    """Version of the gallery that was calibrated."""
    images: NonNegativeInt
    """Its number of images."""
    near: float | None
    """Similarity from which on images of one label are near-duplicates, which are left out together."""
    requested: Share
    """Requested FPIR."""
    threshold: Share
    """Least probability with which a label is given."""
    margin_slope: float
    score_slope: float
    offset: float
    """The probability, see `Sigmoid`."""
    fpir: Rate
    fnir: Rate
    guessed: Share
    """Share of the images of the gallery's labels whose guess is right, also below the threshold (rank 1)."""
    reliability: Reliability
    sizes: tuple[SizedRates, ...]
    """Rates with a quarter, half and all of the labels, and extrapolated to 10 times as many; empty below 8 labels."""
    strangers: tuple[NonNegativeInt, ...]
    """Classes of the images in ``strangers.npy``, whose labels are not in the gallery."""
    trained_labels: tuple[str, ...]
    """Labels that the model was trained on."""
    is_optimistic: bool
    """Whether the rates are of labels that the model was trained on, which separate better than others."""

    @property
    def sigmoid(self) -> Sigmoid:
        """Probability of a guess."""
        return Sigmoid(self.margin_slope, self.score_slope, self.offset)


def calibrate_gallery(
    path: Path,
    *,
    fpir: float = 0.01,
    strangers: Path | None = None,
    near: float | None = None,
    run: Path | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> Identification:
    """Choose the probability from which on identify gives a label, and write it into the gallery.

    Images of absent labels are those of the gallery, each with its whole label left out, and strangers. Images of the
    gallery's labels are decided on without themselves. Labels that the model was trained on are left out of both if
    there are enough others.

    Args:
        path: the gallery.
        fpir: the largest share of the images of absent labels that may get a label.
        strangers: images whose labels are not in the gallery, see `open_queries`. Default: the validation images of the
            run, but of labels in the gallery.
        near: similarity from which on images of one label are near-duplicates, which are left out together.
        run: run of the gallery, if it was moved.
        device: see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: the gallery has too few labels or images for ``fpir``; the message names the least possible one.
    """
    if not 0 < fpir < 1:
        raise UserError(f"--fpir {fpir:g}: expected a share between 0 and 1, e.g. 0.01")
    gallery = open_points(path)
    assert isinstance(gallery, GalleryFolder)
    names, decider = labeled_decider(gallery, near=near)
    home = run or gallery.run
    trained = TrainingClasses.read(RunFolder(home).classes_path).training_classes if home is not None else ()
    if strangers is not None:
        asked = open_queries(strangers, gallery, run=run, device=device, bar=bar)
    else:
        asked = _validation_points(gallery, run, device, bar) if home is not None else None
    found = calibrate_points(
        gallery,
        decider,
        [name for name in names if name in trained],
        names,
        _strangers(asked, names),
        fpir,
        near,
        "" if strangers is not None else "; name images of other labels with --strangers FOLDER",
    )
    _write(gallery, *found)
    return found[0]


def labeled_decider(
    searched: PointSet, rule: Rule = "nearest", k: int | None = None, near: float | None = None
) -> tuple[list[str], Decider]:
    """Return the labels of points, sorted, and the rule that decides by them.

    Raises:
        UserError: an image has no label.
    """
    given = list(searched.labels)
    if None in given:
        is_gallery = isinstance(searched, GalleryFolder)
        advice = "remove them, and add them with --label" if is_gallery else "give every image a label"
        raise UserError(f"{searched.source}: {given.count(None)} of {len(given)} images have no label; {advice}")
    names, codes = np.unique(np.array(given, dtype=object), return_inverse=True)
    groups = None
    if near is not None:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        pairs = near_pairs(searched.manifold, all_points(searched), None, near)
        first, second = pairs.first.numpy(), pairs.second.numpy()
        same = codes[first] == codes[second]
        links = coo_array((np.ones(int(same.sum())), (first[same], second[same])), (len(codes), len(codes)))
        groups = connected_components(links, directed=False)[1]
    return [str(name) for name in names], Decider(searched, codes, rule, k, groups)


def current_calibration(
    gallery: GalleryFolder, decider: Decider, names: Sequence[str]
) -> tuple[Identification | None, str | None]:
    """Return the calibration of a gallery, made again if the gallery has changed by more than `STALE`, and a note.

    Another rule than ``nearest`` is calibrated for now alone, and not kept.

    Raises:
        UserError: the calibration is damaged.
    """
    file = gallery.path / FILE
    if not file.exists():
        return None, None
    stored = Identification.read(file)
    changed = _changed(gallery, stored)
    if changed <= STALE * stored.images and decider.rule == "nearest":
        return stored, None
    points = torch.from_numpy(np.array(read_array(gallery.path / STRANGERS)))
    if len(points) != len(stored.strangers) or points.shape[1:] != (gallery.manifold.point_dim,):
        raise UserError(f"{gallery.path / STRANGERS}: is damaged; calibrate again with dmlkit calibrate {gallery.path}")
    check_points(gallery.manifold, points, lambda place: f"{gallery.path / STRANGERS}: row {place}", "calibrate again")
    others = Strangers(points, np.array(stored.strangers, np.int64))
    trained = [name for name in names if name in stored.trained_labels]
    is_other_rule = decider.rule != "nearest"
    try:
        found = calibrate_points(gallery, decider, trained, names, others, stored.requested, stored.near, "")
    except UserError as error:
        return None, f"{error}; calibrate again with dmlkit calibrate {gallery.path}"
    if is_other_rule:
        return found[0], None
    _write(gallery, *found)
    return found[0], f"{changed} images have changed since the gallery was calibrated, so it was calibrated again"


def calibrate_points(
    gallery: GalleryFolder,
    decider: Decider,
    trained: Sequence[str],
    names: Sequence[str],
    strangers: Strangers,
    fpir: float,
    near: float | None,
    advice: str,
) -> tuple[Identification, Strangers]:
    """Measure decisions on images whose answer is known, and choose the threshold on them.

    Raises:
        UserError: there are too few images for ``fpir``, or no label has two images.
    """
    trials, is_optimistic = trials_on(decider, np.isin(names, trained), strangers)
    absent, present = trials.absent, ~trials.absent
    if not present.any():
        raise UserError(
            f"{gallery.path}: each label has a single image, so that neither probabilities nor the rate of misses can "
            "be measured; add a second image of some labels"
        )
    count = int(absent.sum())
    if fpir * count < LEAST_ACCEPTED:
        least = f"the least possible is {LEAST_ACCEPTED / count:.2g}" if count > LEAST_ACCEPTED else "there are too few"
        raise UserError(
            f"--fpir {fpir:g}: {count} images of absent labels are too few, at least {LEAST_ACCEPTED / fpir:,.0f} are "
            f"needed; {least}{advice}"
        )
    sigmoid, held_out, threshold = best_fit(trials, fpir)
    found = Identification(
        weights=gallery.manifest.model.fingerprint,
        gallery_version=gallery.version,
        images=len(gallery),
        near=near,
        requested=fpir,
        threshold=threshold,
        **sigmoid._asdict(),
        fpir=fpir_at(threshold, held_out[absent], trials.classes[absent], fpir),
        fnir=fnir_at(threshold, held_out[present], trials.classes[present], trials.right[present]),
        guessed=float(trials.right[present].mean()),
        reliability=reliability_of(held_out, trials),
        sizes=tuple(rates_by_size(decider, strangers, sigmoid, threshold)),
        strangers=tuple(strangers.classes.tolist()),
        trained_labels=tuple(trained),
        is_optimistic=is_optimistic,
    )
    return found, strangers


def _validation_points(gallery: GalleryFolder, run: Path | None, device: str, bar: Bar) -> PointSet | None:
    """Return the validation images of the gallery's run; None if it has none."""
    fabric = start_fabric(device)
    trained = load_same_model(gallery, run, fabric)
    config = trained.recipe.dataset
    if config.split == "all" or not config.validation_fraction:
        return None
    folder = RunFolder(run or Path(gallery.manifest.run))
    return split_points(folder, trained, fabric, "validation", bar)


def _strangers(points: PointSet | None, names: Sequence[str]) -> Strangers:
    """Return the points whose labels are not in a gallery, at most `MOST`; those without a label are one class each."""
    if points is None:
        return Strangers(torch.empty(0, 0), np.empty(0, np.int64))
    given = [label or f"/{row}" for row, label in enumerate(points.labels)]
    rows = np.flatnonzero(~np.isin(given, names))
    codes = np.unique(np.array(given), return_inverse=True)[1]
    rows = drawn_rows(rows, codes, MOST)
    return Strangers(points.points_at(torch.from_numpy(rows)), np.unique(codes[rows], return_inverse=True)[1])


def _changed(gallery: GalleryFolder, stored: Identification) -> int:
    """Return how many images were added or removed since the calibration, as far as versions are recorded."""
    after = sorted((number, content.images) for number, content in gallery.manifest.contents.items())
    counts = [stored.images, *(images for number, images in after if number > stored.gallery_version), len(gallery)]
    return int(np.abs(np.diff(counts)).sum())


def _write(gallery: GalleryFolder, found: Identification, strangers: Strangers) -> None:
    """Write a calibration into its gallery."""
    with atomic_write(gallery.path / STRANGERS) as partial, partial.open("wb") as file:
        np.save(file, strangers.points.numpy(), allow_pickle=False)
    found.write(gallery.path / FILE)
