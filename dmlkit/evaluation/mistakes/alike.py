"""The most alike images that should not be, and the queries that fare worst."""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.embedding.search import Neighbors


class AlikePairs(NamedTuple):
    """Pairs of images, the most alike first."""

    first: Tensor  # (P,) int64
    second: Tensor  # (P,) int64
    similarities: Tensor  # (P,)


def alike_across_labels(labels: Tensor, neighbors: Neighbors, most: int) -> AlikePairs:
    """The most alike pairs of two labels, among the nearest of each image.

    Args:
        labels: (N,) int64.
        neighbors: of each image, (N, k).
        most: how many pairs.

    Example:
        >>> near = Neighbors(torch.tensor([[0.9], [0.9], [0.5]]), torch.tensor([[1], [0], [1]]))
        >>> [column.tolist() for column in alike_across_labels(torch.tensor([0, 1, 2]), near, 5)[:2]]
        [[0, 1], [1, 2]]
    """
    rows = torch.arange(len(labels))[:, None].expand_as(neighbors.indices)
    across = labels[neighbors.indices] != labels[:, None]
    pairs = torch.stack([rows[across], neighbors.indices[across]]).sort(dim=0).values
    similarities = neighbors.similarities[across]
    order = similarities.argsort(descending=True, stable=True)[: 4 * most]  # a pair may stand in both lists
    kept: dict[tuple[int, int], float] = {}
    for first, second, similarity in zip(*pairs[:, order].tolist(), similarities[order].tolist(), strict=True):
        kept.setdefault((first, second), similarity)
    best = list(kept.items())[:most]
    ends = torch.tensor([ends for ends, _ in best], dtype=torch.int64).reshape(-1, 2)
    return AlikePairs(ends[:, 0], ends[:, 1], torch.tensor([similarity for _, similarity in best]))


def worst_queries(values: Tensor, labels: Tensor, nearest_wrong: Tensor, most: int, *, of_a_class: int = 2) -> Tensor:
    """The queries with the least values, of equals those with the most similar wrong image; few of each class.

    Args:
        values: (Q,) of a metric.
        labels: (Q,) int64.
        nearest_wrong: (Q,) the similarity of the nearest of another label.
        most: how many.
        of_a_class: of each class at most.

    Returns:
        (W,) int64, positions in ``values``.

    Example:
        >>> values, labels = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 1])
        >>> worst_queries(values, labels, torch.tensor([0.1, 0.2, 0.9]), 2).tolist()
        [2, 1]
    """
    by_similarity = nearest_wrong.argsort(descending=True, stable=True)
    order = by_similarity[values[by_similarity].argsort(stable=True)]
    seen: Counter[int] = Counter()
    kept: list[int] = []
    for position in order.tolist():
        label = int(labels[position])
        if seen[label] < of_a_class:
            seen[label] += 1
            kept.append(position)
        if len(kept) == most:
            break
    return torch.tensor(kept, dtype=torch.int64)
