"""Which classes fare worst, and with which others they are confused."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class ClassScore(NamedTuple):
    """The queries of one class: how many, and their mean of each metric."""

    label: int
    queries: int
    metrics: dict[str, float]


class Confusion(NamedTuple):
    """Queries of one class whose nearest neighbour is of another."""

    label: int
    taken_for: int
    queries: int
    share: float
    """Of the queries of ``label``."""


def class_scores(per_query: Mapping[str, Tensor], labels: Tensor, *, by: str) -> list[ClassScore]:
    """Per-class means, worst first.

    Args:
        per_query: (Q,) values by name.
        labels: (Q,) int64, of the queries.
        by: the metric to sort by; ties by label.

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
    """Pairs of classes by how many queries of the one have their nearest neighbour in the other, most first.

    Args:
        labels: (Q,) int64, of the queries.
        nearest_labels: (Q,) int64, of their nearest neighbours.

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
