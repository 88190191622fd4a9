"""Embeddings in memory with what is known of their images: of a folder, or of a split of a run's dataset."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import BadImageError, Dataset
from dmlkit.datasets.files.image import SIDE, small_picture, thumbnail
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.manifest import Description, describe
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.queries import embed_images
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.loading.cache import images_of_split
from dmlkit.manifolds.base import Manifold
from dmlkit.run_folder.folder import RunFolder


@dataclass(frozen=True)
class Collection:
    """Points and their images.

    Args:
        source: names it, for people.
        description: of the model.
        points: (N, D) float32.
        paths: N names.
        labels: N, None where an image has none.
        skipped: one message per image that could not be read.
        dataset: reads the images, where a run's dataset does; else the paths are of files.
        rows: (N,) int64, into the dataset.
    """

    source: str
    description: Description
    points: Tensor
    paths: Sequence[str]
    labels: Sequence[str | None]
    skipped: tuple[str, ...] = ()
    dataset: Dataset | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.points)

    @property
    def manifold(self) -> Manifold:
        """The geometry of the points."""
        return self.description.manifold.build(self.description.features)

    @cached_property
    def short_paths(self) -> list[str]:
        """The paths without the folder that they share."""
        try:
            shared = os.path.commonpath({os.path.dirname(path) for path in self.paths})  # noqa: PTH120 - text, not files
        except ValueError:  # some are absolute
            return list(self.paths)
        return [path.removeprefix(f"{shared}{os.sep}") for path in self.paths]

    def picture(self, row: int, side: int = SIDE) -> bytes | None:
        """A small JPEG of an image; None where there is none, or it cannot be read."""
        try:
            if self.dataset is None or self.rows is None:
                return thumbnail(self.paths[row], side=side)
            if self.dataset.num_features is None:
                return small_picture(self.dataset.sample(int(self.rows[row])), side)
        except BadImageError:
            pass
        return None

    def class_codes(self) -> tuple[list[str], Tensor]:
        """The distinct labels, sorted, and (N,) int64 which of them each image has; -1 where it has none."""
        names = sorted({label for label in self.labels if label is not None})
        codes: dict[Any, int] = {name: code for code, name in enumerate(names)}
        return names, torch.tensor([codes.get(label, -1) for label in self.labels], dtype=torch.int64)


def collection_at(
    source: Path,
    *,
    split: Split | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    bar: Bar = no_bar,
) -> Collection:
    """A folder of embeddings, or the images of a run's split embedded now.

    Args:
        source: what ``dmlkit embed`` or ``dmlkit train`` wrote.
        split: of a run's dataset; test by default.
        overrides: ``key=value`` each, of a run's dataset, which may have moved.
        device: where a run embeds, see `start_fabric`; auto by default.
        bar: shows each step.

    Raises:
        UserError: it is neither, or holds nothing, or what is no point of its manifold, or an option is for runs alone.
    """
    if (source / "manifest.json").exists():
        for name, value in (("--split", split), ("--set", " ".join(overrides)), ("--device", device)):
            if value:
                raise UserError(f"{name} {value}: {source} holds embeddings, which are made already; leave it out")
        return stored_collection(source)
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; expected one that train or embed wrote")
    fabric, split = start_fabric(device or "auto"), split or "test"
    trained = load_model(RunFolder(source), fabric, overrides=overrides)
    dataset = images_of_split(trained.recipe.dataset, split)
    return embedded_collection(trained, fabric, dataset, f"{split} split of {source}", bar)


def stored_collection(path: Path) -> Collection:
    """All of a folder of embeddings.

    Raises:
        UserError: it is damaged, or holds nothing, or a row is no point of its manifold.
    """
    folder = EmbeddingFolder(path)
    if len(folder) == 0:
        raise UserError(f"{path}: holds no embeddings")
    items = folder.items
    points = folder.read()
    paths: list[str] = items["path"].to_pylist()
    labels: list[str | None] = items["label"].to_pylist()
    return Collection(str(path), folder.manifest, points, paths, labels, folder.manifest.skipped)


def embedded_collection(
    trained: TrainedModel, fabric: Any, dataset: Dataset, source: str, bar: Bar = no_bar
) -> Collection:
    """Images embedded by a model, those that can be read.

    Raises:
        UserError: none can be read, or see `embed_dataset`.
    """
    found = embed_images(trained, fabric, dataset, source, bar)
    rows = found.indices.tolist()
    paths = [str(dataset.paths[row]) for row in rows]
    labels = [dataset.class_names[label] for label in found.labels.tolist()]
    return Collection(
        source,
        describe(trained),
        found.points,
        paths,
        labels,
        tuple(found.faults),
        dataset,
        found.indices,
    )
