"""The result of an evaluation: scores with the labels and names of the queries, per class and per confused pair."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import head_of, write_table
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.ranking.codec import Codec
from dmlkit.metrics.scoring import Scores, metric_configs


class ClassScore(NamedTuple):
    """Number of queries of one class, and the mean of each metric over them."""

    label: int
    queries: int
    metrics: dict[str, float]


class Confusion(NamedTuple):
    """Queries of one class whose nearest neighbor is of another class."""

    label: int
    taken_for: int
    queries: int
    share: float
    """Share of the queries of ``label``."""


def class_scores(per_query: Mapping[str, Tensor], labels: Tensor, *, by: str) -> list[ClassScore]:
    """Compute the mean of each metric per class, worst first.

    Args:
        per_query: (Q,) values by name.
        labels: (Q,) int64, labels of the queries.
        by: the metric to sort by; equal values are sorted by label.

    Example:
        >>> values = {"recall@1": torch.tensor([1.0, 0.0, 1.0])}
        >>> class_scores(values, torch.tensor([4, 2, 4]), by="recall@1")[0]
        ClassScore(label=2, queries=1, metrics={'recall@1': 0.0})
    """
    classes, index, counts = labels.unique(return_inverse=True, return_counts=True)
    columns: dict[str, list[float]] = {
        name: (torch.zeros(len(classes), dtype=torch.float64).index_add_(0, index, value.double()) / counts).tolist()
        for name, value in per_query.items()
    }
    scores = [
        ClassScore(label, count, {name: column[i] for name, column in columns.items()})
        for i, (label, count) in enumerate(zip(classes.tolist(), counts.tolist(), strict=True))
    ]
    return sorted(scores, key=lambda score: (score.metrics[by], score.label))


def confusions(labels: Tensor, nearest_labels: Tensor) -> list[Confusion]:
    """Count for each pair of classes how many queries of one have their nearest neighbor in the other, most first.

    Args:
        labels: (Q,) int64, labels of the queries.
        nearest_labels: (Q,) int64, labels of their nearest neighbors.

    Example:
        >>> confusions(torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1]))
        [Confusion(label=0, taken_for=1, queries=1, share=0.5)]
    """
    wrong = labels != nearest_labels
    pairs, counts = torch.stack([labels[wrong], nearest_labels[wrong]]).unique(dim=1, return_counts=True)
    sizes = dict(zip(*(column.tolist() for column in labels.unique(return_counts=True)), strict=True))
    found = [
        Confusion(label, other, count, count / sizes[label])
        for (label, other), count in zip(pairs.T.tolist(), counts.tolist(), strict=True)
    ]
    return sorted(found, key=lambda pair: (-pair.queries, -pair.share, pair.label, pair.taken_for))


def searching(metrics: Sequence[MetricConfig | str]) -> list[MetricConfig]:
    """Return the metrics that rank a gallery.

    Raises:
        ValueError: there is none.
    """
    found = [config for config in metric_configs(metrics) if config.searches]
    if not found:
        raise ValueError("none of the metrics ranks a gallery; add one with --metric, e.g. map@r")
    return found


@dataclass(frozen=True)
class Rescoring:
    """All that it takes to score the queries again with another stored form of the embeddings.

    Args:
        points: (N, D) embeddings of queries and gallery.
        manifold: their geometry.
        score: scores decoded points in the place of ``points``.
        ranges: returns the points that give the ranges of int8.
        ranges_of: these points, in words.
    """

    points: Tensor
    manifold: Manifold
    score: Callable[[Codec], Scores]
    ranges: Callable[[], Tensor]
    ranges_of: str = "the evaluated embeddings themselves"


CLASS = "class"  # name of the array of classes among those of metrics: no metric has that name


@dataclass(frozen=True)
class Evaluation:
    """Scores with the labels and names of the queries."""

    scores: Scores  # of Q queries
    labels: Tensor  # (Q,) int64, indices of ``class_names``
    nearest_labels: Tensor  # (Q,) int64, labels of their nearest neighbors; their own if they share one of several
    class_names: Sequence[str]  # C names
    images: Sequence[str]  # Q unique names of the queries
    classes: int  # number of classes, including those of queries without a positive
    faults: list[str]  # one message per image that could not be read
    alternative: Scores | None = None  # of the same queries, re-ranked or with mirror images
    rescoring: Rescoring | None = None  # None where only the scores are known

    def class_scores(self) -> list[ClassScore]:
        """Compute the metrics of every class, sorted by the last metric, worst first."""
        return class_scores(self.scores.per_query, self.labels, by=list(self.scores.per_query)[-1])

    def fingerprint(self) -> str:
        """Return a hash of the queries: two models can be compared per query if their hashes are equal."""
        labels = [self.class_names[label] for label in self.labels.tolist()]
        lines = (f"{image}\0{label}\n" for image, label in zip(self.images, labels, strict=True))
        return sha256("".join(lines).encode()).hexdigest()

    def save_per_query(self, path: Path) -> None:
        """Write the values of every query, one array per metric, and its class as `CLASS`."""
        with atomic_write(path) as partial, partial.open("wb") as file:
            columns = {**self.scores.per_query, CLASS: self.labels}
            arrays: dict[str, Any] = {name: value.numpy() for name, value in columns.items()}
            np.savez_compressed(file, **arrays)

    def save_classes(self, path: Path) -> None:
        """Write a CSV table of every class, worst first.

        Raises:
            UserError: no metric has a value per query, or the folder is missing.
        """
        if not self.scores.per_query:
            raise UserError(
                "--per-class: none of the metrics has a value per query; add one with --metric, e.g. recall@1"
            )
        if not path.parent.is_dir():
            raise UserError(f"--per-class {path}: no such folder {path.parent}; create it first")
        rows = ((self.class_names[one.label], one.queries, *one.metrics.values()) for one in self.class_scores())
        write_table(path, ["class", "queries", *self.scores.per_query], rows)


def is_class_table(path: Path) -> bool:
    """Return whether `Evaluation.save_classes` wrote a file: its header has exactly our columns and metrics."""
    names = head_of(path).decode("utf-8", "replace").partition("\n")[0].strip().split(",")
    try:
        return names[:2] == ["class", "queries"] and bool(metric_configs(names[2:]))
    except ValueError:
        return False
