"""Score embeddings of any model: a folder that ``dmlkit embed`` wrote, or bare NumPy arrays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.errors import UserError
from dmlkit.evaluation.report import Report
from dmlkit.evaluation.result import Evaluation
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.ranking.inputs import as_embeddings
from dmlkit.metrics.ranking.rankings import Ties
from dmlkit.metrics.scoring.names import metric_configs
from dmlkit.metrics.scoring.retrieval import DEFAULT_METRICS, score_retrieval

WantedMetrics = Sequence[MetricConfig | str]


def evaluate_folder(path: Path, *, metrics: WantedMetrics = (), ties: Ties = "expected") -> tuple[Report, Evaluation]:
    """Score a folder of embeddings on its own manifold, each item against all others.

    Args:
        path: a folder that ``dmlkit embed`` wrote.
        metrics: configs or names; `DEFAULT_METRICS` where there are none.
        ties: how items of the same score count.

    Raises:
        UserError: an item has no label, or there is nothing to retrieve.
    """
    folder = EmbeddingFolder(path)
    labels = folder.items["label"].to_pylist()
    if None in labels:
        raise UserError(f"{path}: {labels.count(None)} of {len(labels)} items have no label; nothing to score")
    names = folder.items["path"].to_pylist()
    queries = folder.points, np.array(labels)
    evaluation = _score(str(path), queries, None, folder.manifold(), _configs(metrics), ties, names)
    return Report.of(evaluation, str(path), "all", ties=ties), evaluation


def evaluate_arrays(
    embeddings: Path,
    labels: Path,
    *,
    gallery: tuple[Path, Path] | None = None,
    manifold: str = "sphere",
    metrics: WantedMetrics = (),
    ties: Ties = "expected",
) -> tuple[Report, Evaluation]:
    """Score ``.npy`` files: (N, D) numbers and (N,) integers or strings.

    Args:
        embeddings: of the queries.
        labels: of the queries.
        gallery: embeddings and labels to search instead of the queries themselves.
        manifold: ``sphere`` (cosine of the normalised rows) or ``euclidean`` (distance).
        metrics: configs or names; `DEFAULT_METRICS` where there are none.
        ties: how items of the same score count.

    Raises:
        UserError: a file cannot be read, or the arrays cannot be scored.
    """
    configs = _configs(metrics)
    points = _load_points(embeddings)
    space = ManifoldConfig.variants[manifold]().build(points.shape[1])
    queries = space.from_features(points), _load(labels, 1)
    items = None if gallery is None else (space.from_features(_load_points(gallery[0])), _load(gallery[1], 1))
    names = [str(row) for row in range(len(points))]
    evaluation = _score(str(embeddings), queries, items, space, configs, ties, names)
    return Report.of(evaluation, str(embeddings), "all", ties=ties), evaluation


def _configs(metrics: WantedMetrics) -> WantedMetrics:
    try:
        return metric_configs(metrics or DEFAULT_METRICS)
    except ValueError as error:
        raise UserError(f"--metric: {str(error).removeprefix('metrics: ')}") from None


def _load_points(path: Path) -> Tensor:
    try:
        return as_embeddings(_load(path, 2), str(path))
    except ValueError as error:
        raise UserError(str(error)) from None


def _load(path: Path, dimensions: int) -> Any:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a NumPy array (.npy)") from None
    except (ValueError, OSError, EOFError) as error:  # EOFError: the file is empty
        raise UserError(f"{path}: cannot read this NumPy array: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != dimensions:
        shape = array.shape if isinstance(array, np.ndarray) else "an archive"
        raise UserError(f"{path}: expected an array of {dimensions} dimensions, got {shape}")
    return array


def _score(
    source: str,
    queries: tuple[Any, Any],
    gallery: tuple[Any, Any] | None,
    manifold: Manifold,
    metrics: WantedMetrics,
    ties: Ties,
    names: list[str],
) -> Evaluation:
    items = gallery or queries
    try:
        scores = score_retrieval(*queries, *(gallery or (None, None)), manifold, metrics, ties=ties)
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
