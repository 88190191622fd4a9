"""Points with what is known of their images: the one type that commands search, cluster, compare and evaluate."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from dmlkit.datasets.files.class_names import several_labels
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import thumbnail
from dmlkit.datasets.files.samples import SIDE
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, warn
from dmlkit.files.image_file import BadImageError, Box
from dmlkit.manifolds.base import Manifold
from dmlkit.nearest.search import BLOCK_ROWS, StoredPoints
from dmlkit.run_folder.folder import CheckpointName, RunFolder, find_run
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.manifest import Description, check_same_description
from dmlkit.vectors.trained import TrainedModel, describe, shortened


class PointItem(NamedTuple):
    """What is known of the image of one point."""

    id: int | str
    label: str | None
    path: str
    thumbnail: bytes | None = None  # a JPEG, of the box if there is one
    box: Box | None = None  # in the image file; None for the full image


class EmbeddedImages(NamedTuple):
    """Images whose points a model has computed, and that can be read again."""

    trained: TrainedModel
    dataset: Dataset
    rows: Tensor  # (N,) int64, the index of each image in the dataset
    local: Tensor | None = None  # (N, P, C) float16, local features, if they were computed with the points


class PointSet(StoredPoints, Protocol):
    """Points of one manifold and their images: in memory, a folder of embeddings, or a gallery.

    Attributes:
        source: name for people: a path, or a split of a run.
        manifest: description of the model that made the points; None for an array.
        run: run whose model embeds images for these points, if known.
        manifold: geometry of the points.
        paths: names of all images, (N,).
        labels: labels of all images, (N,); None for an image without one.
        boxes: boxes of all images, (N,); None for a full image.
        skipped: one message per image that could not be read.
        images: the images themselves, of points that were embedded now.
        stored: points on a disk that these were read from, or these.
    """

    @property
    def source(self) -> str: ...
    @property
    def manifest(self) -> Description | None: ...
    @property
    def run(self) -> Path | None: ...
    @property
    def manifold(self) -> Manifold: ...
    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def labels(self) -> Sequence[str | None]: ...
    @property
    def boxes(self) -> Sequence[Box | None]: ...
    @property
    def skipped(self) -> Sequence[str]: ...
    @property
    def images(self) -> EmbeddedImages | None: ...
    @property
    def stored(self) -> "PointSet": ...

    def items_at(self, rows: Tensor) -> list[PointItem]:
        """Return what is known of the images of rows (M,)."""
        ...


def taken(table: Any, rows: Tensor) -> Any:
    """Return rows (M,) int64 of an Arrow table; for an array of NumPy Arrow would import pandas, which takes 0.3 s."""
    import pyarrow as pa

    content = pa.py_buffer(rows.contiguous().numpy())
    return table.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, content]))


class PointsOnDisk:
    """What points on a disk have in common."""

    path: Path
    images: None = None

    @property
    def stored(self) -> Self:
        return self

    @property
    def source(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class PointsInMemory:
    """Points in memory: embedded now, or read from an array, a folder or a gallery.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.tensor([[0.0], [1.0]])
        >>> points = PointsInMemory("two", Euclidean(1), line, ["a/1.jpg", "a/2.jpg"], ["a", None])
        >>> points.items_at(torch.tensor([1])), points.class_codes()
        ([PointItem(id=1, label=None, path='a/2.jpg', thumbnail=None, box=None)], (['a'], tensor([ 0, -1])))
    """

    source: str
    manifold: Manifold
    points: Tensor
    paths: Sequence[str]
    labels: Sequence[str | None]
    manifest: Description | None = None
    run: Path | None = None
    skipped: Sequence[str] = ()  # one message per image that could not be read
    boxes: Sequence[Box | None] = ()  # N boxes, None for a full image. Default: all are full images
    images: EmbeddedImages | None = None  # if they were embedded now; otherwise ``paths`` are image files
    origin: PointSet | None = None  # points on a disk that these were read from; a gallery may have pictures
    columns: Sequence[str] = ()  # other columns of a file of vectors

    def __post_init__(self) -> None:
        object.__setattr__(self, "boxes", self.boxes or [None] * len(self.points))

    @property
    def stored(self) -> PointSet:
        return self if self.origin is None else self.origin

    def __len__(self) -> int:
        return len(self.points)

    def blocks(self, rows: int = BLOCK_ROWS) -> Iterator[Tensor]:
        yield from self.points.split(rows)

    def points_at(self, rows: Tensor) -> Tensor:
        return self.points[rows]

    def items_at(self, rows: Tensor) -> list[PointItem]:
        if self.origin is not None:
            return self.origin.items_at(rows)
        return [PointItem(row, self.labels[row], self.paths[row], box=self.boxes[row]) for row in map(int, rows)]

    def part(self, rows: Tensor) -> "PointsInMemory":
        """Return some rows (M,), without the pixels of their images and what a subclass knows of all rows."""
        numbers: list[int] = rows.tolist()
        paths, labels = [self.paths[row] for row in numbers], [self.labels[row] for row in numbers]
        boxes = [self.boxes[row] for row in numbers]
        known = (paths, labels, self.manifest, self.run, self.skipped, boxes)
        return PointsInMemory(self.source, self.manifold, self.points[rows], *known, columns=self.columns)

    @cached_property
    def short_paths(self) -> list[str]:
        """Paths without the folder that they share."""
        try:
            shared = os.path.commonpath({os.path.dirname(path) for path in self.paths})  # noqa: PTH120 - text, not files
        except ValueError:  # some are absolute
            return list(self.paths)
        return [path.removeprefix(f"{shared}{os.sep}") for path in self.paths]

    def picture(self, row: int, side: int = SIDE) -> bytes | None:
        """Return a small JPEG of an image, or None if it cannot be read or the sample has no pixels."""
        try:
            if self.images is None:
                (item,) = self.items_at(torch.tensor([row]))
                return item.thumbnail or thumbnail(item.path, item.box, side)
            dataset = self.images.dataset
            return dataset.kind.picture(dataset.sample(int(self.images.rows[row])), side)
        except BadImageError:
            return None

    def class_codes(self) -> tuple[list[str], Tensor]:
        """Return the distinct labels, sorted, and the index (N,) int64 of each image's label; -1 without one."""
        names = sorted({label for label in self.labels if label is not None})
        codes: dict[Any, int] = {name: code for code, name in enumerate(names)}
        return names, torch.tensor([codes.get(label, -1) for label in self.labels], dtype=torch.int64)


@dataclass(frozen=True)
class SomePoints(PointsInMemory):
    """Some of other points, with their items, e.g. the ids of the images in a folder of embeddings."""

    whole: PointSet = field(kw_only=True)
    kept: Tensor = field(kw_only=True)  # (N,) int64, their rows

    def items_at(self, rows: Tensor) -> list[PointItem]:
        return self.whole.items_at(self.kept[rows])


def some_points(points: PointSet, rows: Tensor) -> SomePoints:
    """Return some rows (M,) of points."""
    return SomePoints(**vars(in_memory(points).part(rows)), whole=points, kept=rows)


def separator_of(points: PointSet) -> str | None:
    """Return the separator of several labels per image in the dataset of points; None if each image has one label."""
    if points.images is not None:
        return points.images.dataset.separator
    with suppress(UserError):  # the run has moved
        return None if points.run is None else RunFolder(points.run).recipe().dataset.label_separator
    return None


def require_one_label(points: PointSet) -> None:
    """Raise a `UserError` if an image of points has several labels."""
    separator = separator_of(points)
    if separator is not None and any(label and separator in label for label in points.labels):
        raise UserError(several_labels(points.source, separator))


def in_memory(points: PointSet) -> PointsInMemory:
    """Return points in memory, each checked, with the names, labels and boxes of their images."""
    if isinstance(points, PointsInMemory):
        return points
    read, filled = torch.empty(len(points), points.manifold.point_dim), 0
    for block in points.blocks(BLOCK_ROWS):
        read[filled : filled + len(block)] = block
        filled += len(block)
    known = (points.paths, points.labels, points.manifest, points.run, points.skipped, points.boxes)
    return PointsInMemory(points.source, points.manifold, read, *known, origin=points)


def load_same_model(searched: PointSet, model: ModelChoice, ranks: Ranks) -> TrainedModel:
    """Return the model that made points."""
    if searched.images is not None and model.run is None:
        return searched.images.trained
    manifest, run = searched.manifest, model.run or searched.run
    if manifest is None:
        raise UserError(
            f"{searched.source}: the model of an array is unknown; search with a file of vectors instead of images"
        )
    if run is None:
        raise UserError(f"{searched.source}: the run that made it is unknown or has moved; name the run with --run RUN")
    fusion = model.fusion
    if fusion is None and manifest.fusion is not None:
        second = find_run(Path(manifest.fusion.run), run)
        fusion = manifest.fusion.model_copy(update={} if second is None else {"run": str(second)})
    folder, recorded = RunFolder(run), manifest.model.checkpoint

    def loaded(checkpoint: CheckpointName | None) -> TrainedModel:
        trained = ModelChoice(checkpoint=checkpoint, fusion=fusion).load(folder, ranks)
        if manifest.features < trained.recipe.embedding_dim and not trained.fusion and not trained.computation:
            with suppress(UserError):  # of `dmlkit embed --dims`, unless it is another model, which is reported below
                return shortened(trained, manifest.features)
        return trained

    trained = loaded(recorded if model.run is None else None)
    has_recorded = recorded == "pretrained" or folder.checkpoint_path(recorded).exists()
    # the run is that of the points, which has moved, or a newer one, whose checkpoint of the same name is another
    if trained.checkpoint != recorded and has_recorded and trained.aligned_to != manifest.model.fingerprint:
        same = loaded(recorded)
        trained = same if same.fingerprint == manifest.model.fingerprint else trained
    check_same_description(describe(trained), str(run), manifest, searched.source)
    return trained


def of_other_model(theirs: Description | None, searched: PointSet) -> str | None:
    """Return in words that points to search with are of a model that was mapped into the space of the searched ones.

    Return None if both are of one model, or if a model is not known.
    """
    ours = searched.manifest
    if ours is None or theirs is None or ours.model.fingerprint == theirs.model.fingerprint:
        return None
    return f"another model than that of {searched.source} embeds the images (dmlkit align)"


def warn_of_other_model(theirs: Description, searched: PointSet) -> None:
    """Warn that a threshold may not hold, see `of_other_model`."""
    if note := of_other_model(theirs, searched):
        warn(f"{note}; thresholds and probabilities of {searched.source} may not hold for it")
