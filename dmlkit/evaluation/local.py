"""Local scores: matches of patches of a run's own network or of keypoints, their weight, and thresholds of pairs."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, warn
from dmlkit.evaluation.calibration import threshold_on
from dmlkit.evaluation.fusion import PairOfModels
from dmlkit.files.document import Document
from dmlkit.files.source import LOCAL, SIFT
from dmlkit.identify.probability import drawn_rows
from dmlkit.identify.scored import FeatureStore, MatchedSpace
from dmlkit.loading.inputs import refuse_faults
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import Points
from dmlkit.nearest.scored import LocalScores, score_candidates
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.features import software_of
from dmlkit.vectors.fusion import require_torch
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.local_features import (
    centered,
    features_of,
    keypoints_of,
    maps_of,
    match_features,
    mean_of,
    require_one_process,
)
from dmlkit.vectors.manifest import Fusion, LocalFusion, SplitRecord
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import hash_images, split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

MOST = 600  # validation images, all pairs of which are matched: 180 000 pairs in 30 s
ROWS = 16  # whose pairs are matched at once


class LocalChoice(NamedTuple):
    """Weight of local scores, and what it was chosen on."""

    fusion: LocalFusion
    found: Embeddings
    """Validation images."""
    features: Tensor
    """(N, P, C) float16, their local features."""


def choose_local(
    run: Path,
    *,
    kind: str = LOCAL,
    checkpoint: CheckpointName | None = None,
    fabric: Ranks,
    bar: Bar = no_bar,
) -> LocalFusion:
    """Choose the weight of local scores on the validation classes of a run, as `choose_fusion` does.

    The pairs are those of each validation image and its nearest candidates.

    Args:
        kind: `LOCAL` for patches of its network, `SIFT` for keypoints, which need no training.
        checkpoint: its checkpoint. Default: best, otherwise last.

    Raises:
        UserError: the run has no validation classes, or see `maps_of` and `keypoints_of`.
    """
    folder = RunFolder(run)
    return local_choice(folder, load_model(folder, fabric, checkpoint), kind, fabric, bar).fusion


def local_choice(run: RunFolder, trained: TrainedModel, kind: str, fabric: Ranks, bar: Bar = no_bar) -> LocalChoice:
    """Choose the weight of local scores of a model, see `choose_local`.

    Raises:
        UserError: see `choose_local`.
    """
    trained.recipe.dataset.require_one_label(f"--with {kind}")
    if kind == LOCAL:
        require_torch(trained)
    dataset = trained.recipe.dataset.build("validation")
    found = split_embeddings(run, trained, fabric, dataset, "validation", bar=bar)
    features, mean = _features(kind, trained, fabric, dataset, found, bar)
    space = deepcopy(trained.manifold).cpu()
    with bar("matching images", len(found.points)) as advance, torch.no_grad():
        match = match_features(kind, features, features)
        local = score_candidates(space, (found.points, found.points), match, advance)
        choice = PairOfScores(found, space, local).choice()
    fusion = LocalFusion(
        run=kind,
        checkpoint=trained.checkpoint,
        fingerprint=trained.fingerprint,
        **choice._asdict(),
        mean=tuple(mean.tolist()),
        shape=(features.shape[1], features.shape[2]),
    )
    return LocalChoice(fusion, found, features)


class PairOfScores(PairOfModels):
    """Similarities and local scores of images and their candidates.

    Args:
        local: local scores among each other.
    """

    def __init__(self, found: Embeddings, manifold: Manifold, local: LocalScores) -> None:
        rows = torch.arange(len(found.points))[:, None].expand_as(local.candidates)
        others = rows != local.candidates
        super().__init__([found.points], found.labels, [manifold], (rows[others], local.candidates[others]))
        self.local = local
        self.scores.append(local.scores[others].double().numpy())

    def map_at_r(self, share: float, asked: Tensor) -> Tensor:
        """Return the map@r of those of the images asked (N,) bool that have others of their class."""
        local = LocalScores(self.local.candidates[asked], self.local.scores[asked], share)
        return self.map_at_r_of(self.points[0], self.manifolds[0], asked, local)


def local_scores(
    fusion: Fusion, trained: TrainedModel, fabric: Ranks, dataset: Dataset, found: Embeddings, bar: Bar = no_bar
) -> Callable[[Tensor, Tensor], LocalScores]:
    """Return a function of the rows (N,) bool of queries and gallery, which scores the candidates of the queries.

    Args:
        fusion: weight of the local scores.
        trained, fabric, dataset, bar: see `maps_of`.
        found: embeddings of the images.
    """
    features, points = _features(fusion.run, trained, fabric, dataset, found, bar)[0], found.points
    space = deepcopy(trained.manifold).cpu()

    def scored(query: Tensor, gallery: Tensor) -> LocalScores:
        sides = points[query], points[gallery]
        with bar("matching images", int(query.sum())) as advance, torch.no_grad():
            match = match_features(fusion.run, features[query], features[gallery])
            return score_candidates(space, sides, match, advance)._replace(share=fusion.share)

    return scored


def _features(
    kind: str, trained: TrainedModel, fabric: Ranks, dataset: Dataset, found: Embeddings, bar: Bar
) -> tuple[Tensor, Tensor]:
    """Return local features (N, P, C) of images, and the mean (C,) of all patches; none of keypoints."""
    if kind == SIFT:
        require_one_process(SIFT, fabric)
        return keypoints_of(dataset, found.indices, bar).packed, torch.empty(0)
    maps = maps_of(trained, fabric, dataset, found.indices, bar)
    mean = mean_of(maps)
    return centered(maps, mean), mean


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
        kind: `LOCAL` or `SIFT`.
        far: the false accept rate.

    Raises:
        UserError: there are too few pairs for ``far``, or see `choose_local`.
    """
    config, place = trained.recipe.dataset, run.path / f"threshold-{kind}.json"
    record = SplitRecord(
        images=hash_images(config.build("validation"), config),
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
        local: weight of the matches.

    Raises:
        UserError: see `features_of`.
    """
    space = MatchedSpace(deepcopy(trained.manifold).cpu(), FeatureStore(None, local))
    features = found.local
    if features is None:
        features = features_of(local, trained, fabric, ImageList(list(images)), found.indices, bar)
    return found._replace(points=space.matched(found.points, space.store.add(features))), space
