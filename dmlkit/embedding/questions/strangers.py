"""Images whose labels are not in a gallery, which calibrate it and are kept for the next calibration."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dmlkit.embedding.fusion import ModelChoice
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.matched import MatchedSpace, matched_queries
from dmlkit.embedding.points import PointSet, PointsInMemory
from dmlkit.embedding.progress_bar import Bar
from dmlkit.embedding.questions.decisions import Decider
from dmlkit.embedding.questions.probability import drawn_rows
from dmlkit.embedding.questions.rates import MOST, MOST_MATCHED, Strangers
from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import command_word
from dmlkit.manifolds.numerics.check_points import check_points
from dmlkit.metrics.ranking.place import PlacedSpace

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


def stored_strangers(gallery: GalleryFolder, classes: np.ndarray, decider: Decider) -> Strangers:
    """Return the strangers of a calibration, given their classes (M,); none with places, which are not kept.

    Raises:
        UserError: a file is missing or damaged.
    """
    space, count = decider.searched.manifold, len(classes)
    if isinstance(space, PlacedSpace):
        return Strangers(torch.empty(0, 0), np.empty(0, np.int64))
    points = _stored_points(gallery, count)
    if isinstance(space, MatchedSpace):
        points = space.matched(points, space.store.add(_stored_features(gallery, (count, *space.store.local.shape))))
    return Strangers(points, classes)


def _stored_points(gallery: GalleryFolder, count: int) -> torch.Tensor:
    """Read the points of the strangers of a calibration.

    Raises:
        UserError: the file is missing or damaged.
    """
    path, advice = gallery.path / STRANGERS, f"calibrate again with dmlkit calibrate {command_word(gallery.path)}"
    points = torch.from_numpy(np.array(read_array(path)))
    width = gallery.manifold.point_dim
    if len(points) != count or (count and points.shape[1:] != (width,)) or points.dtype != torch.float32:
        raise UserError(f"{path}: this file is damaged: expected float32 ({count}, {width}); {advice}")
    if count:
        check_points(gallery.manifold, points, lambda row: f"{path}: row {row}", advice)
    return points


def _stored_features(gallery: GalleryFolder, shape: tuple[int, ...]) -> torch.Tensor:
    """Read the local features of the strangers of a calibration.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = gallery.path / FEATURES
    features = torch.from_numpy(np.array(read_array(path)))
    if features.shape != shape or features.dtype != torch.float16:
        advice = f"calibrate again with dmlkit calibrate {command_word(gallery.path)}"
        raise UserError(f"{path}: this file is damaged: expected float16 {shape}; {advice}")
    return features
