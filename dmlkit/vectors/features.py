"""Features of frozen layers, computed once, like embeddings, into a store that runs may share."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.backbones.parts import FirstBlocks, LastBlocks
from dmlkit.backbones.tuning import LastBlocksConfig, NoTuningConfig, StoredOutput
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset, PickedSamples
from dmlkit.datasets.files.samples import VectorSamples
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import OptionError, counted
from dmlkit.files.arrays import Values
from dmlkit.heads import NoHead
from dmlkit.loading.inputs import Draw, Inputs, Item
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.model import EmbeddingModel, fingerprint, head_alone
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.computation import accelerate
from dmlkit.vectors.fill import FillJob, fill
from dmlkit.vectors.progress_bar import Bar
from dmlkit.vectors.store import ID, VectorStore, image_keys, keys_of, stored_model, tensors_of
from dmlkit.vectors.trained import TrainedModel


class CachedFeatures(Dataset):
    """Dataset of features in place of images.

    Args:
        rows: (N V,) rows in the store, of V views of each image in turn.
    """

    in_memory = True

    def __init__(self, dataset: Dataset, store: VectorStore, rows: Values) -> None:
        names = ("query", "gallery", "groups", "levels", "separator")
        others: dict[str, Any] = {name: getattr(dataset, name) for name in names}
        super().__init__(dataset.labels, dataset.class_names, dataset.paths, **others)
        self.dataset, self.files = dataset, [store.path / name for name in store.parts]
        self.views = len(rows) // len(dataset)
        self.kind = VectorSamples(*store.shapes["points"])
        self.numbers, self.rows = store.places(rows)
        len(self.parts)  # now: the folder of a run that replaces another moves with its first checkpoint

    @cached_property
    def parts(self) -> list[Tensor]:
        """Features of each part, mapped into memory."""
        return [tensors_of(file)[0]["points"] for file in self.files]

    def key(self, index: int) -> str:
        return self.dataset.key(index)

    def sample(self, index: int) -> Tensor:
        return self.view(index, 0)

    def view(self, index: int, view: int) -> Tensor:
        """Return the features (F,) of one view of image ``index``."""
        view_index = index * self.views + view
        return self.parts[self.numbers[view_index]][self.rows[view_index]]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the memory maps, which other processes open themselves."""
        return {name: value for name, value in self.__dict__.items() if name != "parts"}


class DrawnViews(Inputs):
    """Cached features for training: the seed of a draw decides the view of each image."""

    def __init__(self, dataset: CachedFeatures) -> None:
        super().__init__(dataset)
        self.features = dataset

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        return Item(self.features.view(index, seed % self.features.views), int(self.features.labels[index]), index)


MAPS = torch.float16  # of augmented views


@dataclass(frozen=True)
class FeatureJob:
    """What the frozen layers of a recipe compute once for each image of a split."""

    dataset: Dataset
    job: FillJob
    trained: TrainedModel  # the frozen layers
    title: str  # what is computed, for people

    def missing_bytes(self, folder: Path | None) -> int:
        """Return the size of what a folder of stores lacks; None stands for an empty one."""
        missing = len(self.job.keys)
        if folder is not None:
            store = VectorStore.at(folder / self.job.model.key, self.trained)
            missing = int((store.find(self.job.keys, exact=True) < 0).sum())
        return missing * self.job.image_bytes

    def compute(self, folder: Path, ranks: Ranks, bar: Bar) -> CachedFeatures:
        """Compute what a folder of stores lacks, and return the features.

        The ranks share the work; an interrupted computation resumes, and another process that needs the same features
        waits.
        """
        with torch.random.fork_rng(devices=[]):
            filled = fill(replace(self.job, home=folder), self.trained, ranks, bar=bar, title=self.title)
        return CachedFeatures(self.dataset, filled.store, filled.rows)


def feature_job(dataset: Dataset, trained: TrainedModel, *, split: Split) -> FeatureJob:
    """Return the work of storing the output of the frozen layers of a recipe for a split, see `frozen_part`.

    Augmented views and the engine of the recipe are those of the training split. All figures come from the other
    splits, which torch computes and stores in float32.
    """
    recipe, tuning = trained.recipe, trained.recipe.backbone.tuning
    stored = tuning.stored()
    views = stored.views if stored and split == "train" else 0
    if isinstance(tuning, NoTuningConfig) and split == "train" and tuning.engine != "torch":
        trained = accelerate(trained, tuning.engine, f"backbone.tuning.engine: {tuning.engine}")
    images, keys = dataset, image_keys(dataset, recipe.dataset)
    if views:  # the number of a view in the list augments it
        rows = torch.arange(len(dataset)).repeat_interleave(views)
        images = PickedSamples(dataset, rows, dataset.labels[rows])
        ids = (keys[row // views, :ID].tobytes() + f" view {row}".encode() for row in range(len(images)))
        keys = keys_of([hashlib.sha256(text).digest()[:ID] for text in ids])
    again = "rerun the command with --resume"
    described, dtype = stored_model(trained), torch.float32
    if views and isinstance(tuning, LastBlocksConfig):  # a map of Lite0 has nine times the numbers of its features
        dtype = MAPS
        described = described.model_copy(update={"description": {**described.description, "numbers": str(dtype)}})
    needs_all = f"repair or remove it, and {again}"
    job = FillJob(images, keys, Path(), described, needs_all=needs_all, augments=views > 0, dtype=dtype, again=again)
    times = f", {counted(views, 'view', 'views')} each" if views else ""
    return FeatureJob(dataset, job, trained, f"features of {split} images{times}")


def frozen_part(recipe: Recipe, model: EmbeddingModel, device: torch.device, *, training: bool = False) -> TrainedModel:
    """Return the frozen layers of a model on a device, whose points are their output: features, or maps as rows.

    Maps of augmented views have the size of ``training``.
    """
    backbone, recorded = model.backbone, ""
    if isinstance(tuning := recipe.backbone.tuning, LastBlocksConfig):
        backbone = first_blocks(recipe, model, training=training)
        frozen = fingerprint({name: backbone.whole.state_dict()[name] for name in backbone.whole.frozen_names})
        recorded = hashlib.sha256(f"{frozen} before {tuning.blocks}".encode()).hexdigest()
    space = Euclidean.Config().build(backbone.num_features)
    alone = EmbeddingModel(model.normalization, backbone, NoHead(space.dim, space), model.samples).to(device).eval()
    changes = {"manifold": Euclidean.Config(), "embedding_dim": space.dim}
    return replace(TrainedModel.of(recipe.model_copy(update=changes), alone), recorded=recorded)


def trained_part(recipe: Recipe, model: EmbeddingModel) -> EmbeddingModel:
    """Return a model from what is stored of an image, see `frozen_part`, to its point; it shares all weights."""
    if not isinstance(recipe.backbone.tuning, LastBlocksConfig):
        return head_alone(model)
    first = first_blocks(recipe, model)
    return EmbeddingModel(nn.Identity(), LastBlocks(first), model.head, VectorSamples(first.num_features))


def first_blocks(recipe: Recipe, model: EmbeddingModel, *, training: bool = False) -> FirstBlocks:
    """Return the layers of a model before those of its backbone that the recipe trains, see `frozen_part`."""
    tuning, transform = recipe.backbone.tuning, recipe.transform
    assert isinstance(tuning, LastBlocksConfig)
    if transform is None:
        raise OptionError("backbone.tuning.feature_views", "applies only to images; remove this key")
    sizes = transform.size, transform.training_side
    return FirstBlocks(model.backbone, tuning.blocks, sizes[::-1] if training else sizes)


def features_folder(run: RunFolder, stored: StoredOutput) -> Path:
    """Return the folder with the features of all splits of a run."""
    return run.features if stored.folder is None else Path(stored.folder)


def stored_features(run: RunFolder, trained: TrainedModel, dataset: Dataset, keys: Values) -> CachedFeatures | None:
    """Return the features of a dataset that the training of a run has stored; None if it lacks some.

    They are those of these frozen layers, preprocessing, software and device, computed in the same batches.
    """
    stored = trained.recipe.backbone.tuning.stored()
    if stored is None or not (folder := features_folder(run, stored)).is_dir():
        return None
    alone = frozen_part(trained.recipe, trained.model, trained.device)
    store = VectorStore.at(folder / stored_model(alone).key, alone)
    rows = store.find(keys, exact=True)
    return CachedFeatures(dataset, store, rows) if (rows >= 0).all() else None
