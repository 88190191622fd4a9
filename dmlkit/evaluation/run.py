"""Evaluate a run: on its own test classes or on other images, and keep the figures with their question."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.folder import FolderConfig
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.evaluation.evaluate import evaluate
from dmlkit.evaluation.report import Report, store, stored_answer
from dmlkit.evaluation.result import Evaluation
from dmlkit.loading.cache import images_of_split
from dmlkit.metrics.ranking.rankings import Ties
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.file import dump_recipe, parse_override, parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.question import Question

READ = ("dataset", "metrics", "training.workers", "transform.size", "transform.resize")
"""Recipe keys, or what lies below them, that an evaluation reads; the weights stand for the others."""


@dataclass(frozen=True)
class EvaluatedRun:
    """The evaluation of a run, and where it lies.

    Args:
        report: what was found.
        per_query: (Q,) values by metric.
        classes: (Q,) int64, of the queries.
        evaluation: with all that is known of the queries; None where a stored report answered the question.
        path: of the report; the values of its queries lie beside it as ``.npz``.
        checkpoint: which weights.
        dataset: the name of the dataset.
        note: why what was stored could not be used, if so.
    """

    report: Report
    per_query: dict[str, Tensor]
    classes: Tensor
    evaluation: Evaluation | None
    path: Path
    checkpoint: CheckpointName
    dataset: str
    note: str | None = None


def evaluate_run(
    path: str | Path,
    *,
    split: Split | None = None,
    checkpoint: CheckpointName | None = None,
    dataset_root: str | Path | None = None,
    overrides: Sequence[str] = (),
    metrics: Sequence[str] = (),
    ties: Ties = "expected",
    device: str = "auto",
    fabric: Fabric | None = None,
    again: bool = True,
    bar: Bar = no_bar,
) -> EvaluatedRun:
    """Score a run's model and write ``evaluations/SPLIT-CHECKPOINT.json`` in it.

    Any other question than the run's own (its dataset, transform and metrics, ties expected) has a file of its own
    name, so that figures never stand under another's.

    Args:
        path: of the run.
        split: whose images; by default test, or all of ``dataset_root``.
        checkpoint: which weights; by default the best, else the last.
        dataset_root: another folder of images, one subfolder a class, instead of the run's dataset.
        overrides: ``key=value`` each, for the keys in `READ`.
        metrics: names, instead of the recipe's.
        ties: how items of the same score count.
        device: where, see `start_fabric`.
        fabric: a device and ranks that were launched already.
        again: evaluate even where the same question has been answered.
        bar: shows each step.

    Raises:
        UserError: there is no such run, or a key that evaluation does not read, or nothing to retrieve.
    """
    run = RunFolder(Path(path))
    fabric = fabric or start_fabric(device)
    trained = load_model(run, fabric, checkpoint)
    recipe = _recipe_of(trained, run, dataset_root, overrides, metrics)
    split = split or ("all" if dataset_root is not None else "test")
    weights = trained.model.fingerprint()
    question = Question.of(recipe, weights, trained.checkpoint, split, ties)
    own = Question.of(trained.recipe, weights, trained.checkpoint, split)
    target = run.evaluations / f"{question.file_name(own)}.json"
    name = recipe.dataset.name
    note = None
    try:
        stored = None if again else stored_answer(target, question)
        if stored:
            return EvaluatedRun(*stored, None, target, trained.checkpoint, name)
    except UserError as error:
        note = f"{error}; evaluated again"
    dataset = images_of_split(recipe.dataset, split)
    evaluation = evaluate(fabric, trained.model, dataset, recipe, split=split, bar=bar, ties=ties)
    report = Report.of(evaluation, str(path), split, ties=ties, epoch=trained.epoch, question=question)
    if fabric.is_global_zero:
        store(report, evaluation, target)
    per_query = dict(evaluation.scores.per_query)
    classes = evaluation.labels
    return EvaluatedRun(report, per_query, classes, evaluation, target, trained.checkpoint, name, note)


def _recipe_of(
    trained: TrainedModel,
    run: RunFolder,
    dataset_root: str | Path | None,
    overrides: Sequence[str],
    metrics: Sequence[str],
) -> Recipe:
    """The run's recipe with what the evaluation is to read otherwise."""
    for override in overrides:
        key = parse_override(override).key
        if not any(key == read or key.startswith(f"{read}.") for read in READ):
            raise UserError(
                f"--set {override}: evaluation does not read {key}, which belongs to the model or its training; "
                f"it reads {', '.join(READ)}"
            )
    recipe = parse_recipe(dump_recipe(trained.recipe), str(run.recipe_path), overrides)
    return asked_otherwise(recipe, dataset_root, overrides, metrics)


def asked_otherwise(
    recipe: Recipe, dataset_root: str | Path | None, overrides: Sequence[str], metrics: Sequence[str]
) -> Recipe:
    """The recipe with a folder of images instead of its dataset, and other metrics, where they are given.

    Raises:
        UserError: a metric is unknown, or the dataset is among the overrides as well.
    """
    for override in overrides if dataset_root is not None else ():
        if parse_override(override).key.partition(".")[0] == "dataset":
            raise UserError(f"--set {override}: --dataset-root takes the place of the dataset; give one of them")
    if metrics:
        try:
            recipe = recipe.model_copy(update={"metrics": tuple(metric_configs(metrics))})
        except ValueError as error:
            raise UserError(f"--metric: {str(error).removeprefix('metrics: ')}") from None
    if dataset_root is not None and recipe.dataset.sample != "image":
        raise UserError(
            f"--dataset-root {dataset_root}: is of images, but this run takes {recipe.dataset.sample}s; "
            "--set dataset.embeddings=FILE evaluates it on others"
        )
    if dataset_root is not None:
        folder = FolderConfig(root=str(dataset_root), on_bad_image=recipe.dataset.on_bad_image)
        recipe = recipe.model_copy(update={"dataset": folder})
    return recipe
