"""Evaluation of a run on its own test classes or on other images."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from dmlkit.backbones.identity import IdentityConfig
from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.class_names import sharing_labels
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import samples_named
from dmlkit.datasets.folder import FolderConfig
from dmlkit.datasets.table import TableConfig, other_table
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError, counted, require_list, warn
from dmlkit.evaluation.augmented import check_copies, embed_with_copies
from dmlkit.evaluation.by_value import column_table
from dmlkit.evaluation.evaluate import Evaluation, SecondScoring, score_split
from dmlkit.evaluation.report import Question, Report, store, stored_answer
from dmlkit.files.image_table import lists_images
from dmlkit.files.paths import require_readable
from dmlkit.files.source import LOCAL
from dmlkit.files.where import Where
from dmlkit.loading.image_changes import are_same_files
from dmlkit.metrics.base import Points
from dmlkit.metrics.ranking.rerank import Rerank
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.file import plain
from dmlkit.recipe.overrides import parse_override
from dmlkit.recipe.schema import Copies, Recipe
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.fusion import fuse
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.manifest import Fusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import embed_files, split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

READ = ("dataset", "metrics", "training.workers", "transform.size", "transform.resize", "transform.square")
"""Recipe keys that an evaluation reads, with the keys below them; all other keys are fixed by the weights."""
KEPT = ("on_bad_image", "max_pixels", "levels", "new_classes", "group")
"""Keys of a run's dataset that hold for other images too."""
TRAINED_ON = "trained on; these metrics do not measure unseen classes"


@dataclass(frozen=True)
class Scope:
    """Which images are evaluated, and by which metrics."""

    split: Split | None = None  # split of the dataset. Default: test, or all of ``images``
    images: Path | None = None  # other images instead of the dataset: a folder with one subfolder per class, or a table
    overrides: Sequence[str] = ()  # ``key=value`` each: for a run of the keys in `READ`
    metrics: Sequence[str] = ()  # names of metrics, instead of the recipe's
    column: tuple[str, Path | None] | None = None
    """Column whose values the metrics are reported for, and its table. Default of the table: that of the dataset."""
    where: Where | None = None  # conditions on the rows of the table of the dataset; others are left out
    rerank: Rerank | None = None
    """Rank the queries once more. The stored report is without this and the other ways to score the same images."""
    copies: Copies | None = None  # evaluate the mean of each image and copies of it too, see `embed_with_copies`
    fusion: Fusion | None = None  # add the similarity of a second model, local scores, or place and time

    @property
    def evaluated_split(self) -> Split:
        return self.split or ("all" if self.images is not None else "test")


OWN_TEST = Scope()
"""The test images of a run, by its own metrics."""


@dataclass(frozen=True)
class EvaluatedRun:
    """Evaluation of a run, and the file in which it is stored."""

    report: Report
    per_query: dict[str, Tensor]  # (Q,) values by metric
    classes: Tensor  # (Q,) int64, of the queries
    evaluation: Evaluation | None  # None if a stored report answered the question
    path: Path | None  # of the report, with the values of its queries in the ``.npz`` file; None if it is not kept
    checkpoint: CheckpointName
    dataset: str  # title of the dataset
    note: str | None = None  # why a stored report could not be used, if so


def evaluate_run(
    path: str | Path,
    *,
    split: Split | None = None,
    checkpoint: CheckpointName | None = None,
    images: str | Path | None = None,
    overrides: Sequence[str] = (),
    metrics: Sequence[str] = (),
    device: str = "auto",
) -> EvaluatedRun:
    """Score a run's model and store the report in the run, see `evaluate_scope`.

    Args:
        split, images, overrides, metrics: see `Scope`.
        checkpoint: by default the best, or the last if there is no best.
        device: see `start_ranks`.

    Raises:
        UserError: there is no such run or split, or an override, a metric or the images do not fit it.
    """
    require_list("overrides", overrides)
    if split not in (None, *get_args(Split)):
        raise UserError(f"split: got {split!r}, expected one of {', '.join(get_args(Split))}")
    scope = Scope(split, None if images is None else Path(images), overrides, metrics)
    return evaluate_scope(Path(path), start_ranks(device), scope, checkpoint=checkpoint)


def evaluate_scope(
    path: Path,
    ranks: Ranks,
    scope: Scope = OWN_TEST,
    *,
    checkpoint: CheckpointName | None = None,
    keep: bool = False,
    bar: Bar = no_bar,
) -> EvaluatedRun:
    """Score a run's model and write ``evaluations/SPLIT-CHECKPOINT.json`` in the run.

    If dataset, transform or metrics differ from the run's own, the file name contains a hash of them, so that
    results with different settings are never mixed up. ``keep`` reads the report if it is stored and its images have
    not changed since; images that are gone count as unchanged.
    """
    run = RunFolder(path)
    recipe, split = evaluated_recipe(run, scope), scope.evaluated_split
    trained = load_model(run, ranks, checkpoint)
    weights = trained.fingerprint
    question = Question.of(recipe, weights, trained.checkpoint, split)
    own_question = Question.of(trained.recipe, weights, trained.checkpoint, split)
    target = run.evaluations / f"{question.file_name(own_question)}.json"
    name = recipe.dataset.title
    try:
        stored = stored_answer(target, question) if keep else None
        if stored and _is_current(stored.report, recipe, split):
            return EvaluatedRun(*stored, None, target, trained.checkpoint, name)
        note = f"{target}: the images or their labels have changed since; evaluated again" if stored else None
    except UserError as error:
        note = f"{error}; evaluated again"
    dataset = recipe.dataset.searched(split)
    check_copies(dataset, recipe, scope.copies)
    own_model, trained = trained, replace(trained, recipe=recipe, recorded=weights)

    def embedded(trained: TrainedModel) -> Embeddings:
        if scope.images is None:
            return split_embeddings(run, trained, ranks, dataset, split, bar=bar)
        return embed_files(trained, ranks, dataset, f"the {split} split", bar)

    embeddings, second = embedded(trained), SecondScoring(scope.rerank)
    if scope.copies is not None:
        means = embed_with_copies(ranks, trained, dataset, embeddings, scope.copies, bar)
        second = replace(second, points=Points(means.points, means.labels, trained.manifold))
    if scope.fusion is not None:
        second = replace(second, **_with_fusion(scope.fusion, trained, ranks, dataset, embedded, embeddings, bar))
    evaluation = score_split(ranks, trained, embeddings, dataset, split=split, bar=bar, second=second)
    evaluation = _with_ranges(evaluation, run, trained if scope.images is None else own_model, ranks, bar)
    notes = random_notes(recipe) if trained.checkpoint == "pretrained" else _seen_notes(run, dataset)
    report = Report.of(evaluation, str(path), split, epoch=trained.epoch, question=question, notes=notes)
    if ranks.is_global_zero:
        baseline = run.evaluations / f"{split}-pretrained.json"
        known = Report.read(baseline) if Report.is_at(baseline) else None
        report = report.with_files(dataset, known, contents=known is not None or trained.checkpoint == "pretrained")
        try:
            store(report, evaluation, target)
        except OSError as error:
            warn(f"{target}: cannot write this report: {error.strerror or error}; it is not kept")
            target = None
    per_query = dict(evaluation.scores.per_query)
    return EvaluatedRun(report, per_query, evaluation.labels, evaluation, target, trained.checkpoint, name, note)


def _is_current(report: Report, recipe: Recipe, split: Split) -> bool:
    """Return whether images and labels are those of a stored report; if they are gone, it is all that is left.

    Raises:
        UserError: the user's data are there and cannot be read, e.g. a table was damaged.
    """
    try:
        dataset = recipe.dataset.searched(split)
    except UserError:
        place = Path(recipe.dataset.title)
        if recipe.dataset.titled_by is not None and (place.is_file() or any(place.glob("*"))):
            raise
        return True
    if are_same_files(dataset, report.files, report.contents):
        return True
    indices = range(len(dataset))  # lists and tables name files without opening one
    files = [dataset.paths[row] for row in indices if dataset.box(row) is not None or dataset.file(row) is not None]
    return bool(files) and not any(map(os.path.exists, files))


def random_notes(recipe: Recipe) -> list[str]:
    """Return a note for the report of a checkpoint ``pretrained`` whose weights are random."""
    if isinstance(recipe.backbone, IdentityConfig) or recipe.backbone.is_pretrained:
        return []
    return [f"backbone.weights is null: scores of a random network (seed {recipe.seed}), from which training starts"]


def _seen_notes(run: RunFolder, dataset: Dataset) -> list[str]:
    """Return a note on evaluated classes that the run was trained on; of several labels, one of a set is enough."""
    config = run.recipe().dataset
    seen = sharing_labels(dataset.class_names, run.training_classes(), config.label_separator)
    all_seen = len(seen) == len(dataset.class_names)
    subject = "every class was" if all_seen else counted(len(seen), "class was", "classes were")
    if dataset.query is not None and dataset.gallery is not None and config.tests_known:
        queries, gallery = (f"{int(mask.sum()):,}" for mask in (dataset.query, dataset.gallery))
        return [
            f"known classes: {queries} test images search {gallery} others; these metrics do not measure unseen classes"
        ]
    return [f"{subject} {TRAINED_ON}"] if seen else []


def _with_ranges(evaluation: Evaluation, run: RunFolder, model: TrainedModel, ranks: Ranks, bar: Bar) -> Evaluation:
    """Take the ranges of integers from the training split, which is embedded when a stored form needs them."""

    def ranges() -> Tensor:
        images = model.recipe.dataset.build("train")
        alone = replace(ranks, world_size=1)  # only the first rank reports, and the others do not embed with it
        return split_embeddings(run, model, alone, images, "train", bar=bar).points

    rescoring = replace(evaluation.rescoring, ranges=ranges, ranges_of="the training split")
    return replace(evaluation, rescoring=rescoring)


def _with_fusion(
    fusion: Fusion,
    trained: TrainedModel,
    ranks: Ranks,
    dataset: Dataset,
    embedded: Callable[[TrainedModel], Embeddings],
    embeddings: Embeddings,
    bar: Bar,
) -> dict[str, Any]:
    """Embed with two models, or prepare local scores of the embedded images."""
    if fusion.run == LOCAL:
        from dmlkit.evaluation.second import by_features, local_features  # with identify/, which training needs not

        features, _ = local_features(trained, ranks, dataset, embeddings, bar)
        return {"rerank": by_features(features, fusion)}
    fused = fuse(trained, fusion, ranks)
    second = embedded(fused)
    if len(second.points) < len(embeddings.points):
        raise UserError(f"--with: an image can no longer be read: {second.faults[0]}")
    return {"points": Points(second.points, second.labels, fused.manifold)}


def evaluated_recipe(run: RunFolder, scope: Scope) -> Recipe:
    """Return a run's recipe with the changes for an evaluation, which the run is checked for."""
    for override in scope.overrides:
        key = parse_override(override).key
        if not any(key == read or key.startswith(f"{read}.") for read in READ):
            raise UserError(
                f"--set {override}: evaluation does not read {key}, which belongs to the model or its training; "
                f"expected one of {', '.join(READ)}"
            )
    return with_scope(run.recipe(scope.overrides), scope)


def with_scope(recipe: Recipe, scope: Scope) -> Recipe:
    """Return a recipe with the dataset and the metrics of a scope."""
    if scope.metrics:
        try:
            recipe = recipe.model_copy(update={"metrics": tuple(metric_configs(scope.metrics))})
        except ValueError as error:
            raise UserError(f"--metric: {error}") from None
    if scope.images is not None:
        images = _other_images(scope.images, recipe.dataset, scope)
        recipe = recipe.model_copy(update={"dataset": images})
    if scope.where is not None:
        recipe = recipe.model_copy(update={"dataset": recipe.dataset.limited(scope.where)})
    if scope.column is not None:
        column_table(*scope.column, plain(recipe)["dataset"])
    return recipe


def _other_images(images: Path, dataset: DatasetConfig, scope: Scope) -> DatasetConfig:
    """Return the configuration of a folder or table of images that takes the place of a run's dataset."""
    for override in scope.overrides:
        if parse_override(override).key.partition(".")[0] == "dataset":
            raise UserError(f"--set {override}: {images} replaces the dataset; use only one of them")
    if not samples_named(dataset.sample).has_pixels:
        raise UserError(
            f"{images}: these are images, but the run takes {dataset.sample}s; "
            "use --set dataset.embeddings=FILE to evaluate other vectors"
        )
    require_readable([str(images)])
    table = dataset if isinstance(dataset, TableConfig) else None
    kept: dict[str, Any] = {name: getattr(dataset, name) for name in KEPT}
    kept["split"] = "images" if dataset.tests_known else "official"
    if images.is_dir() and not lists_images(images, table.columns if table else None):
        config = FolderConfig(root=str(images), **kept)
    else:
        if table is not None and table.separator is not None:
            kept |= {"separator": table.separator, "split": "all" if scope.evaluated_split == "all" else "official"}
        config = other_table(images, table).model_copy(update=kept)
    return config.of_run(dataset.classes_of_run)
