"""Features of a frozen backbone, computed once, like embeddings, into a store that runs may share."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.backbones.tuning import NoTuningConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset, ReplacedSamples
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import counted
from dmlkit.files.arrays import Values
from dmlkit.files.paths import PickedPaths
from dmlkit.loading.inputs import Draw, Inputs, Item
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.model import EmbeddingModel, backbone_alone
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.computation import accelerate
from dmlkit.vectors.fill import FillJob, fill
from dmlkit.vectors.progress_bar import Bar
from dmlkit.vectors.store import ID, VectorStore, image_keys, keys_of, stored_model, tensors_of
from dmlkit.vectors.trained import TrainedModel


class Views(Dataset):
    """Dataset with each image several times."""

    def __init__(self, dataset: Dataset, views: int) -> None:
        images = np.arange(len(dataset)).repeat(views)
        super().__init__(
            dataset.labels.repeat_interleave(views), dataset.class_names, PickedPaths(dataset.paths, images)
        )
        self.dataset, self.views = dataset, views
        self.in_memory = dataset.in_memory

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(index // self.views)


class CachedFeatures(ReplacedSamples):
    """Dataset of features in place of images.

    Args:
        rows: (N V,) rows in the store, of V views of each image in turn.
    """

    in_memory = True

    def __init__(self, dataset: Dataset, store: VectorStore, rows: Values) -> None:
        super().__init__(dataset)
        self.dataset, self.files = dataset, [store.path / name for name in store.parts]
        self.views = len(rows) // len(dataset)
        (self.num_features,) = store.shapes["points"]
        self.numbers, self.rows = store.places(rows)
        self._parts: list[Tensor] | None = None
        self._parts = self.parts  # now: the folder of a run that replaces another moves with its first checkpoint

    @property
    def parts(self) -> list[Tensor]:
        """Features of each part, mapped into memory."""
        if self._parts is None:
            self._parts = [tensors_of(file)[0]["points"] for file in self.files]
        return self._parts

    def key(self, index: int) -> str:
        return self.dataset.key(index)

    def sample(self, index: int) -> Tensor:
        return self.view(index, 0)

    def view(self, index: int, view: int) -> Tensor:
        """Return the features (F,) of one view of image ``index``."""
        place = index * self.views + view
        return self.parts[self.numbers[place]][self.rows[place]]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory maps, which other processes open themselves."""
        return {**self.__dict__, "_parts": None}


class DrawnViews(Inputs):
    """Cached features for training: the seed of a draw decides the view of each image."""

    def __init__(self, dataset: CachedFeatures) -> None:
        super().__init__(dataset)
        self.features = dataset

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        return Item(self.features.view(index, seed % self.features.views), int(self.features.labels[index]), index)


ENGINE = "backbone.tuning.engine"


def cached_features(
    dataset: Dataset,
    recipe: Recipe,
    model: EmbeddingModel,
    fabric: Ranks,
    folder: Path,
    *,
    views: int,
    bar: Bar,
    split: Split,
) -> CachedFeatures:
    """Return the features of a dataset's images; those that the folder lacks are computed.

    The engine of the recipe computes those of the training split. All figures come from the other splits, which torch
    computes in float32.

    The ranks share the work; an interrupted computation resumes, and another process that needs the same features
    waits.

    Args:
        model: model with the backbone, which is moved to the fabric's device.
        views: number of augmented views of each image; 0 takes the image as in evaluation.
    """
    trained, tuning = frozen_backbone(recipe, model, fabric.device), recipe.backbone.tuning
    if isinstance(tuning, NoTuningConfig) and split == "train" and tuning.engine != "torch":
        accelerated = accelerate(trained, tuning.engine, f"{ENGINE}: {tuning.engine}")
        if accelerated is not None:
            trained = replace(trained, build=lambda: accelerated.model, computation=accelerated.computation)
    images, keys = Views(dataset, views) if views else dataset, image_keys(dataset, recipe.dataset)
    if views:  # the number of a view in the list augments it
        ids = (keys[row // views, :ID].tobytes() + f" view {row}".encode() for row in range(len(images)))
        keys = keys_of([hashlib.sha256(text).digest()[:ID] for text in ids])
    again = "rerun the command with --resume"
    options: dict[str, Any] = {"skip_bad_images": False, "again": again, "way_on": f"repair or remove it, and {again}"}
    job = FillJob(images, keys, folder, stored_model(trained), **options, augments=views > 0)
    times = f", {counted(views, 'view', 'views')} each" if views else ""
    title = f"features of {split} images{times}"
    with torch.random.fork_rng(devices=[]):
        filled = fill(job, trained, fabric, bar=bar, title=title)
    return CachedFeatures(dataset, filled.store, filled.rows)


def frozen_backbone(recipe: Recipe, model: EmbeddingModel, device: torch.device) -> TrainedModel:
    """Return the backbone of a model, whose points are its features, on a device."""
    alone = backbone_alone(model, Euclidean.Config().build(model.backbone.num_features)).to(device).eval()
    space = {"manifold": Euclidean.Config(), "embedding_dim": alone.backbone.num_features}
    return TrainedModel.of(recipe.model_copy(update=space), alone)


def features_folder(run: RunFolder, tuning: NoTuningConfig) -> Path:
    """Return the folder with the features of all splits of a run."""
    return run.features if tuning.cache is None else Path(tuning.cache)


def stored_features(run: RunFolder, trained: TrainedModel, dataset: Dataset, keys: Values) -> CachedFeatures | None:
    """Return the features of a dataset that the training of a run has stored; None if it lacks some.

    They are those of this backbone, preprocessing, software and device, computed in the same batches.
    """
    tuning = trained.recipe.backbone.tuning
    if not isinstance(tuning, NoTuningConfig) or tuning.features == "live":
        return None
    alone = frozen_backbone(trained.recipe, trained.model, trained.device)
    store = VectorStore.at(features_folder(run, tuning) / stored_model(alone).key, alone)
    rows = store.find(keys, exact=True)
    return CachedFeatures(dataset, store, rows) if (rows >= 0).all() else None
