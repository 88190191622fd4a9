"""Pairs of images whose local features match: their similarities, and the threshold from which on they are the same."""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.features import software_of
from dmlkit.embedding.images import ImageList
from dmlkit.embedding.in_memory import Embeddings
from dmlkit.embedding.local_features import features_of
from dmlkit.embedding.manifest import LocalFusion, SplitRecord
from dmlkit.embedding.matched import FeatureStore, MatchedSpace
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.probability import drawn_rows
from dmlkit.embedding.stored import hash_images, warn
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.evaluation.calibration import threshold_on
from dmlkit.evaluation.local import LocalChoice, local_choice
from dmlkit.files.document import Document
from dmlkit.loading.cache import images_of_split
from dmlkit.loading.inputs import refuse_faults
from dmlkit.metrics.base import Points
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import Threshold

MOST = 600  # validation images, all pairs of which are matched: 180 000 pairs in 30 s
ROWS = 16  # whose pairs are matched at once


class MatchedPairs(MatchedSpace):
    """Geometry of matched points, all of whose similarities are computed once.

    Args:
        space: the geometry.
        points: (N, D + 1) all points that have features.
        bar: shows the points.
    """

    def __init__(self, space: MatchedSpace, points: Tensor, bar: Bar = no_bar) -> None:
        super().__init__(space.space, space.store)
        self.table = torch.zeros(len(points), len(points), dtype=torch.float64)
        with bar("matching images", len(points)) as advance:
            for rows in torch.arange(len(points)).split(ROWS):
                first = int(rows[0])
                self.table[rows, first:] = space.similarity(points[rows], points[first:])
                advance(len(rows))
        self.table = self.table.triu() + self.table.triu(1).T  # a pair has one similarity

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x (N, D + 1) and y (M, D + 1): (N, M)."""
        return self.table[x[:, -1].long()][:, y[:, -1].long()]

    def paired_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x and y (N, D + 1): (N,)."""
        return self.table[x[:, -1].long(), y[:, -1].long()]


class LocalThreshold(Document, frozen=True, strict=True):
    """``threshold-local.json`` or ``threshold-sift.json``: the calibration of ``verify --with``, kept in the run."""

    kind: ClassVar[str] = "calibrated threshold of similarities and matches"

    fusion: LocalFusion
    """Weight of the matches."""
    threshold: Threshold
    """Threshold of both, for the model's fingerprint and the false accept rate in it."""
    split: SplitRecord
    """What both depend on besides."""


def local_threshold(
    run: RunFolder, trained: TrainedModel, kind: str, far: float, fabric: Ranks, bar: Bar = no_bar
) -> LocalThreshold:
    """Return the weight of matches and the threshold of both similarities: those that the run keeps, or new ones.

    They are chosen again if the weights, the validation images, the software, the device or ``far`` are others.

    Args:
        run: the run.
        trained: its model.
        kind: `LOCAL` or `SIFT`.
        far: the false accept rate.
        fabric, bar: device, and what shows each step.

    Raises:
        UserError: there are too few pairs for ``far``, or see `choose_local`.
    """
    config, place = trained.recipe.dataset, run.path / f"threshold-{kind}.json"
    record = SplitRecord(
        images=hash_images(images_of_split(config, "validation"), config),
        software=software_of(trained.recipe),
        device=trained.place,
        checkpoint=trained.saved,
    )
    with suppress(UserError):  # there is none, or it is damaged
        kept = LocalThreshold.read(place)
        if (kept.threshold.weights, kept.threshold.far, kept.split) == (trained.fingerprint, far, record):
            return kept
    choice = local_choice(run, trained, kind, fabric, bar)
    threshold = _chosen_threshold(choice, run, trained, far, bar)
    found = LocalThreshold(fusion=choice.fusion, threshold=threshold, split=record)
    try:
        found.write(place)
    except OSError as error:
        warn(f"{place}: cannot write: {error.strerror or error}; the next verify --with {kind} calibrates again")
    return found


def _chosen_threshold(choice: LocalChoice, run: RunFolder, trained: TrainedModel, far: float, bar: Bar) -> Threshold:
    """Choose the threshold and the probability of matched pairs on validation images, at most `MOST`."""
    found = choice.found
    refuse_faults(found.faults, trained.recipe.dataset.on_bad_image)
    rows = torch.from_numpy(np.sort(drawn_rows(np.arange(len(found.labels)), found.labels.numpy(), MOST)))
    space = MatchedSpace(deepcopy(trained.manifold).cpu(), FeatureStore(None, choice.fusion))
    points = space.matched(found.points[rows], space.store.add(choice.features[rows]))
    labels = found.labels[rows].unique(return_inverse=True)[1]
    return threshold_on(Points(points, labels, MatchedPairs(space, points, bar)), run, trained, far)


def matched_images(
    images: Sequence[str], found: Embeddings, trained: TrainedModel, local: LocalFusion, fabric: Ranks, bar: Bar
) -> tuple[Embeddings, MatchedSpace]:
    """Return the points of image files with their local features, and their geometry.

    Args:
        images: the files.
        found: their embeddings.
        trained: the model.
        local: weight of the matches.
        fabric, bar: device, and what shows each step.

    Raises:
        UserError: see `features_of`.
    """
    space = MatchedSpace(deepcopy(trained.manifold).cpu(), FeatureStore(None, local))
    features = found.local
    if features is None:
        features = features_of(local, trained, fabric, ImageList(list(images)), found.indices, bar)
    return found._replace(points=space.matched(found.points, space.store.add(features))), space
