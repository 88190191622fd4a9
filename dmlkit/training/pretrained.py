"""The checkpoint ``pretrained``: the backbone as it was before the first step, scored once, stored with evaluations."""

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from dmlkit.backbones.identity import IdentityConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, warn
from dmlkit.evaluation.evaluate import Evaluation, evaluate, score_split
from dmlkit.evaluation.report import Figures, Question, Report, store, stored_answer
from dmlkit.evaluation.run import Scope, random_notes, with_scope
from dmlkit.files.source import MODEL
from dmlkit.loading.image_changes import are_same_files
from dmlkit.metrics.statistics import paired_differences
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import PairedDifference, PretrainedFigures
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.data import TrainingData
from dmlkit.training.experiment import Experiment, try_model
from dmlkit.training.progress import Progress
from dmlkit.vectors.features import CachedFeatures, trained_part
from dmlkit.vectors.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.vectors.stored import embed_files
from dmlkit.vectors.trained import TrainedModel, pretrained_model, without_head

_answered: dict[str, Path] = {}  # reports of this process's runs by the key of their question: a study asks it again


def pretrained_fingerprint(experiment: Experiment) -> str:
    """Return the fingerprint of the pretrained backbone of an untrained experiment; empty if its weights are random."""
    recipe = experiment.recipe
    return without_head(recipe, experiment.model).fingerprint if recipe.backbone.is_pretrained else ""


def score_pretrained(
    experiment: Experiment, data: TrainingData, run: RunFolder, ranks: Ranks, progress: Progress, weights: str
) -> dict[Split, Figures]:
    """Score the pretrained backbone, as it was before the first step, on validation and test classes.

    The report is that of ``dmlkit eval --checkpoint pretrained``, computed only once; a run that asks the same of the
    same images as an earlier run of this process copies its answer. The random number generators are not changed. The
    result is empty if there is no fingerprint ``weights``, or if the recipe names other weights by now.
    """
    recipe, is_first, figures = experiment.recipe, ranks.is_global_zero, dict[Split, Figures]()
    datasets: dict[Split, Dataset | None] = {"validation": data.validation, "test": data.test}
    alone: TrainedModel | None = None
    for split, dataset in datasets.items() if weights else ():
        if dataset is None:
            continue
        path = run.evaluations / f"{split}-pretrained.json"
        question = Question.of(recipe, weights, "pretrained", split)
        images = dataset.dataset if isinstance(dataset, CachedFeatures) else dataset
        stored = None
        if is_first:
            earlier = _answered.get(question.key())
            stored = stored_figures(path, question, images) or _copied(earlier, path, question, images)
        stored = ranks.broadcast(stored)
        if stored is None:
            alone = alone or pretrained_model(recipe, experiment.train.num_features, ranks, merged=False)
            if alone.fingerprint != weights:
                if is_first:
                    warn(f"{run.path}: backbone.weights names other weights than before the first step; not scored")
                return {}
            with progress.images(f"pretrained, {split}", len(dataset)) as advance:
                evaluation = _evaluate_alone(alone, recipe, dataset, ranks, split, advance)
            report = Report.of(evaluation, str(run.path), split, epoch=0, question=question)
            if is_first:
                report = report.with_files(images)
                store(report, evaluation, path)
            stored = Figures(report, evaluation.scores.per_query, evaluation.labels)
        figures[split] = stored
        _answered[question.key()] = path
    return figures


def _evaluate_alone(
    alone: TrainedModel, recipe: Recipe, dataset: Dataset, ranks: Ranks, split: Split, advance: Advance
) -> Evaluation:
    """Evaluate the checkpoint ``pretrained`` of a recipe on images, or on the stored features of its frozen layers."""

    def bar(what: str, total: int) -> AbstractContextManager[Advance]:
        return nullcontext(advance) if what == EMBEDDING else no_bar(what, total)

    if isinstance(dataset, CachedFeatures):
        part = trained_part(recipe, alone.model).to(ranks.device).eval()
        return evaluate(ranks, part, dataset, recipe, split=split, bar=bar)
    if recipe.backbone.name == "timm":  # ``dmlkit start`` has points of the same photos
        alone = replace(alone, run=RunFolder(Path(f"{MODEL}{recipe.backbone.model_dump()['model']}")))
    embeddings = embed_files(alone, ranks, dataset, f"the {split} split", bar)
    return score_split(ranks, alone, embeddings, dataset, split=split, bar=bar)


def _copied(earlier: Path | None, path: Path, question: Question, images: Dataset) -> Figures | None:
    """Copy the answer of an earlier run to ``path`` and return it, or None if it does not apply."""
    stored = stored_figures(earlier, question, images) if earlier else None
    if earlier and stored:
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(earlier.with_suffix(".npz"), path.with_suffix(".npz"))
        stored = stored._replace(report=stored.report.model_copy(update={"source": str(path.parent.parent)}))
        stored.report.write(path)
    return stored


def stored_figures(path: Path, question: Question, dataset: Dataset) -> Figures | None:
    """Read the stored figures for the same question and images."""
    try:
        figures = stored_answer(path, question)
        if figures and not are_same_files(dataset, figures.report.files, figures.report.contents):
            raise UserError(f"{path}: photos have changed since")
        return figures
    except UserError as error:
        warn(f"{error}; scored again")
        return None


def compare_with_pretrained(pretrained: Mapping[Split, Figures], tuned: Evaluation) -> PretrainedFigures | None:
    """Return the figures before training, with the differences of the chosen checkpoint from them on test classes."""
    if not pretrained:
        return None
    test, validation = pretrained["test"], pretrained.get("validation")
    same = test.report.images == tuned.fingerprint()  # an image may have been readable only once
    differences = paired_differences(test.per_query, tuned.scores.per_query, tuned.labels) if same else {}
    return PretrainedFigures(
        validation=validation.report.metrics if validation else None,
        test=test.report.metrics,
        difference={name: PairedDifference.model_validate(change.as_dict()) for name, change in differences.items()},
        classes=len(tuned.labels.unique()),
    )


def describe_backbone(recipe: Recipe) -> str:
    """Describe a backbone before training in a phrase."""
    backbone = recipe.backbone
    if isinstance(backbone, IdentityConfig):
        return f"the {backbone.sample}s without training"
    names = [backbone.name, *filter(None, [getattr(backbone, "model", None)])]
    weights = getattr(backbone, "weights", None)
    return f"{' '.join(names)} before training, {f'weights {weights}' if weights else 'random weights'}"


def evaluate_recipe(path: Path, ranks: Ranks, scope: Scope, bar: Bar) -> tuple[Report, Evaluation, Recipe]:
    """Score the checkpoint ``pretrained`` of a recipe; the overrides of the scope may be of any of its keys."""
    recipe, split = with_scope(read_recipe(path, scope.overrides), scope), scope.evaluated_split
    with recipe.errors_at("dataset") if scope.images is None else nullcontext():
        dataset = recipe.dataset.searched(split)
    trained = pretrained_model(recipe, dataset.num_features, ranks)
    try_model(recipe, trained.model, dataset)
    question = Question.of(recipe, trained.fingerprint, "pretrained", split)
    evaluation = evaluate(ranks, trained.model, dataset, recipe, split=split, bar=bar)
    report = Report.of(evaluation, str(path), split, epoch=0, question=question)
    report = report.model_copy(update={"notes": (*report.notes, *random_notes(recipe))})
    return report, evaluation, recipe
