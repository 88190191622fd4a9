"""Local scores: matches of patches of a run's own network or of keypoints, their weight, and thresholds of pairs."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, warn
from dmlkit.evaluation.calibration import threshold_of_pairs
from dmlkit.evaluation.fusion import Weighing, WeightChoice, map_at_r, similarities_of
from dmlkit.evaluation.pair_probability import fit_scores, sampled_pairs
from dmlkit.files.document import Document
from dmlkit.files.source import LOCAL, SIFT
from dmlkit.identify.probability import drawn_rows
from dmlkit.loading.inputs import refuse_faults
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.pairing import Pairing
from dmlkit.nearest.rescore import CANDIDATES, Rescorer, nearest_rows
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import PairProbability, Threshold
from dmlkit.vectors.fusion import require_torch
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.local_features import (
    centered,
    features_of,
    keypoints_of,
    maps_of,
    match_scores,
    mean_of,
    require_one_process,
)
from dmlkit.vectors.manifest import Fusion, LocalFusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.store import hash_images, stored_model
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel

MOST = 600  # validation images, all pairs of which are matched: 180 000 pairs in 30 s
ROWS = 16  # whose pairs are matched at once


class LocalChoice(NamedTuple):
    """Weight of local scores, and what it was chosen on."""

    fusion: LocalFusion
    found: Embeddings  # validation images
    features: Tensor  # (N, P, C) float16, their local features


def choose_local(run: RunFolder, trained: TrainedModel, kind: str, fabric: Ranks, bar: Bar = no_bar) -> LocalChoice:
    """Choose the weight of local scores on the validation classes of a run, as `choose_fusion` does.

    The pairs are those of each validation image and its nearest candidates.

    Args:
        kind: `LOCAL` for patches of the model's network, `SIFT` for keypoints, which need no training.
    """
    trained.recipe.dataset.require_one_label(f"--with {kind}")
    if kind == LOCAL:
        require_torch(trained)
    dataset = trained.recipe.dataset.build("validation")
    found = split_embeddings(run, trained, fabric, dataset, "validation", bar=bar)
    features, mean = local_features(kind, trained, fabric, dataset, found, bar)
    with bar("matching images", len(found.points)) as advance, torch.no_grad():
        scores = match_scores(kind, features.__getitem__, advance)
        choice = weigh_scores(found, deepcopy(trained.manifold).cpu(), Rescorer(scores, 0.0, CANDIDATES))
    fusion = LocalFusion(
        run=kind,
        checkpoint=trained.checkpoint,
        fingerprint=trained.fingerprint,
        **choice._asdict(),
        mean=tuple(mean.tolist()),
        shape=(features.shape[1], features.shape[2]),
    )
    return LocalChoice(fusion, found, features)


def weigh_scores(found: Embeddings, manifold: Manifold, rescorer: Rescorer) -> WeightChoice:
    """Choose the weight of the scores of each image's nearest ones, each of which is computed once."""
    from scipy.sparse import csr_array, vstack

    points, labels, size = found.points, found.labels, len(found.points)
    assert rescorer.most is not None
    blocks, parts = list[tuple[Tensor, Tensor]](), list[Any]()
    for rows in torch.arange(size).split(ROWS):
        near = nearest_rows(manifold.similarity(points[rows], points).double(), rescorer.most)
        blocks.append((near, rescorer.score(rows, near)))
        starts = torch.arange(len(rows) + 1) * near.shape[1]
        columns = (one.flatten().numpy() for one in reversed(blocks[-1]))
        parts.append(csr_array((*columns, starts.numpy()), (len(rows), size)))
    table = csr_array(vstack(parts))

    def known(rows: Tensor, items: Tensor) -> Tensor:
        return torch.from_numpy(table[rows.numpy()].toarray()).gather(1, items)

    second, scores = (torch.cat(column) for column in zip(*blocks, strict=True))
    first = torch.arange(size)[:, None].expand_as(second)
    others = first != second
    pairs = first[others], second[others]
    both = [similarities_of(manifold, points, *pairs), scores[others].numpy()]

    def scored_map(share: float, asked: Tensor) -> Tensor:
        return map_at_r(points, labels, manifold, asked, replace(rescorer, score=known, share=share))

    return Weighing(labels, pairs, both, scored_map).choice()


def by_features(features: Tensor, fusion: Fusion) -> Rescorer:
    """Return the local scores of images by the rows of their features (N, P, C) float16."""
    return Rescorer(match_scores(fusion.run, features.__getitem__), fusion.share, CANDIDATES)


def local_features(
    kind: str, trained: TrainedModel, fabric: Ranks, dataset: Dataset, found: Embeddings, bar: Bar
) -> tuple[Tensor, Tensor]:
    """Return local features (N, P, C) of images, and the mean (C,) of all patches; none of keypoints."""
    if kind == SIFT:
        require_one_process(SIFT, fabric)
        return keypoints_of(dataset, found.indices, bar).packed, torch.empty(0)
    maps = maps_of(trained, fabric, dataset, found.indices, bar)
    mean = mean_of(maps)
    return centered(maps, mean), mean


class LocalThreshold(Document, frozen=True, strict=True):
    """``threshold-local.json`` or ``threshold-sift.json``: the calibration of ``verify --with``, kept in the run."""

    kind: ClassVar[str] = "calibrated threshold of similarities and matches"

    fusion: LocalFusion
    """Weight of the matches."""
    threshold: Threshold
    """Threshold of both, for the model's fingerprint and the false accept rate in it."""
    images: str
    """Hash of the validation images and their labels."""
    points: str
    """Key of the points of the model, see `StoredModel`."""


def local_threshold(
    run: RunFolder, trained: TrainedModel, kind: str, far: float, fabric: Ranks, bar: Bar = no_bar
) -> LocalThreshold:
    """Return the weight of matches and the threshold of both similarities: those that the run keeps, or new ones.

    They are chosen again if the weights, the validation images, the software, the device or ``far`` are others.

    Args:
        kind: `LOCAL` or `SIFT`.
    """
    config, place = trained.recipe.dataset, run.path / f"threshold-{kind}.json"
    own = (hash_images(config.build("validation"), config), stored_model(trained).key)
    with suppress(UserError):  # there is none, or it is damaged
        kept = LocalThreshold.read(place)
        if (kept.images, kept.points, kept.threshold.far) == (*own, far):
            return kept
    choice = choose_local(run, trained, kind, fabric, bar)
    threshold = _chosen_threshold(choice, run, trained, far, bar)
    found = LocalThreshold(fusion=choice.fusion, threshold=threshold, images=own[0], points=own[1])
    try:
        found.write(place)
    except OSError as error:
        warn(f"{place}: cannot write: {error.strerror or error}; the next verify --with {kind} calibrates again")
    return found


def _chosen_threshold(choice: LocalChoice, run: RunFolder, trained: TrainedModel, far: float, bar: Bar) -> Threshold:
    """Choose the threshold and the probability of matched pairs on validation images, at most `MOST`."""
    found, space = choice.found, deepcopy(trained.manifold).cpu()
    refuse_faults(found.faults, trained.recipe.dataset.on_bad_image)
    rows = torch.from_numpy(np.sort(drawn_rows(np.arange(len(found.labels)), found.labels.numpy(), MOST)))
    points, labels = found.points[rows].double(), found.labels[rows].unique(return_inverse=True)[1]
    rescorer = by_features(choice.features[rows], choice.fusion)
    table = torch.zeros(len(points), len(points), dtype=torch.float64)
    with bar("matching images", len(points)) as advance:
        for part in torch.arange(len(points)).split(ROWS):
            first = int(part[0])
            similarity = space.similarity(points[part], points[first:])
            others = torch.arange(first, len(points)).expand(len(part), -1)
            table[part, first:] = rescorer.mixed(similarity, part, others)
            advance(len(part))
    table = table.triu() + table.triu(1).T  # a pair has one similarity

    def fit() -> PairProbability:
        first, second = sampled_pairs(labels)
        return fit_scores(table[first, second].numpy(), torch.stack([labels[first], labels[second]], 1).numpy())

    return threshold_of_pairs(
        Pairing.of_table(table, labels), f"{space.similarity_name}_and_matches", fit, run, trained, far
    )


def matched_pairs(
    images: Sequence[str], found: Embeddings, trained: TrainedModel, local: LocalFusion, fabric: Ranks, bar: Bar
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of rows (P,) of image files, which returns the similarities with matches of these pairs."""
    features, space = found.local, deepcopy(trained.manifold).cpu()
    if features is None:
        features = features_of(local, trained, fabric, ImageList(list(images)), found.indices, bar)
    rescorer = by_features(features, local)

    def scores(first: Tensor, second: Tensor) -> Tensor:
        similarity = space.paired_similarity(found.points[first].double(), found.points[second].double())
        return rescorer.mixed(similarity[:, None], first, second[:, None])[:, 0]

    return scores
