"""What a training step is shown: images, or the features of a backbone that does not train."""

from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import NamedTuple

from lightning_fabric import Fabric
from torch import nn

from dmlkit.backbones.identity import Identity
from dmlkit.backbones.tuning import NoTuningConfig
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.embedding.features import CachedFeatures, DrawnViews, cached_features, is_complete
from dmlkit.errors import UserError
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_place
from dmlkit.loading.cache import images_of_split
from dmlkit.loading.inputs import Inputs, inputs_of
from dmlkit.model import EmbeddingModel
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import Experiment
from dmlkit.training.progress import Progress


class TrainingData(NamedTuple):
    """What a step is shown, and the model that takes it.

    Args:
        model: the experiment's, or its head behind cached features.
        training: what it trains on.
        validation: what it is validated on, where the recipe has validation classes.
        test: what it is scored on in the end.
    """

    model: EmbeddingModel
    training: Inputs
    validation: Dataset | None
    test: Dataset


def training_data(experiment: Experiment, run: RunFolder, fabric: Fabric, progress: Progress) -> TrainingData:
    """What steps are shown. Features of a backbone that does not train are computed here, unless they are there.

    Raises:
        UserError: see `cached_features`.
    """
    recipe, model = experiment.recipe, experiment.model
    tuning, test = recipe.backbone.tuning, images_of_split(recipe.dataset, "test")
    if not isinstance(tuning, NoTuningConfig) or tuning.features == "live":
        on_device = recipe.training.augment_on == "device" and fabric.device.type != "cpu"
        inputs = inputs_of(experiment.train, recipe.transform, training=True, on_device=on_device)
        return TrainingData(model, inputs, experiment.validation, test)
    folder = run.features if tuning.cache is None else Path(tuning.cache)
    of_training = folder / f"fold-{recipe.dataset.fold}" if recipe.dataset.split == "reality_check" else folder

    def place(split: str) -> Path:
        return (folder if split == "test" else of_training) / split  # folds have the test images in common

    def features(split: str, dataset: Dataset, views: int) -> CachedFeatures:
        return cached_features(
            dataset, recipe, model, fabric, place(split), views=views, bar=progress.images, what=split
        )

    if folder.exists() and not folder.is_dir():
        raise UserError(f"backbone.tuning.cache: {folder}: is a file; expected a folder for features")
    splits = ("train", "validation", "test") if experiment.validation else ("train", "test")
    # of runs that share a folder one computes, and the others wait; what is complete they all read at once
    writes = fabric.is_global_zero and not all(is_complete(place(split)) for split in splits)
    with sole_writer(folder, what="a training", patience=inf) if writes else nullcontext():
        fabric.barrier()
        training = features("train", experiment.train, tuning.feature_views)
        validation = experiment.validation and features("validation", experiment.validation, 0)
        tested = features("test", test, 0)
    head = EmbeddingModel(nn.Identity(), Identity(model.backbone.num_features), model.head)
    return TrainingData(head, DrawnViews(training), validation, tested)


def check_places(recipe: Recipe, run: Path) -> None:
    """Make sure that neither the run nor a cache of features that it names would lie in data, or in another run.

    Raises:
        UserError: one would.
    """
    data, tuning = [recipe.dataset.data_root], recipe.backbone.tuning
    check_place(run, data, is_run=True)
    if isinstance(tuning, NoTuningConfig) and tuning.cache is not None:
        cache, key = Path(tuning.cache), "backbone.tuning.cache:"
        check_place(cache, data, option=key)
        if cache.resolve().is_relative_to(run.resolve()):
            raise UserError(f"{key} {cache}: is inside the run, which keeps its own features; leave the key out")
