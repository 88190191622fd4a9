"""What training is held against: the backbone before the first step, scored once and kept in the run."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning_fabric import Fabric

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.embedding.progress_bar import EMBEDDING, Bar, no_bar
from dmlkit.errors import UserError
from dmlkit.evaluation.report import Figures, Report, store, stored_answer
from dmlkit.evaluation.result import Evaluation
from dmlkit.evaluation.run import asked_otherwise
from dmlkit.evaluation.statistics import paired_differences
from dmlkit.evaluation.untouched import evaluate_untouched, has_pretrained_weights, untouched_question
from dmlkit.loading.cache import images_of_split
from dmlkit.metrics.ranking.rankings import Ties
from dmlkit.model import EmbeddingModel, build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import PairedDifference, UntouchedFigures
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.question import Question
from dmlkit.training.data import TrainingData
from dmlkit.training.experiment import Experiment, blank_input, faults_of, try_model
from dmlkit.training.progress import Progress


def score_untouched(
    experiment: Experiment, data: TrainingData, run: RunFolder, fabric: Fabric, progress: Progress
) -> dict[Split, Figures]:
    """The figures of the backbone with the weights that the recipe names, on validation and test classes.

    They are scored once: what the run holds already is read. Nothing where the recipe names no weights.

    Args:
        experiment: as assembled, not yet trained.
        data: its images, or their features.
        run: where the figures are kept.
        fabric: the device, and the ranks, which share the work.
        progress: shows each step.

    Raises:
        UserError: an image cannot be read, or there is nothing to retrieve.
    """
    recipe, model = experiment.recipe, experiment.model
    found: dict[Split, Figures] = {}
    datasets: dict[Split, Dataset | None] = {"validation": data.validation, "test": data.test}
    for split, dataset in datasets.items() if has_pretrained_weights(recipe) else ():
        if dataset is None:
            continue
        path, question = run.untouched / f"{split}.json", untouched_question(model, recipe, split)
        begun = run.checkpoint_path("last").exists()
        kept = fabric.broadcast(_kept(path, question, begun=begun) if fabric.is_global_zero else None)
        if kept is None:
            with progress.images(f"untouched backbone, {split}", len(dataset)) as advance:
                report, evaluation = evaluate_untouched(
                    fabric,
                    data.model,
                    dataset,
                    recipe,
                    question,
                    source=f"{run.path}, untouched",
                    bar=lambda what, total: nullcontext(advance) if what == EMBEDDING else no_bar(what, total),
                )
            if fabric.is_global_zero:
                store(report, evaluation, path)
            kept = Figures(report, evaluation.scores.per_query, evaluation.labels)
        found[split] = kept
    return found


def _kept(path: Path, question: Question, *, begun: bool) -> Figures | None:
    """The figures that a run holds, for the same question; once it has ``begun``, of the weights that it began with."""
    try:
        if begun and path.exists():
            asked = Report.read(path).question
            question = question.model_copy(update={"weights": asked.weights if asked else question.weights})
        return stored_answer(path, question)
    except UserError as error:
        logging.getLogger("dmlkit").warning(f"{error}; scored again")
        return None


def held_against(untouched: Mapping[Split, Figures], tuned: Evaluation) -> UntouchedFigures | None:
    """The untouched figures for the summary, with how the chosen checkpoint's on test classes differ from them."""
    if not untouched:
        return None
    test, validation = untouched["test"], untouched.get("validation")
    same = test.report.images == tuned.fingerprint()  # but for images that could be read only once
    differences = paired_differences(test.per_query, tuned.scores.per_query, tuned.labels) if same else {}
    return UntouchedFigures(
        validation=validation.report.metrics if validation else None,
        test=test.report.metrics,
        difference={name: PairedDifference.model_validate(change.as_dict()) for name, change in differences.items()},
    )


def phrase_of(recipe: Recipe) -> str:
    """What an untrained backbone is, in a phrase.

    Example:
        >>> from dmlkit.recipe.file import parse_recipe
        >>> phrase_of(parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet}", "recipe.yaml"))
        'untrained small_cnn, random weights'
    """
    backbone = recipe.backbone
    if backbone.sample == "vector":
        return "the vectors as they are"
    names = [backbone.name, *filter(None, [getattr(backbone, "model", None)])]
    weights = getattr(backbone, "weights", None)
    return f"untrained {' '.join(names)}, {f'weights {weights}' if weights else 'random weights'}"


def evaluate_untrained(
    path: Path,
    fabric: Fabric,
    *,
    split: Split | None = None,
    dataset_root: Path | None = None,
    overrides: Sequence[str] = (),
    metrics: Sequence[str] = (),
    ties: Ties = "expected",
    bar: Bar = no_bar,
) -> tuple[Report, Evaluation, Recipe]:
    """Score the features of a recipe's backbone without training; see `dmlkit.evaluation.evaluate_run`.

    With ``backbone.weights: null`` they are those of the random network that training would start from.

    Args:
        path: of the recipe, or of a run.
        fabric: the device, and the ranks.
        split: whose images; by default test, or all of ``dataset_root``.
        dataset_root: another folder of images, one subfolder a class, instead of the recipe's dataset.
        overrides: ``key.subkey=value`` each, any key of the recipe.
        metrics: names, instead of the recipe's.
        ties: how items of the same score count.
        bar: shows each step.

    Raises:
        UserError: the recipe or the data is at fault, or the weights cannot be had.
    """
    if path.is_dir():
        RunFolder(path).recipe()  # refuses another folder
    recipe = read_recipe(RunFolder(path).recipe_path if path.is_dir() else path, overrides)
    recipe = asked_otherwise(recipe, dataset_root, overrides, metrics)
    split = split or ("all" if dataset_root is not None else "test")
    with faults_of(recipe, "dataset") if dataset_root is None else nullcontext():
        dataset = images_of_split(recipe.dataset, split)
    model = untrained_model(recipe, dataset)
    question = untouched_question(model, recipe, split, ties)
    report, evaluation = evaluate_untouched(fabric, model, dataset, recipe, question, source=str(path), bar=bar)
    if dataset.num_features is None and not has_pretrained_weights(recipe):
        note = f"backbone.weights is null: a random network (seed {recipe.seed}), the floor that training has to beat"
        report = report.model_copy(update={"notes": (*report.notes, note)})
    return report, evaluation, recipe


def untrained_model(recipe: Recipe, dataset: Dataset) -> EmbeddingModel:
    """The model that a training of the recipe starts from, tried on a blank input.

    Raises:
        UserError: the recipe is at fault, or the weights cannot be had.
    """
    torch.manual_seed(recipe.seed)
    with faults_of(recipe, "backbone"):
        model = build_model(recipe, dataset.num_features)
    with faults_of(recipe, *(("transform", "size") if recipe.transform else ("backbone",))):
        try_model(model, blank_input(recipe, dataset))
    return model
