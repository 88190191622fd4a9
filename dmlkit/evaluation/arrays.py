"""Evaluation of embeddings of any model: a folder that ``dmlkit embed`` wrote, or NumPy arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.class_names import path_fault
from dmlkit.errors import UserError, counted
from dmlkit.evaluation.evaluate import Evaluation, Rescoring, searching
from dmlkit.evaluation.report import Report
from dmlkit.gallery.sources import points_of_rows, read_features, read_labels
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.metrics.base import Labeled, MetricConfig
from dmlkit.metrics.ranking.codec import Codec, Rescore
from dmlkit.metrics.ranking.rankings import Ties
from dmlkit.metrics.ranking.rerank import Rerank
from dmlkit.metrics.scoring import DEFAULT_METRICS, Scores, metric_configs, score_retrieval
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.points import PointSet, all_points
from dmlkit.vectors.progress_bar import Bar, no_bar

WantedMetrics = Sequence[MetricConfig | str]


def evaluate_points(
    points: PointSet,
    *,
    metrics: WantedMetrics = (),
    ties: Ties = "expected",
    bar: Bar = no_bar,
    rerank: Rerank | None = None,
) -> tuple[Report, Evaluation]:
    """Score points that have a label on their own manifold; each is searched among all others of them.

    Args:
        metrics: configs or names; `DEFAULT_METRICS` if there are none.
        ties: how items with the same score are counted.
        rerank: method by which the queries are ranked once more.
    """
    dataset = None if points.run is None else RunFolder(points.run).recipe().dataset
    if dataset is not None:
        dataset.require_one_label(points.source)
    queries = LabeledRows.of(all_points(points), points.labels, points.paths, dataset.levels if dataset else ())
    without = len(points) - len(queries.labels)
    if without == len(points):
        raise UserError(f"{points.source}: none of {counted(without, 'item', 'items')} has a label; add labels")
    evaluation = _score(points.source, queries, None, points.manifold, _configs(metrics), ties, bar, rerank)
    report = Report.of(evaluation, points.source, "all", ties=ties)
    if without:
        note = f"{counted(without, 'item has', 'items have')} no label, to be left out"
        report = report.model_copy(update={"notes": (*report.notes, note)})
    return report, evaluation


def evaluate_arrays(
    embeddings: Path,
    labels: Path,
    *,
    gallery: tuple[Path, Path] | None = None,
    manifold: str = "sphere",
    metrics: WantedMetrics = (),
    ties: Ties = "expected",
    bar: Bar = no_bar,
    rerank: Rerank | None = None,
) -> tuple[Report, Evaluation]:
    """Score ``.npy`` files of embeddings, (N, D) numbers, and labels, (N,), see `read_labels`.

    Args:
        gallery: files of the embeddings and labels to search instead of the queries themselves.
        manifold: ``sphere`` (cosine of the normalized rows) or ``euclidean`` (distance).
        metrics: configs or names; `DEFAULT_METRICS` if there are none.
        ties: how items with the same score are counted.
        rerank: method by which the queries are ranked once more.
    """
    configs = _configs(metrics)
    features = read_features(embeddings)
    space = ManifoldConfig.variants[manifold]().build(features.shape[1])
    items = None
    if gallery is not None:
        others = read_features(gallery[0])
        if torch.equal(features, others):
            raise UserError(
                f"--gallery {gallery[0]}: has the same rows as --embeddings, so that every query would find itself; "
                "omit --gallery to search each query among all others"
            )
        items = LabeledRows.of(points_of_rows(others, space, gallery[0]), read_labels(gallery[1]))
    names = [str(row) for row in range(len(features))]
    queries = LabeledRows.of(points_of_rows(features, space, embeddings), read_labels(labels), names)
    evaluation = _score(str(embeddings), queries, items, space, configs, ties, bar, rerank)
    return Report.of(evaluation, str(embeddings), "all", ties=ties), evaluation


class LabeledRows(NamedTuple):
    """Points or features with their labels, names that a report shows, and the levels of labels that are paths."""

    points: Any
    labels: Any
    names: Sequence[str] = ()
    levels: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        points: Tensor,
        labels: Sequence[str | None],
        names: Sequence[str] = (),
        levels: Sequence[str] = (),
    ) -> "LabeledRows":
        """Return the rows that have a label; labels that are all numbers are in the order of numbers."""
        kept = [row for row, label in enumerate(labels) if label is not None]
        given = np.array([labels[row] for row in kept], dtype=str)
        if not levels and all(label.isdecimal() and label == str(int(label)) and len(label) < 19 for label in given):
            given = given.astype(np.int64)
        if len(kept) == len(labels) or len(labels) != len(points):  # the latter is reported where they are scored
            return cls(points, given, names, levels)
        return cls(points[kept], given, [names[row] for row in kept] if names else (), levels)

    def side(self, codec: Codec | None = None) -> Labeled:
        """Return the points, as a codec stores them if there is one, with their labels at each level.

        The labels stay as they are if one of them is not a path of these levels.
        """
        points = self.points if codec is None else codec.decode(self.points)
        if not self.levels or any(path_fault(label, self.levels) for label in set(self.labels.tolist())):
            return Labeled(points, self.labels)
        parts = [label.split("/") for label in self.labels.tolist()]
        levels = enumerate(self.levels)
        return Labeled(points, {level: ["/".join(path[: depth + 1]) for path in parts] for depth, level in levels})


def _configs(metrics: WantedMetrics) -> WantedMetrics:
    try:
        return metric_configs(metrics or DEFAULT_METRICS)
    except ValueError as error:
        raise UserError(f"--metric: {error}") from None


def _score(
    source: str,
    queries: LabeledRows,
    gallery: LabeledRows | None,
    manifold: Manifold,
    metrics: WantedMetrics,
    ties: Ties,
    bar: Bar,
    rerank: Rerank | None,
) -> Evaluation:
    items = gallery or queries
    try:
        with bar("ranking", len(queries.labels)) as advance:
            sides = queries.side(), gallery and gallery.side()
            scores = score_retrieval(*sides, manifold, metrics, ties=ties, advance=advance)
        alternative = None
        if rerank is not None:
            alternative = score_retrieval(*sides, manifold, searching(metrics), ties=ties, rerank=rerank)
    except ValueError as error:
        raise UserError(f"cannot evaluate {source}: {error}") from error

    def score_form(codec: Codec) -> Scores:
        is_rescored = codec.stored.precision == "rescored"
        rescore = Rescore(codec.manifold, queries.points, items.points) if is_rescored else None
        sides = queries.side(codec), gallery and gallery.side(codec)
        return score_retrieval(*sides, codec.space, searching(metrics), ties=ties, rerank=rescore)

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
