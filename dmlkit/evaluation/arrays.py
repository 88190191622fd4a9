"""Evaluation of embeddings of any model: a folder that ``dmlkit embed`` wrote, or NumPy arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.class_names import path_fault
from dmlkit.errors import UserError, counted
from dmlkit.evaluation.evaluate import Evaluation, Rescoring, searching
from dmlkit.evaluation.report import Report
from dmlkit.gallery.folder import gallery_of
from dmlkit.gallery.sources import check_same_model
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import Labeled, MetricConfig
from dmlkit.metrics.ranking.codec import Codec, by_full_points
from dmlkit.metrics.ranking.rerank import Rerank
from dmlkit.metrics.scoring import DEFAULT_METRICS, Scores, metric_configs, score_retrieval
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.manifest import Manifest
from dmlkit.vectors.points import PointSet, PointsInMemory, in_memory
from dmlkit.vectors.progress_bar import Bar, no_bar


def evaluate_points(
    points: PointSet,
    gallery: PointSet | None = None,
    *,
    metrics: Sequence[MetricConfig | str] = (),
    bar: Bar = no_bar,
    rerank: Rerank | None = None,
) -> tuple[Report, Evaluation]:
    """Score points that have a label on their own manifold; each is searched among all others, or in a gallery."""
    queries, notes = _labeled(points)
    items = None
    if gallery is None:
        (queries,) = _alike(queries)
    else:
        check_same_model(gallery, points)
        items, gallery_notes = _labeled(gallery)
        queries, items = _alike(queries, items)
        notes += gallery_notes
        if torch.equal(queries.points, items.points):
            raise UserError(
                f"{gallery.source}: has the same points as {points.source}, so that every query would find itself; "
                "name one of them alone, to search each query among all others"
            )
    notes += _unused_limits(points)
    try:
        metrics = metric_configs(metrics or DEFAULT_METRICS)
    except ValueError as error:
        raise UserError(f"--metric: {error}") from None
    evaluation = _score(points.source, queries, items, points.manifold, metrics, bar, rerank)
    return Report.of(evaluation, points.source, "all", notes=notes), evaluation


def _labeled(points: PointSet) -> "tuple[LabeledRows, list[str]]":
    """Return the points that have a label, and a note on the others."""
    dataset = None if points.run is None else RunFolder(points.run).recipe().dataset
    if dataset is not None:
        dataset.require_one_label(points.source)
    labeled = [row for row, label in enumerate(points.labels) if label is not None]
    labels = np.array([points.labels[row] for row in labeled], dtype=str)
    whole = in_memory(points).points
    chosen = whole if len(labeled) == len(whole) else whole[labeled]  # without a copy where all have one
    rows = LabeledRows(chosen, labels, [points.paths[row] for row in labeled], dataset.levels if dataset else ())
    without = len(points) - len(rows.labels)
    if without == len(points):
        way = "add --labels FILE"
        if gallery_of(points) is not None:
            way = f"add its images again with a label: dmlkit gallery add {points.source} IMAGES --label NAME"
        elif points.stored.manifest is not None:
            way = "embed folders of classes, or a table with --labels COLUMN"
        raise UserError(f"{points.source}: none of {counted(without, 'item', 'items')} has a label; {way}")
    note = f"{counted(without, 'item has', 'items have')} no label, to be left out"
    return rows, [note] if without else []


def _unused_limits(points: PointSet) -> list[str]:
    """Return a note if an evaluation of the run, or of a recipe, would limit the searches of these images."""
    gallery, manifest = gallery_of(points), points.stored.manifest
    limits, judged = manifest.limits if isinstance(manifest, Manifest) else (), "the run"
    columns = [*gallery.cells()] if gallery is not None else []
    if isinstance(points, PointsInMemory) and points.columns:
        columns, judged = [name.lower() for name in points.columns], "a recipe with these vectors as dataset"
    limits = limits or [name for name in ("query", "gallery", "group") if name in columns]
    return [f"not used here, unlike in dmlkit eval of {judged}: {', '.join(limits)} of the images"] if limits else []


class LabeledRows(NamedTuple):
    """Points or features with their labels, names that a report shows, and levels, of which the labels are paths."""

    points: Tensor
    labels: Any
    names: Sequence[str]
    levels: Sequence[str]

    def side(self, codec: Codec | None = None) -> Labeled:
        """Return the points, as a codec stores them if there is one, with their labels at each level."""
        points = self.points if codec is None else codec.decode(self.points)
        if not self.levels:
            return Labeled(points, self.labels)
        parts = [label.split("/") for label in self.labels.tolist()]
        levels = enumerate(self.levels)
        return Labeled(points, {level: ["/".join(path[: depth + 1]) for path in parts] for depth, level in levels})


def _alike(*sides: LabeledRows) -> list[LabeledRows]:
    """Return the sides with common levels if all labels are paths of them, else as numbers if all labels are numbers.

    What one label of either side is not, none is: labels of both are compared.
    """
    labels = {label for side in sides for label in side.labels.tolist()}
    levels = next((side.levels for side in sides if side.levels), ())
    if any(path_fault(label, levels) for label in labels):
        levels = ()
    if not levels and all(len(label) < 19 and label.isdecimal() and label == str(int(label)) for label in labels):
        sides = tuple(side._replace(labels=side.labels.astype(np.int64)) for side in sides)  # in the order of numbers
    return [side._replace(levels=levels) for side in sides]


def _score(
    source: str,
    queries: LabeledRows,
    gallery: LabeledRows | None,
    manifold: Manifold,
    metrics: Sequence[MetricConfig | str],
    bar: Bar,
    rerank: Rerank | None,
) -> Evaluation:
    items = gallery or queries
    try:
        with bar("ranking", len(queries.labels)) as advance:
            sides = queries.side(), gallery and gallery.side()
            scores = score_retrieval(*sides, manifold, metrics, advance=advance)
        alternative = None
        if rerank is not None:
            alternative = score_retrieval(*sides, manifold, searching(metrics), rerank=rerank)
    except ValueError as error:
        raise UserError(f"cannot evaluate {source}: {error}") from error

    def score_form(codec: Codec) -> Scores:
        is_rescored = codec.stored.precision == "rescored"
        rescore = by_full_points(codec.manifold, queries.points, items.points) if is_rescored else None
        sides = queries.side(codec), gallery and gallery.side(codec)
        return score_retrieval(*sides, codec.space, searching(metrics), rerank=rescore)

    classes, index = np.unique(np.concatenate([queries.labels, items.labels]), return_inverse=True)
    labels, item_labels = (torch.from_numpy(part) for part in np.split(index, [len(queries.labels)]))
    return Evaluation(
        scores=scores,
        labels=labels[scores.queries],
        nearest_labels=item_labels[scores.nearest],
        class_names=classes.astype(str).tolist(),
        images=[queries.names[int(row)] for row in scores.queries],
        classes=len(labels.unique()),
        faults=[],
        alternative=alternative,
        rescoring=Rescoring(items.points, manifold, score_form, lambda: items.points),
    )
