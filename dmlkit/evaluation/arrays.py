"""Evaluation of embeddings of any model: a folder that ``dmlkit embed`` wrote, or NumPy arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.errors import UserError
from dmlkit.evaluation.report import Report
from dmlkit.evaluation.result import Evaluation
from dmlkit.files.arrays import Values, read_array
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.ranking.rankings import Ties, as_embeddings, as_points
from dmlkit.metrics.scoring import DEFAULT_METRICS, metric_configs, score_retrieval

WantedMetrics = Sequence[MetricConfig | str]


def evaluate_folder(
    path: Path, *, metrics: WantedMetrics = (), ties: Ties = "expected", bar: Bar = no_bar
) -> tuple[Report, Evaluation]:
    """Score a folder of embeddings on its own manifold; each item is searched among all others.

    Args:
        path: a folder that ``dmlkit embed`` wrote.
        metrics: configs or names; `DEFAULT_METRICS` if there are none.
        ties: how items with the same score are counted.
        bar: shows the progress.

    Raises:
        UserError: an item has no label, or there is nothing to retrieve.
    """
    folder = EmbeddingFolder(path)
    folder.check_points()
    labels = folder.items["label"].to_pylist()
    if None in labels:
        raise UserError(
            f"{path}: {labels.count(None)} of {len(labels)} items have no label; evaluation needs one for every item"
        )
    names = folder.items["path"].to_pylist()
    queries = folder.read(), np.array(labels)
    evaluation = _score(str(path), queries, None, folder.manifold(), _configs(metrics), ties, names, bar)
    return Report.of(evaluation, str(path), "all", ties=ties), evaluation


def evaluate_arrays(
    embeddings: Path,
    labels: Path,
    *,
    gallery: tuple[Path, Path] | None = None,
    manifold: str = "sphere",
    metrics: WantedMetrics = (),
    ties: Ties = "expected",
    bar: Bar = no_bar,
) -> tuple[Report, Evaluation]:
    """Score ``.npy`` files of embeddings, (N, D) numbers, and labels, (N,) integers or strings.

    Args:
        embeddings: file of the queries' embeddings.
        labels: file of the queries' labels.
        gallery: files of the embeddings and labels to search instead of the queries themselves.
        manifold: ``sphere`` (cosine of the normalized rows) or ``euclidean`` (distance).
        metrics: configs or names; `DEFAULT_METRICS` if there are none.
        ties: how items with the same score are counted.
        bar: shows the progress.

    Raises:
        UserError: a file cannot be read, gallery and queries are equal, or the arrays cannot be scored.
    """
    configs = _configs(metrics)
    features = _features(embeddings)
    space = ManifoldConfig.variants[manifold]().build(features.shape[1])
    items = None
    if gallery is not None:
        others = _features(gallery[0])
        if torch.equal(features, others):
            raise UserError(
                f"--gallery {gallery[0]}: has the same rows as --embeddings, so that every query would find itself; "
                "omit --gallery to search each query among all others"
            )
        items = _points(others, space, gallery[0]), _labels(gallery[1])
    queries = _points(features, space, embeddings), _labels(labels)
    names = [str(row) for row in range(len(features))]
    evaluation = _score(str(embeddings), queries, items, space, configs, ties, names, bar)
    return Report.of(evaluation, str(embeddings), "all", ties=ties), evaluation


def _configs(metrics: WantedMetrics) -> WantedMetrics:
    try:
        return metric_configs(metrics or DEFAULT_METRICS)
    except ValueError as error:
        raise UserError(f"--metric: {str(error).removeprefix('metrics: ')}") from None


def _features(path: Path) -> Tensor:
    try:
        return as_embeddings(_array(path, 2), str(path))
    except ValueError as error:
        raise UserError(str(error)) from None


def _points(features: Tensor, space: Manifold, path: Path) -> Tensor:
    try:
        return as_points(features, space, str(path))
    except ValueError as error:
        raise UserError(str(error)) from None


def _labels(path: Path) -> Values:
    """Read integers or text; bytes must be UTF-8, and text must not have unpaired surrogates."""
    labels = _array(path, 1)
    try:
        if labels.dtype.kind == "S":
            labels = np.strings.decode(labels, "utf-8")
        if labels.dtype.kind == "U":
            "".join(np.unique(labels).tolist()).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{path}: labels: expected text in UTF-8, got {error.object!r:.60}") from None
    return labels


def _array(path: Path, dimensions: int) -> Values:
    array = read_array(path)
    if array.ndim != dimensions:
        raise UserError(f"{path}: expected an array of {dimensions} dimensions, got {array.shape}")
    return array


def _score(
    source: str,
    queries: tuple[Any, Any],
    gallery: tuple[Any, Any] | None,
    manifold: Manifold,
    metrics: WantedMetrics,
    ties: Ties,
    names: list[str],
    bar: Bar,
) -> Evaluation:
    items = gallery or queries
    try:
        with bar("ranking", len(queries[1])) as advance:
            others = gallery or (None, None)
            scores = score_retrieval(*queries, *others, manifold, metrics, ties=ties, advance=advance)
    except ValueError as error:
        raise UserError(f"cannot evaluate {source}: {error}") from error
    classes, index = np.unique(np.concatenate([queries[1], items[1]]), return_inverse=True)
    labels, item_labels = torch.from_numpy(index[: len(queries[1])]), torch.from_numpy(index[len(queries[1]) :])
    return Evaluation(
        scores=scores,
        labels=labels[scores.queries],
        nearest_labels=item_labels[scores.nearest],
        class_names=classes.astype(str).tolist(),
        images=[names[int(row)] for row in scores.queries],
        classes=len(labels.unique()),
        faults=[],
    )
