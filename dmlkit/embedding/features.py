"""Features of a frozen backbone, computed once: by the engine that embeds, into a folder that runs may share."""

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning_fabric import Fabric
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.paths import PickedPaths
from dmlkit.datasets.files.vector_file import VectorFile
from dmlkit.embedding.embed import embed_job
from dmlkit.embedding.in_memory import Advance
from dmlkit.embedding.job import EmbedJob, PartEmbedder
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.files.differences import differences
from dmlkit.files.document import Document
from dmlkit.loading.inputs import Draw, Inputs, Item, TransformedImages
from dmlkit.manifolds.euclidean import EuclideanConfig
from dmlkit.model import EmbeddingModel, backbone_alone
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.base import TransformConfig

DESCRIPTION = "features.json"
Bar = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows what goes on, of how many images, and gives what is told of those that are done."""


class FeatureDescription(Document, frozen=True, strict=True, use_attribute_docstrings=True):
    """``features.json``: what cached features depend on. Written before the first of them is computed."""

    kind: ClassVar[str] = "description of cached features"

    weights: str
    """The hash of the backbone's weights."""
    transform: dict[str, Any]
    """From an image to the pixels that the backbone takes."""
    views: NonNegativeInt
    """Augmented views of each image; 0: the image as evaluation shows it."""
    dataset: dict[str, Any]
    """Name and options, as in the recipe."""
    images: PositiveInt
    """How many."""
    names: str
    """The hash of their names."""
    files: str
    """The hash of the sizes of their files and of when these were changed."""


class Views(Dataset):
    """Each image of a dataset several times.

    Args:
        dataset: the images.
        views: how many times.
    """

    def __init__(self, dataset: Dataset, views: int) -> None:
        images = np.arange(len(dataset)).repeat(views)
        super().__init__(
            dataset.labels.repeat_interleave(views), dataset.class_names, PickedPaths(dataset.paths, images)
        )
        self.dataset, self.views = dataset, views
        self.in_memory, self.resizing = dataset.in_memory, dataset.resizing

    def key(self, index: int) -> str:
        return f"{self.dataset.key(index // self.views)} view {index % self.views}"

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(index // self.views)


class AugmentedViews(Inputs):
    """Views, each augmented in its own way: by its number, so that they are the same whoever computes them.

    Args:
        views: of a dataset's images.
        transform: the one for training is applied.
    """

    def __init__(self, views: Views, transform: TransformConfig) -> None:
        super().__init__(views)
        self.images = TransformedImages(views, transform, training=True)

    def __getitem__(self, draw: Draw) -> Item:
        index, _ = draw
        return self.images[index, int(np.random.default_rng(index).integers(2**62))]


@dataclass(frozen=True)
class FeatureJob(EmbedJob):
    """Features to compute: an embedding job whose images are views where there are any."""

    way_on = "mend it, or remove it, and give the command again with --resume: it goes on"

    def inputs(self, transform: TransformConfig | None) -> Inputs:
        if isinstance(self.dataset, Views) and transform is not None:
            return AugmentedViews(self.dataset, transform)
        return super().inputs(transform)


class CachedFeatures(Dataset):
    """Features in place of a dataset's images.

    Args:
        dataset: the images.
        vectors: V features of each image in turn, (N V, F).
    """

    in_memory = True

    def __init__(self, dataset: Dataset, vectors: VectorFile) -> None:
        super().__init__(
            dataset.labels,
            dataset.class_names,
            dataset.paths,
            query=dataset.query,
            gallery=dataset.gallery,
            super_classes=dataset.super_classes,
        )
        self.dataset, self.vectors = dataset, vectors
        self.views = len(vectors) // len(dataset)
        self.num_features = vectors.num_features

    def key(self, index: int) -> str:
        return self.dataset.key(index)

    def sample(self, index: int) -> Tensor:
        return self.view(index, 0)

    def view(self, index: int, view: int) -> Tensor:
        """Features (F,) of one view of image ``index``."""
        return torch.from_numpy(self.vectors.row(index * self.views + view))


class DrawnViews(Inputs):
    """Cached features to train on: of each image the view that the draw's seed decides."""

    def __init__(self, dataset: CachedFeatures) -> None:
        super().__init__(dataset)
        self.features = dataset

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        return Item(self.features.view(index, seed % self.features.views), int(self.features.labels[index]), index)


def cached_features(
    dataset: Dataset,
    recipe: Recipe,
    model: EmbeddingModel,
    fabric: Fabric,
    folder: Path,
    *,
    views: int,
    bar: Bar,
    what: str,
) -> CachedFeatures:
    """The features of a dataset's images, computed unless the folder holds them. The ranks share the work; where it is
    stopped it goes on.

    Args:
        dataset: the images.
        recipe: of the model.
        model: whose backbone; it goes to the fabric's device.
        fabric: the ranks.
        folder: of the features alone.
        views: augmented views of each image; 0 takes the image as evaluation shows it.
        bar: shows the progress.
        what: the images, in a word.

    Raises:
        UserError: the folder holds something else, or features of other weights, images or transforms; or an image
            cannot be read.
    """
    features = backbone_alone(model, EuclideanConfig().build(model.backbone.num_features)).to(fabric.device).eval()
    trained = TrainedModel(
        recipe.model_copy(update={"manifold": EuclideanConfig(), "embedding_dim": features.backbone.num_features}),
        features,
        "last",
        0,
    )
    if fabric.is_global_zero:
        _describe(folder, _description(dataset, recipe, features, views))
    fabric.barrier()
    if not (folder / "manifest.json").exists():
        job = FeatureJob(
            Views(dataset, views) if views else dataset,
            source=f"{recipe.dataset.name}:{what}",
            labelled=True,
            output=folder,
            skip_bad_images=False,
        )
        with bar(f"features of {what} images", len(job.dataset)) as advance, torch.random.fork_rng(devices=[]):
            compute = PartEmbedder(job, trained, fabric, workers=recipe.training.workers)
            embed_job(job, trained, fabric, compute, advance=advance, say=lambda _: None)
    fabric.barrier()
    vectors = VectorFile(folder)
    expected = (len(dataset) * max(views, 1), features.backbone.num_features)
    if vectors.values.shape != expected:
        raise UserError(f"{vectors.path}: has shape {vectors.values.shape}, expected {expected}; remove {folder}")
    return CachedFeatures(dataset, vectors)


def _description(dataset: Dataset, recipe: Recipe, model: EmbeddingModel, views: int) -> FeatureDescription:
    names, files = hashlib.sha256(), hashlib.sha256()
    for index in range(len(dataset)):
        names.update(dataset.key(index).encode() + b"\0")
        with suppress(OSError):  # rendered images have no files, those of an image cache need none
            status = os.stat(dataset.paths[index])  # noqa: PTH116 - Path costs 10 s for a million files
            files.update(f"{status.st_size} {status.st_mtime_ns}\0".encode())
    return FeatureDescription(
        weights=model.fingerprint(),
        transform=recipe.transform.model_dump(mode="json") if recipe.transform else {},
        views=views,
        dataset=recipe.dataset.model_dump(mode="json"),
        images=len(dataset),
        names=names.hexdigest(),
        files=files.hexdigest(),
    )


def _describe(folder: Path, description: FeatureDescription) -> None:
    """Write down what features depend on before the first is computed; or make sure that those here are the same.

    Raises:
        UserError: the folder holds something else, or other features.
    """
    path = folder / DESCRIPTION
    if path.exists():
        begun = FeatureDescription.read(path).plain()
        changes = list(differences("", begun, description.plain()))
        if changes:
            raise UserError(
                f"{folder}: holds other features ({'; '.join(changes)}); undo that, name another folder as "
                "backbone.tuning.cache, or remove this one"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty and holds no features of dmlkit; choose another backbone.tuning.cache")
    folder.mkdir(parents=True, exist_ok=True)
    description.write(path)
