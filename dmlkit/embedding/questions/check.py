"""Check whether new images are like those that calibrated a gallery, by a two-sample test: ``dmlkit gallery check``."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt
from torch import Tensor

from dmlkit.embedding.fusion import OWN_MODEL, ModelChoice
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.points import PointsInMemory, all_points
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.calibration import Identification, labeled_decider
from dmlkit.embedding.questions.decisions import Decider
from dmlkit.embedding.sources import open_points, open_queries
from dmlkit.errors import UserError
from dmlkit.files.document import Document
from dmlkit.files.escape import command_word
from dmlkit.metrics.statistics import holm

MOST = 2000  # images of each side: 1.6e10 products at most, where all get the same label
MOST_SEARCHED = 2**17  # pictures among which both sides are identified
LEAST = 10  # images of each side; fewer say nothing
ALPHA = 0.05


class Difference(BaseModel, frozen=True, extra="forbid"):
    """Two-sample test of one aspect."""

    distance: NonNegativeFloat
    """Energy distance, see `energy_test`."""
    p_value: float
    corrected: float
    """The p-value after Holm's correction for both tests."""


class QueriesCheck(Document, frozen=True):
    """Comparison of new images with those of a gallery."""

    kind: ClassVar[str] = "check of a gallery"

    images: NonNegativeInt
    """Compared images of the gallery: those that get a label that a new image gets too."""
    queries: NonNegativeInt
    """Compared new images."""
    median_scores: tuple[float, float]
    """Median similarity to the nearest picture, of the gallery's images and of the new ones."""
    scores: Difference
    embeddings: Difference
    differs: bool
    """Whether a corrected p-value is below 0.05: the rates of the calibration may not hold for such images."""


class Compared(NamedTuple):
    """Two sets of points, identified among the same others."""

    points: tuple[Tensor, Tensor]  # (N, D) and (M, D)
    scores: tuple[Tensor, Tensor]  # (N,) and (M,), similarity to the nearest
    guesses: tuple[Tensor, Tensor]  # (N,) and (M,) int64


def check_queries(path: Path, images: Path, *, model: ModelChoice = OWN_MODEL, bar: Bar = no_bar) -> QueriesCheck:
    """Test whether new images are like those of a calibrated gallery, by their scores and by their embeddings.

    The images must be of labels in the gallery. Both tests compare the images that get the same label, so that the
    shares of the labels may differ. If the gallery was calibrated with ``--near``, one of each group of near-duplicates
    is compared.

    Args:
        model: run of the gallery, if it was moved, and device.

    Raises:
        UserError: the gallery is not calibrated, or there are too few images to compare.
    """
    gallery = open_points(path)
    assert isinstance(gallery, GalleryFolder)
    calibration = Identification.of(gallery)
    if calibration is None:
        raise UserError(f"{path}: this gallery is not calibrated; run dmlkit calibrate {command_word(path)} first")
    near = calibration.near
    decider = labeled_decider(gallery, near=near)[1]
    asked = open_queries(images, gallery, model=model, bar=bar)
    queries = all_points(asked)
    groups = np.arange(len(queries))
    if near is not None and len(queries):
        same = PointsInMemory(asked.source, gallery.manifold, queries, asked.paths, [""] * len(queries))
        groups = labeled_decider(same, near=near)[1].groups
    found = compare_images(decider, queries, groups)
    counts = [len(side) for side in found.scores]
    if min(counts) < LEAST:
        raise UserError(
            f"{images}: {counts[1]} of {len(queries)} images can be compared, with {counts[0]} of the gallery that get "
            f"the same labels; at least {LEAST} of each are needed, so name more images"
        )
    return measure_difference(found, decider)


def compare_images(decider: Decider, queries: Tensor, groups: np.ndarray, *, seed: int = 0) -> Compared:
    """Identify new images and some of a gallery among its other images; keep those whose label is found on both sides.

    At most half of the gallery's images are drawn, at random. If the new images have the distribution of the gallery,
    then scores and guesses of both sides have the same distribution, which would not be so if an image of the gallery
    were searched among all others and a new one among all.

    Args:
        decider: labeled points; one image of each group is drawn.
        queries: (M, D) the new points.
        groups: (M,) their groups.
    """
    generator = np.random.default_rng(seed)
    searched, order = decider.searched, _one_of_each(decider.groups, generator)
    own = _every_second(order, decider.codes)[:MOST]
    others = generator.permutation(np.flatnonzero(~np.isin(decider.groups, decider.groups[own])))[:MOST_SEARCHED]
    codes, nothing = np.unique(decider.codes[others], return_inverse=True)[1], [""] * len(others)
    points = searched.points_at(torch.from_numpy(others))
    reference = Decider(PointsInMemory(searched.source, searched.manifold, points, nothing, nothing), codes, "nearest")
    rows = torch.from_numpy(_one_of_each(groups, generator)[:MOST])
    sides = searched.points_at(torch.from_numpy(own)), queries[rows]
    decisions = [reference.decide(side) for side in sides]
    guesses = [torch.tensor([one.code for one in side], dtype=torch.int64) for side in decisions]
    scores = [torch.tensor([one.score for one in side], dtype=torch.float64) for side in decisions]
    kept = [torch.isin(one, other) for one, other in (guesses, guesses[::-1])]
    first, second = ((sides[side][rows], scores[side][rows], guesses[side][rows]) for side, rows in enumerate(kept))
    return Compared(*zip(first, second, strict=True))


def measure_difference(compared: Compared, decider: Decider, *, seed: int = 0) -> QueriesCheck:
    """Test scores and embeddings of both sides, at least one of each, for the same distribution per guessed label."""
    one, other = compared.scores
    scores = energy_test(one[:, None], other[:, None], compared.guesses, torch.cdist, seed=seed)
    first, second = (points.double() for points in compared.points)
    embeddings = energy_test(first, second, compared.guesses, decider.searched.manifold.distance, seed=seed)
    assert scores is not None and embeddings is not None
    corrected = holm([scores.p_value, embeddings.p_value])
    return QueriesCheck(
        images=len(one),
        queries=len(other),
        median_scores=(float(one.median()), float(other.median())),
        scores=Difference(**scores._asdict(), corrected=corrected[0]),
        embeddings=Difference(**embeddings._asdict(), corrected=corrected[1]),
        differs=min(corrected) < ALPHA,
    )


def _one_of_each(groups: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return one row of each group, in random order."""
    order = generator.permutation(len(groups))
    return order[np.sort(np.unique(groups[order], return_index=True)[1])]


def _every_second(rows: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return every second row of each label, in the given order: the other half has as many images of it."""
    by_label = np.argsort(codes[rows], kind="stable")
    starts = np.unique(codes[rows][by_label], return_index=True)[1]
    rank = np.empty(len(rows), np.int64)
    rank[by_label] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
    return rows[rank % 2 == 1]


PERMUTATIONS = 999  # the smallest p-value is 1 / 1000


class TwoSamples(NamedTuple):
    """Result of a two-sample test."""

    distance: float
    """Energy distance, at least 0, in the unit of the distance of the points; the mean over strata."""
    p_value: float


def energy_test(
    first: Tensor,
    second: Tensor,
    strata: tuple[Tensor, Tensor],
    distance: Callable[[Tensor, Tensor], Tensor],
    *,
    seed: int = 0,
) -> TwoSamples | None:
    r"""Test whether two samples have the same distribution within each stratum, by energy distances and permutations.

    The energy distance (Székely & Rizzo 2013, eq. 6.1) of samples X of n and Y of m points,

    .. math:: E = \frac{2}{nm} \sum_{i,j} d(x_i, y_j) - \frac{1}{n^2} \sum_{i,j} d(x_i, x_j)
                  - \frac{1}{m^2} \sum_{i,j} d(y_i, y_j),

    is 0 only for equal distributions if d is a distance of negative type, as on all our manifolds. The statistic is the
    sum of :math:`\frac{nm}{n + m} E` over the strata, and its p-value is the share of permutations of the points of
    each stratum with at least that sum. It is exact for points that are independent within their stratum, whatever the
    shares of the strata in either sample.

    Args:
        first, second: (N, D) and (M, D) points.
        strata: (N,) and (M,) int64, the stratum of each point.
        distance: function of two sets of points (n, D) and (m, D), which returns their distances (n, m).

    Returns:
        The result; None if no stratum has points of both samples.

    Example:
        >>> draws = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> one = torch.zeros(30, dtype=torch.int64)
        >>> same = energy_test(draws[:30], draws[30:], (one, one), torch.cdist)
        >>> moved = energy_test(draws[:30], draws[30:] + 1.5, (one, one), torch.cdist)
        >>> same.p_value > 0.05, moved.p_value
        (True, 0.001)
    """
    generator = torch.Generator().manual_seed(seed)
    points, codes = torch.cat([first, second]), torch.cat(strata)
    is_first = torch.arange(len(points)) < len(first)
    total, weight = torch.zeros(1 + PERMUTATIONS, dtype=torch.float64), 0.0
    for code in codes.unique():
        rows = (codes == code).nonzero()[:, 0]
        size, ours = len(rows), int(is_first[rows].sum())
        if ours in (0, size):
            continue
        # E is -w^T D w with 1 / n for points of the first sample and -1 / m for those of the second
        own = torch.where(is_first[rows], 1 / ours, -1 / (size - ours)).double()
        shuffled = own[torch.rand(PERMUTATIONS, size, generator=generator).argsort(1)]
        weights = torch.cat([own[None], shuffled])
        distances = distance(points[rows], points[rows]).double()
        factor = ours * (size - ours) / size
        total -= factor * ((weights @ distances) * weights).sum(1)
        weight += factor
    if weight == 0:
        return None
    rounding = 1e-9 * float(total.abs().max())
    extreme = int((total[1:] >= total[0] - rounding).sum())
    return TwoSamples(max(0.0, float(total[0]) / weight), (extreme + 1) / (PERMUTATIONS + 1))
