"""Training data: images, or stored features of frozen layers."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmlkit.backbones.tuning import LastBlocksConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.document import differences
from dmlkit.files.outputs import check_place
from dmlkit.loading.inputs import Inputs, inputs_of
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.model import EmbeddingModel
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import Experiment
from dmlkit.training.gradient_checkpointing import recompute_chunks
from dmlkit.training.progress import Progress
from dmlkit.vectors.features import DrawnViews, FeatureJob, feature_job, features_folder, frozen_part, trained_part
from dmlkit.vectors.stored import embed_files
from dmlkit.vectors.trained import describe, load_model


class TrainingData(NamedTuple):
    """The inputs of a training and the model that takes them."""

    model: EmbeddingModel  # or only what follows the stored features: its head, perhaps the last blocks
    training: Inputs
    validation: Dataset | None
    test: Dataset | None  # the test classes, which score the finished run; None if every class is trained on


Jobs = Mapping[Split, FeatureJob]


def feature_jobs(experiment: Experiment, ranks: Ranks, resumed: RunFolder | None = None) -> Jobs:
    """Return what the frozen layers of an experiment compute once for each split; nothing if it trains live."""
    recipe = experiment.recipe
    if recipe.backbone.tuning.stored() is None or (resumed is not None and _is_finished(recipe, resumed)):
        return {}
    datasets: dict[Split, Dataset | None]
    datasets = {"train": experiment.train, "validation": experiment.validation, "test": experiment.test}
    whole = views = frozen_part(recipe, experiment.model, ranks.device)
    if recipe.transform is not None and recipe.transform.training_side != recipe.transform.size:
        views = frozen_part(recipe, experiment.model, ranks.device, training=True)
    parts = {split: views if split == "train" else whole for split in datasets}
    return {
        split: feature_job(dataset, parts[split], split=split)
        for split, dataset in datasets.items()
        if dataset is not None
    }


def check_disk(recipe: Recipe, jobs: Jobs, run: RunFolder, *, resume: bool) -> int:
    """Check that there is a folder, and room on its disk, for the features of frozen layers; return their bytes."""
    if (stored := recipe.backbone.tuning.stored()) is None:
        return 0
    place = folder = features_folder(run, stored).absolute()
    if folder.exists() and not folder.is_dir():
        text = f"{stored.folder}: is a file; expected a folder for features"
        raise UserError(recipe.fault(("backbone", "tuning", "cache"), text))
    needed = sum(job.missing_bytes(folder if resume or stored.folder else None) for job in jobs.values())
    while not place.exists():
        place = place.parent
    if needed > (free := shutil.disk_usage(place).free):
        text = (
            f"the stored features take {needed / 1e9:.3g} GB, but the disk of {folder} has {free / 1e9:.3g} GB free; "
            "free some space, set backbone.tuning.cache to a folder on another disk, or store fewer feature_views"
        )
        raise UserError(recipe.fault(("backbone", "tuning"), text))
    return needed


def keeps_features(recipe: Recipe) -> bool:
    """Return whether stored features outlive a training: not the run's own maps, which take 22 KB per view or more."""
    tuning = recipe.backbone.tuning
    return not isinstance(tuning, LastBlocksConfig) or tuning.cache is not None


def remove_maps(recipe: Recipe, run: RunFolder, ranks: Ranks) -> None:
    """Remove the stored maps of a finished training, unless runs may share them."""
    if ranks.is_global_zero and not keeps_features(recipe):
        shutil.rmtree(run.features, ignore_errors=True)


def _is_finished(recipe: Recipe, run: RunFolder) -> bool:
    """Return whether a run was trained to its end and has removed its maps: only its summary is written again."""
    if keeps_features(recipe) or run.features.exists() or not run.summary_path.exists():
        return False
    return Summary.read(run.summary_path).last.epoch == recipe.training.trained_epochs


def training_data(experiment: Experiment, jobs: Jobs, run: RunFolder, ranks: Ranks, progress: Progress) -> TrainingData:
    """Return the inputs of a training. Features of frozen layers are computed first, unless they are stored."""
    recipe, stored = experiment.recipe, experiment.recipe.backbone.tuning.stored()
    if stored is None or not jobs:
        inputs = inputs_of(experiment.train, recipe.transform, training=True)
        return TrainingData(experiment.model, inputs, experiment.validation, experiment.test)
    folder = ranks.broadcast(features_folder(run, stored))  # the first rank alone has moved to that of a new run
    features = {split: job.compute(folder, ranks, progress.images) for split, job in jobs.items()}
    part = trained_part(recipe, experiment.model)
    if recipe.training.gradient_cache:
        recompute_chunks(part, recipe.training.gradient_cache)
    return TrainingData(part, DrawnViews(features["train"]), features.get("validation"), features.get("test"))


def teach(experiment: Experiment, ranks: Ranks, progress: Progress) -> None:
    """Let the runs that regularizers name embed the training images, without augmentation.

    The splits that such a run has stored already are read, see `known_points`.
    """
    images = experiment.train
    for number, config in enumerate(experiment.recipe.regularizers):
        if (path := config.source_run()) is None:
            continue
        teacher = load_model(RunFolder(Path(path)), ranks)
        with experiment.recipe.errors_at("regularizers", number):
            teacher.model.check_takes(images)
            if config.keeps_space:
                check_same_space(describe(teacher).manifold, experiment, path)
            embedded = embed_files(teacher, ranks, images, f"the train split, by {path}", progress.images)
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
    data, stored = [recipe.dataset.data_root], recipe.backbone.tuning.stored()
    check_place(run, data, is_run=True)
    if stored is not None and stored.folder is not None:
        cache, key = Path(stored.folder), "backbone.tuning.cache:"
        check_place(cache, data, option=key)
        if cache.resolve().is_relative_to(run.resolve()):
            raise UserError(f"{key} {cache}: is inside the run folder, which has a cache of its own; remove the key")
