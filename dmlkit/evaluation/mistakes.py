"""Mistakes: classes that look alike, overlapping similarities, suspected wrong labels."""

from collections import Counter
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.embedding.search import Neighbors
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing


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


BINS = 60
PIECE = 2**20  # scores counted at once: 16 MB beside them
MOST_IMAGES = 12_000  # whose pairs of two classes are all looked at; of more, those of a sample: 72 million


class ScoreHistograms(NamedTuple):
    """Counts of pairs by their similarity.

    Args:
        edges: (BINS + 1,) float64, ascending.
        same: (BINS,) int64, pairs of one class.
        different: (BINS,) int64, pairs of two classes.
        sampled: how many images the pairs of two classes are of.
    """

    edges: Tensor
    same: Tensor
    different: Tensor
    sampled: int


@torch.no_grad()
def score_histograms(points: Points, *, seed: int = 0) -> ScoreHistograms:
    """Count all pairs of one class, and those of two classes of at most `MOST_IMAGES` images, in equal bins.

    Raises:
        ValueError: there is no pair of one class, or none of two.
    """
    whole = Pairing.of(points)
    if whole.same == 0 or whole.different == 0:
        raise ValueError(f"{whole.same} pairs of one class and {whole.different} of two; histograms need both")
    sample = whole
    if len(points.labels) > MOST_IMAGES:
        rows = torch.randperm(len(points.labels), generator=torch.Generator().manual_seed(seed))[:MOST_IMAGES]
        labels = points.labels[rows].unique(return_inverse=True)[1]
        sample = Pairing.of(Points(points.embeddings[rows], labels, points.manifold))
    low, high, lock = torch.inf, -torch.inf, Lock()

    def widen(scores: Tensor, *_: slice) -> None:
        nonlocal low, high
        for piece in scores.flatten().split(PIECE):
            kept = piece[piece > -torch.inf]
            if len(kept):
                least, most = float(kept.min()), float(kept.max())
                with lock:
                    low, high = min(low, least), max(high, most)

    sample.each_block(widen)
    for scores in whole.same_scores():
        widen(scores)
    high = max(high, low + 1e-6 * max(1.0, abs(low)))
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    same, different = torch.zeros(BINS, dtype=torch.int64), torch.zeros(BINS, dtype=torch.int64)

    def count(scores: Tensor, into: Tensor) -> None:
        for piece in scores.flatten().split(PIECE):
            kept = piece[piece > -torch.inf].double()
            found = torch.bucketize(kept, edges[1:-1], right=True).bincount(minlength=BINS)
            with lock:
                into.add_(found)

    sample.each_block(lambda scores, _rows, _columns: count(scores, different))
    for scores in whole.same_scores():
        count(scores, same)
    return ScoreHistograms(edges, same, different, len(sample.rows))


NEIGHBORS = 20  # on glyphs and Grocery with 5 % wrong labels precision 0.99 and 0.95; of 10 nearest 0.97 and 0.90
ROWS = 4096  # whose neighbours are compared with each other at once: 2 MB
PLANTED = 0.05  # share of the labels that are made wrong to see how many are found


class Suspects(NamedTuple):
    """Images in the order of suspicion, the most suspect first.

    Args:
        rows: (S,) int64.
        own: (S,) float64, the share of the label's other images among the nearest, of as many as could be there.
        suggested: (S,) int64, the label that most of the nearest have.
        agreeing: (S,) int64, how many of the nearest have it.
    """

    rows: Tensor
    own: Tensor
    suggested: Tensor
    agreeing: Tensor


def suspects(labels: Tensor, neighbors: Tensor) -> Suspects:
    """The images whose nearest agree on another label more than on their own.

    An image is the more suspect the smaller the share of its own label among its k nearest, of the min(k, R) that could
    be there; of equals the more the nearest agree. Images without another one of their label are left out.

    Args:
        labels: (N,) int64.
        neighbors: (N, k) int64, rows of the nearest others.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 1, 1, 0])  # the last one is among those of label 1
        >>> suspects(labels, torch.tensor([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]])).rows.tolist()
        [5]
    """
    found = labels[neighbors]  # (N, k)
    positives = labels.bincount()[labels] - 1
    same = (found == labels[:, None]).sum(1)
    own = same.double() / positives.clamp(min=1, max=neighbors.shape[1])
    suggested, agreeing = _majority(found, labels)
    rows = ((agreeing > same) & (positives > 0)).nonzero()[:, 0]
    order = (own[rows] - 1e-6 * agreeing[rows]).argsort(stable=True)  # shares differ by 1 / k or more
    rows = rows[order]
    return Suspects(rows, own[rows], suggested[rows], agreeing[rows])


def planted_precision(labels: Tensor, neighbors: Tensor, *, seed: int = 0) -> float:
    """How many of the most suspect images were made wrong, where 5 % of the labels were and as many are looked at.

    What is expected of real suspects: labels that are wrong already count as false alarms here.

    Args:
        labels: (N,) int64 in 0..C-1, C at least 2.
        neighbors: see `suspects`.
        seed: of the labels that are changed.
    """
    generator = torch.Generator().manual_seed(seed)
    classes, count = int(labels.max()) + 1, max(1, round(PLANTED * len(labels)))
    rows = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[rows] = (labels[rows] + torch.randint(1, classes, (count,), generator=generator)) % classes
    found = suspects(changed, neighbors).rows[:count]
    return float(torch.isin(found, rows).double().mean()) if len(found) else 0.0


def _majority(found: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The most frequent label of each row (N, k) beside its own, the smallest of several, and how often it is there."""
    ordered = found.sort(dim=1).values
    times = torch.cat([(rows[:, :, None] == rows[:, None]).sum(2) for rows in ordered.split(ROWS)])
    times = times.masked_fill(ordered == labels[:, None], 0)
    most, place = times.max(1)
    return ordered.gather(1, place[:, None])[:, 0], most
