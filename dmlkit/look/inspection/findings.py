"""Findings for the page of ``dmlkit inspect``, from a run or a folder of embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.arrays import evaluate_points
from dmlkit.evaluation.evaluate import Evaluation, score_dataset
from dmlkit.evaluation.mistakes import NEIGHBORS, ScoreHistograms, score_histograms
from dmlkit.evaluation.report import Report
from dmlkit.files.source import check_options, kind_of
from dmlkit.files.where import Where
from dmlkit.gallery.sources import open_points, split_points
from dmlkit.metrics.base import Points
from dmlkit.nearest.near_pairs import neighbors_of
from dmlkit.nearest.search import Gallery, Neighbors
from dmlkit.plots.planes import lies_in_disk, neighbor_plane, principal_plane, to_unit_disk
from dmlkit.recipe.file import dump_recipe
from dmlkit.run_folder.documents import EpochRow, Metrics, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.points import PointsInMemory, in_memory
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

MOST_TSNE = 5000  # points: 12 s on one core


@dataclass
class ModelInspection:
    """Findings about a collection of images."""

    collection: PointsInMemory
    names: Sequence[str]
    labels: Tensor  # (N,) int64 indices into ``names``, -1 for an image without a label
    neighbors: Neighbors | None  # of each image; None for a single image
    histograms: ScoreHistograms | None  # of similarities, if there are pairs of both kinds
    planes: dict[str, Tensor]  # (N, 2) coordinates of the maps, by name
    notes: list[str]
    evaluation: Evaluation | None = None  # if the labels are of at least two classes
    report: Report | None = None
    rows: Tensor | None = None  # (Q,) int64, the image of each query of the evaluation
    recipe: str | None = None  # this and the following only of a run
    epochs: Sequence[EpochRow] = ()
    pretrained: Metrics | None = None  # of the backbone before training on the same split, where they are known
    leaks: tuple[PointsInMemory, Neighbors] | None = None
    """Training images, and the most similar one of each image, (N, 1); None for a split that has them itself."""


def inspect(
    source: Path,
    *,
    split: Split | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    labels: Path | None = None,
    manifold: str | None = None,
    where: Where | None = None,
    bar: Bar = no_bar,
) -> ModelInspection:
    """Inspect points with labels: a split of a run, embeddings, a gallery or an array.

    Args:
        split: the split of a run. Default: test, or all of a pretrained model.
    """
    if kind_of(source) == "run":
        check_options(source, "run", {"--labels": labels, "--manifold": manifold})
        return _inspect_run(source, split, overrides, device or "auto", where, bar)
    of_array: dict[str, Any] = {"labels": labels, "manifold": manifold, "where": where}
    model = ModelChoice(device=device)
    points = in_memory(open_points(source, split=split, overrides=overrides, **of_array, model=model, bar=bar))
    inspection = _look(points, bar)
    if unlabeled := int((inspection.labels < 0).sum()):
        inspection.notes.append(f"{unlabeled} of {len(inspection.labels)} images have no label")
        return inspection
    try:
        inspection.report, inspection.evaluation = evaluate_points(points, bar=bar)
        inspection.rows = inspection.evaluation.scores.queries
    except UserError as error:  # a single class, or no class with two images
        inspection.notes.append(str(error))
    return inspection


def _inspect_run(
    path: Path, split: Split | None, overrides: Sequence[str], device: str, where: Where | None, bar: Bar
) -> ModelInspection:
    ranks, run = start_ranks(device), RunFolder(path)
    whole = load_model(run, ranks, overrides=overrides)
    trained = whole.limited(where)
    split = split or ("test" if run.model is None else "all")
    trained.recipe.dataset.require_one_label(str(path))
    inspection = _look(split_points(run, trained, ranks, split, bar), bar)
    if split not in ("train", "all"):  # whose images would find themselves
        others = split_points(run, whole, ranks, "train", bar)
        inspection.leaks = others, Gallery(others.manifold, others.points).search(inspection.collection.points, 1)
    pretrained = Summary.read(run.summary_path).pretrained if run.summary_path.exists() else None
    if pretrained is not None and where is None and split in ("test", "validation"):
        inspection.pretrained = pretrained.test if split == "test" else pretrained.validation
    inspection.recipe, inspection.epochs = dump_recipe(trained.recipe), run.read_metrics()
    _score(inspection, trained, ranks, split, path, bar)
    return inspection


def _score(
    inspection: ModelInspection, trained: TrainedModel, ranks: Ranks, split: Split, path: Path, bar: Bar
) -> None:
    """Add the metrics of the recipe, as ``dmlkit eval`` computes them."""
    images = inspection.collection
    assert images.images is not None
    _, dataset, ids, _ = images.images
    embeddings = Embeddings(images.points, dataset.labels[ids], ids, list(images.skipped))
    if trained.recipe.dataset.tests_known and split in ("validation", "test"):  # the gallery is not inspected
        dataset = trained.recipe.dataset.searched(split)
        embeddings = split_embeddings(RunFolder(path), trained, ranks, dataset, split, bar=bar)
    try:
        with bar("ranking", len(ids)) as advance:
            evaluation = score_dataset(
                embeddings, dataset, trained.manifold, trained.recipe.metrics, ranks=ranks, advance=advance
            )
    except ValueError as error:
        inspection.notes.append(f"cannot evaluate the {split} split: {error}")
        return
    is_query = images.images.dataset.query
    queries = torch.arange(len(ids)) if is_query is None else is_query[ids].nonzero()[:, 0]
    inspection.evaluation, inspection.rows = evaluation, queries[evaluation.scores.queries]
    inspection.report = Report.of(evaluation, str(path), split, epoch=trained.epoch)
    if dataset.query is not None:
        inspection.notes.append(
            "neighbors are searched among all images here; the metrics are those of queries and gallery"
        )


@torch.no_grad()
def _look(images: PointsInMemory, bar: Bar) -> ModelInspection:
    """Return the findings that need no evaluation."""
    names, labels = images.class_codes()
    manifold, points, notes = images.manifold, images.points, list[str]()
    neighbors = None
    if len(points) > 1:
        with bar("searching", len(points)) as advance:
            neighbors = neighbors_of(manifold, points, min(NEIGHBORS, len(points) - 1), advance=advance)
    histograms = None
    if len(names) and bool((labels >= 0).all()):
        try:
            groups = None if images.images is None else images.images.dataset.groups_of(images.images.rows)
            histograms = score_histograms(Points(points, labels, manifold, groups=groups))
        except ValueError as error:
            notes.append(str(error))
    planes = {"PCA": principal_plane(manifold, points)}
    if 10 <= len(points) <= MOST_TSNE:
        try:
            with bar("t-SNE", len(points)) as advance:
                planes = {"t-SNE": neighbor_plane(manifold, points, advance=advance), **planes}
        except UserError as error:  # openTSNE is not installed
            notes.append(f"no map by t-SNE: {error}")
    if lies_in_disk(manifold):
        planes = {"disk": to_unit_disk(manifold, points), **planes}
    return ModelInspection(images, names, labels, neighbors, histograms, planes, notes)
