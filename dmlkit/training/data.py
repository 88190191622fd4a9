"""Training data: images, or cached features of a frozen backbone."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric

from dmlkit.backbones.tuning import NoTuningConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.errors import UserError
from dmlkit.files.document import differences
from dmlkit.files.outputs import check_place
from dmlkit.loading.inputs import Inputs, inputs_of
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.model import EmbeddingModel, head_alone
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import Experiment
from dmlkit.training.progress import Progress
from dmlkit.vectors.features import (
    CachedFeatures,
    DrawnViews,
    cached_features,
    features_folder,
)
from dmlkit.vectors.stored import embed_files
from dmlkit.vectors.trained import describe, load_model


class TrainingData(NamedTuple):
    """The inputs of a training and the model that takes them."""

    model: EmbeddingModel  # the experiment's model, or only its head for cached features
    training: Inputs
    validation: Dataset | None
    test: Dataset | None  # the test classes, which score the finished run; None if every class is trained on


def training_data(experiment: Experiment, run: RunFolder, fabric: Fabric, progress: Progress) -> TrainingData:
    """Return the inputs of a training. Features of a frozen backbone are computed first, unless they are cached."""
    recipe, model = experiment.recipe, experiment.model
    tuning = recipe.backbone.tuning
    if not isinstance(tuning, NoTuningConfig) or tuning.features == "live":
        inputs = inputs_of(experiment.train, recipe.transform, training=True)
        return TrainingData(model, inputs, experiment.validation, experiment.test)
    folder = features_folder(run, tuning)

    def features(split: Split, dataset: Dataset, views: int) -> CachedFeatures:
        return cached_features(dataset, recipe, model, fabric, folder, views=views, bar=progress.images, split=split)

    if folder.exists() and not folder.is_dir():
        text = f"{folder}: is a file; expected a folder for features"
        raise UserError(recipe.fault(("backbone", "tuning", "cache"), text))
    training = features("train", experiment.train, tuning.feature_views)
    validation = experiment.validation and features("validation", experiment.validation, 0)
    tested = experiment.test and features("test", experiment.test, 0)
    return TrainingData(head_alone(model), DrawnViews(training), validation, tested)


def teach(experiment: Experiment, fabric: Fabric, progress: Progress) -> None:
    """Let the runs that regularizers name embed the training images, without augmentation.

    The splits that such a run has stored already are read, see `known_points`.
    """
    images = experiment.train
    for number, config in enumerate(experiment.recipe.regularizers):
        if (path := config.source_run()) is None:
            continue
        teacher = load_model(RunFolder(Path(path)), fabric)
        with experiment.recipe.errors_at("regularizers", number):
            teacher.model.check_takes(images)
            if config.keeps_space:
                check_same_space(describe(teacher).manifold, experiment, path)
            embedded = embed_files(teacher, fabric, images, f"the train split, by {path}", progress.images)
            points = torch.zeros(len(images), embedded.points.shape[1])
            points[embedded.indices] = embedded.points
            term: Any = experiment.objective.regularizers[number]
            term.learn_from(points, images.labels)
        if config.keeps_space:
            space, before = describe(teacher).space, experiment.objective.aligned_to
            if before not in (None, space):
                text = f"{path}: is another model than the one before; a model has the space of one older model"
                raise UserError(experiment.recipe.fault(("regularizers", number), text))
            experiment.objective.aligned_to = space


def check_same_space(older: ManifoldConfig, experiment: Experiment, path: str) -> None:
    """Check that the older points of a run are, and stay, points of the new model's space."""
    if experiment.model.manifold.learns:
        raise UserError(f"{path}: its embeddings cannot follow a space that training changes; learn no curvature")
    spaces = (space.model_dump(mode="json") for space in (older, experiment.recipe.manifold))
    if changes := list(differences("manifold", *spaces)):
        raise UserError(f"{path}: has its embeddings in another space ({'; '.join(changes)}); use the same")


def check_places(recipe: Recipe, run: Path) -> None:
    """Check that neither the run nor its cache of features would lie inside the dataset or inside another run."""
    data, tuning = [recipe.dataset.data_root], recipe.backbone.tuning
    check_place(run, data, is_run=True)
    if isinstance(tuning, NoTuningConfig) and tuning.cache is not None:
        cache, key = Path(tuning.cache), "backbone.tuning.cache:"
        check_place(cache, data, option=key)
        if cache.resolve().is_relative_to(run.resolve()):
            raise UserError(f"{key} {cache}: is inside the run folder, which has a cache of its own; remove the key")
