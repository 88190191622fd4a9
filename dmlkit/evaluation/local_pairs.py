"""Pairs of images whose local features match: their similarities, and the threshold from which on they are the same."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.images import ImageList
from dmlkit.embedding.in_memory import Embeddings
from dmlkit.embedding.local_features import features_of
from dmlkit.embedding.manifest import LocalFusion
from dmlkit.embedding.matched import FeatureStore, MatchedSpace
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.probability import drawn_rows
from dmlkit.embedding.stored import split_embeddings
from dmlkit.embedding.trained import TrainedModel
from dmlkit.evaluation.calibration import threshold_on
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


def choose_local_threshold(
    run: RunFolder, trained: TrainedModel, local: LocalFusion, far: float, fabric: Ranks, bar: Bar = no_bar
) -> Threshold:
    """Choose the threshold and the probability of matched pairs on validation images, at most `MOST`.

    Args:
        run: the run.
        trained: its model.
        local: weight of the matches.
        far: the false accept rate.
        fabric, bar: device, and what shows each step.

    Raises:
        UserError: there are too few pairs for ``far``, or see `split_embeddings` and `features_of`.
    """
    config = trained.recipe.dataset
    dataset = images_of_split(config, "validation")
    found = split_embeddings(run, trained, fabric, dataset, "validation", bar=bar)
    refuse_faults(found.faults, config.on_bad_image)
    rows = torch.from_numpy(np.sort(drawn_rows(np.arange(len(found.labels)), found.labels.numpy(), MOST)))
    space = MatchedSpace(deepcopy(trained.manifold).cpu(), FeatureStore(None, local))
    features = features_of(local, trained, fabric, dataset, found.indices[rows], bar)
    points = space.matched(found.points[rows], space.store.add(features))
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
    features = features_of(local, trained, fabric, ImageList(list(images)), found.indices, bar)
    return found._replace(points=space.matched(found.points, space.store.add(features))), space
