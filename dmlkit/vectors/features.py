"""Features of a frozen backbone, computed once, like embeddings, into a folder that runs may share."""

import hashlib
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import sleep
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from dmlkit import __version__
from dmlkit.backbones.tuning import NoTuningConfig
from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset, ReplacedSamples
from dmlkit.datasets.files.paths import PickedPaths
from dmlkit.datasets.vectors import VectorFile
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, counted, warn
from dmlkit.files.arrays import read_array
from dmlkit.files.document import Document, differences
from dmlkit.loading.image_changes import are_same_files, changes_since, hash_files, stamp
from dmlkit.loading.inputs import Draw, Inputs, Item, TransformedImages
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.model import EmbeddingModel, backbone_alone
from dmlkit.recipe.plugin import plugins_of
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.transforms.base import TransformConfig
from dmlkit.vectors.computation import accelerate
from dmlkit.vectors.job import EmbedJob, PartEmbedder, embed_job, hash_names
from dmlkit.vectors.progress_bar import Bar
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

    def key(self, index: int) -> str:
        return f"{self.dataset.key(index // self.views)} view {index % self.views}"

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(index // self.views)


class AugmentedViews(Inputs):
    """Views, each augmented by its own number, so that they are the same in every process."""

    def __init__(self, views: Views, transform: TransformConfig) -> None:
        super().__init__(views)
        self.images = TransformedImages(views, transform, training=True)

    def __getitem__(self, draw: Draw) -> Item:
        index, _ = draw
        return self.images[index, int(np.random.default_rng(index).integers(2**62))]


class CachedFeatures(ReplacedSamples):
    """Dataset of features in place of images.

    Args:
        vectors: V features of each image in turn, (N V, F).
    """

    in_memory = True

    def __init__(self, dataset: Dataset, vectors: VectorFile) -> None:
        super().__init__(dataset)
        self.dataset, self.vectors = dataset, vectors
        self.views = len(vectors) // len(dataset)
        self.num_features = vectors.num_features

    def key(self, index: int) -> str:
        return self.dataset.key(index)

    def sample(self, index: int) -> Tensor:
        return self.view(index, 0)

    def view(self, index: int, view: int) -> Tensor:
        """Return the features (F,) of one view of image ``index``."""
        return torch.from_numpy(self.vectors.row(index * self.views + view))


class DrawnViews(Inputs):
    """Cached features for training: the seed of a draw decides the view of each image."""

    def __init__(self, dataset: CachedFeatures) -> None:
        super().__init__(dataset)
        self.features = dataset

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        return Item(self.features.view(index, seed % self.features.views), int(self.features.labels[index]), index)


ENGINE = "backbone.tuning.engine"
DECODERS = ("torchvision", "pillow", "torchcodec")
HASH = 16  # characters of a hash of the code of a plug-in
DESCRIPTION, FEATURES = "features.json", "embeddings.npy"


class FeatureDescription(Document, frozen=True, strict=True):
    """``features.json``: what cached features depend on, written before the first one is computed."""

    kind: ClassVar[str] = "description of cached features"

    weights: str
    """Hash of the backbone's weights."""
    transform: dict[str, Any]
    """Conversion of an image to the pixels that the backbone takes."""
    views: NonNegativeInt
    """Number of augmented views of each image; 0: the image as in evaluation."""
    dataset: dict[str, Any]
    """Name and options of the dataset, as in the recipe, except the fold, which `names` reflect."""
    images: PositiveInt
    """Number of images."""
    names: str
    """Hash of their names."""
    files: str
    """Hash of the sizes and modification times of their files, see `hash_files`."""
    contents: str | None = None
    """Hash of the contents of their files; null until the features are complete."""
    engine: str = "torch"
    """What computed them, see `NoTuningConfig`."""
    software: dict[str, str] | None = None
    """Packages that computed them, see `software_of`; null if several versions did, and in files of format 1."""
    device: str | None = None
    """Kind of the device that computed them; null like ``software``."""
    sha256: str | None = None
    """Checksum of the features; null until they are complete."""


@dataclass(frozen=True)
class FeatureJob(EmbedJob):
    """Job that computes features: an embedding job whose images are views, if there are any."""

    again = "rerun the command with --resume"
    way_on = "repair or remove it, and rerun the command with --resume"

    def inputs(self, trained: TrainedModel) -> Inputs:
        transform = trained.recipe.transform
        if isinstance(self.dataset, Views) and transform is not None:
            return AugmentedViews(self.dataset, transform)
        return super().inputs(trained)


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
    """Return the features of a dataset's images, computed unless the folder has them.

    The engine of the recipe computes those of the training split. All figures come from the other splits, which torch
    computes in float32.

    The ranks share the work; an interrupted computation resumes.

    Args:
        model: model with the backbone, which is moved to the fabric's device.
        folder: folder for the features alone.
        views: number of augmented views of each image; 0 takes the image as in evaluation.

    Raises:
        UserError: the folder holds something else, or features of other weights, images or transforms; an image
            cannot be read; or see `accelerate`.
    """
    trained, tuning = frozen_backbone(recipe, model, fabric.device), recipe.backbone.tuning
    engine = tuning.engine if isinstance(tuning, NoTuningConfig) and split == "train" else "torch"
    description, is_whole = _description(dataset, trained, engine, views), False
    if fabric.is_global_zero:
        description, is_whole = _begin(folder, description, dataset)
    if not fabric.broadcast(is_whole):
        images = Views(dataset, views) if views else dataset
        job = FeatureJob(
            images,
            source=f"{recipe.dataset.name}:{split}",
            output=folder,
            skip_bad_images=False,
            stamps=[] if images.in_memory else [stamp(path) for path in images.paths],
        )
        if not fabric.broadcast(job.parts.is_finished()):  # a kill before the checksum leaves finished ones
            if engine != "torch":
                by_engine, computation = accelerate(trained.model, trained.recipe, engine, f"{ENGINE}: {engine}")
                trained = replace(trained, build=lambda: by_engine, computation=computation)
            times = f", {counted(views, 'view', 'views')} each" if views else ""
            with (
                bar(f"features of {split} images{times}", len(job.dataset)) as advance,
                torch.random.fork_rng(devices=[]),
            ):
                compute = PartEmbedder(job, trained, fabric, workers=recipe.training.workers)
                embed_job(job, trained, fabric, compute, advance=advance)
        while not job.parts.is_finished():  # a barrier would give up after 30 minutes, which others may need
            sleep(0.5)
        if fabric.is_global_zero:
            known = description.files == hash_files(dataset)  # none of them has changed in the meantime
            update = {"contents": hash_files(dataset, contents=True) if known else None}
            whole = description.model_copy(update={**update, "sha256": _sha256(folder / FEATURES)})
            whole.write(folder / DESCRIPTION)
    vectors = VectorFile(folder)
    expected = (len(dataset) * max(views, 1), model.backbone.num_features)
    if vectors.values.shape != expected:
        raise UserError(f"{vectors.path}: has shape {vectors.values.shape}, expected {expected}; remove {folder}")
    return CachedFeatures(dataset, vectors)


def frozen_backbone(recipe: Recipe, model: EmbeddingModel, device: torch.device) -> TrainedModel:
    """Return the backbone of a model, whose points are its features, on a device."""
    alone = backbone_alone(model, Euclidean.Config().build(model.backbone.num_features)).to(device).eval()
    space = {"manifold": Euclidean.Config(), "embedding_dim": alone.backbone.num_features}
    return TrainedModel.of(recipe.model_copy(update=space), alone)


def features_folder(run: RunFolder, tuning: NoTuningConfig) -> Path:
    """Return the folder with the features of all splits of a run."""
    return run.features if tuning.cache is None else Path(tuning.cache)


def place_of(config: DatasetConfig, split: Split) -> Path:
    """Return where the features of a split are in the folder of features."""
    if config.split == "all":
        return Path("all")
    is_of_fold = config.split == "reality_check" and split != "test"  # folds have the test images in common
    return Path(f"fold-{config.fold}" if is_of_fold else "", split)


def stored_features(
    run: RunFolder, trained: TrainedModel, fabric: Ranks, dataset: Dataset, split: Split
) -> CachedFeatures | None:
    """Return the features of a split that the training of a run has stored; None if there are none of this backbone.

    The weights, the preprocessing, all images of the split, the software and the device must be those of the features;
    the first rank decides.
    """
    tuning = trained.recipe.backbone.tuning
    if not isinstance(tuning, NoTuningConfig) or tuning.features == "live" or dataset.in_memory:
        return None  # the description of features does not cover the content of samples in memory
    folder, is_same = features_folder(run, tuning) / place_of(trained.recipe.dataset, split), False
    if fabric.is_global_zero and (folder / DESCRIPTION).exists():
        with suppress(UserError, OSError):  # damaged or incomplete ones are no use, and training reports them
            stored = FeatureDescription.read(folder / DESCRIPTION)
            alone = frozen_backbone(trained.recipe, trained.model, trained.device)
            ours = _description(dataset, alone, "torch", 0).model_copy(update={"sha256": stored.sha256})
            is_same = stored == _with_files_of(stored, ours, dataset) and _sha256(folder / FEATURES) == stored.sha256
    return CachedFeatures(dataset, VectorFile(folder)) if fabric.broadcast(is_same) else None


def is_complete(folder: Path) -> bool:
    """Return whether a folder's features are complete; nobody writes there any more, so readers need no lock.

    Raises:
        UserError: ``features.json`` is damaged.
    """
    path = folder / DESCRIPTION
    return path.exists() and FeatureDescription.read(path).sha256 is not None


def _description(dataset: Dataset, trained: TrainedModel, engine: str, views: int) -> FeatureDescription:
    recipe = trained.recipe
    options = recipe.dataset.model_dump(mode="json")
    if recipe.dataset.split == "reality_check":
        del options["fold"]
    return FeatureDescription(
        weights=trained.fingerprint,
        transform=recipe.transform.model_dump(mode="json") if recipe.transform else {},
        views=views,
        dataset=options,
        images=len(dataset),
        names=hash_names(dataset),
        files=hash_files(dataset) or "",
        engine=engine,
        software=software_of(recipe),
        device=trained.device.type,
    )


def _with_files_of(stored: FeatureDescription, description: FeatureDescription, dataset: Dataset) -> FeatureDescription:
    """Return a description with the hashes of the files of a stored one, if the files have the same contents."""
    if not are_same_files(dataset, stored.files, stored.contents):
        return description
    return description.model_copy(update={"files": stored.files, "contents": stored.contents})


def _begin(folder: Path, description: FeatureDescription, dataset: Dataset) -> tuple[FeatureDescription, bool]:
    """Record what features depend on before the first one is computed, or compare it with the record.

    Incomplete features of other images are computed again: a bad image stops them, and is then repaired or removed.

    Returns:
        The record to write at the end, and whether they are complete.

    Raises:
        UserError: the folder has other files, other features, or damaged ones.
    """
    path = folder / DESCRIPTION
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"{folder}: contains files other than features of dmlkit; choose another backbone.tuning.cache"
            )
        folder.mkdir(parents=True, exist_ok=True)
        description.write(path)
        return description, False
    started = FeatureDescription.read(path)
    description = _with_files_of(started, description, dataset)
    changes = list(differences("", _shown(started), _shown(description)))
    changes += ["other weights of the backbone"] if started.weights != description.weights else []
    if (started.names, started.files) != (description.names, description.files):
        if not changes and started.sha256 is None:
            warn(f"{folder}: the images have changed; all features are computed again")
            shutil.rmtree(folder)
            return _begin(folder, description, dataset)
        changes.append(changes_since(folder / "items.parquet", dataset))
    if changes:
        raise UserError(
            f"{folder}: contains features with other settings ({'; '.join(changes)}); undo this change, choose another "
            "backbone.tuning.cache, or remove this folder"
        )
    if started.sha256 is not None:
        read_array(folder / FEATURES)  # raises if it is missing or truncated
        if _sha256(folder / FEATURES) != started.sha256:
            raise UserError(
                f"{folder / FEATURES}: this file is damaged (wrong checksum); remove {folder}, then rerun to compute it"
            )
    if (started.software, started.device) != (description.software, description.device):
        description = description.model_copy(update={"software": None, "device": None})
    return description, started.sha256 is not None


def _shown(description: FeatureDescription) -> dict[str, Any]:
    """Return what the features of a training depend on, for a message, without hashes."""
    hidden = ("weights", "images", "names", "files", "contents", "sha256", "software", "device")
    return {key: value for key, value in description.plain().items() if key not in hidden}


def software_of(recipe: Recipe) -> dict[str, str]:
    """Return the versions of the packages that decode and embed images, and hashes of the recipe's plug-ins."""
    found = {"dmlkit": __version__, "torch": torch.__version__}
    for package in DECODERS:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {record.name: record.sha256[:HASH] for record in plugins_of(recipe)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
