"""Mistakes of a model and of labels: similar images of different classes, worst queries, overlapping similarities of
pairs of the same class and of different classes, and labels that are probably wrong."""

from collections import Counter
from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.datasets.glyphs import wrong_labels
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing
from dmlkit.nearest.search import Neighbors


def similar_pairs_across_labels(labels: Tensor, neighbors: Neighbors, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the most similar pairs of images of different labels (N,), among the nearest neighbors (N, k) of each image.

    They are rows (P,) of the first and of the second images, and similarities (P,), descending.
    """
    rows = torch.arange(len(labels))[:, None].expand_as(neighbors.indices)
    across = labels[neighbors.indices] != labels[:, None]
    pairs = torch.stack([rows[across], neighbors.indices[across]]).sort(dim=0).values
    similarities = neighbors.similarities[across]
    order = similarities.argsort(descending=True, stable=True)[: 4 * most]  # a pair may be in the lists of both images
    similarity_of: dict[tuple[int, int], float] = {}
    for first, second, similarity in zip(*pairs[:, order].tolist(), similarities[order].tolist(), strict=True):
        similarity_of.setdefault((first, second), similarity)
    best = list(similarity_of.items())[:most]
    ends = torch.tensor([ends for ends, _ in best], dtype=torch.int64).reshape(-1, 2)
    return ends[:, 0], ends[:, 1], torch.tensor([similarity for _, similarity in best])


PER_CLASS = 2  # worst queries of one class at the most


def worst_queries(values: Tensor, labels: Tensor, nearest_labels: Tensor, similarities: Tensor, most: int) -> Tensor:
    """Find the positions (W,) of the lowest values (Q,), at most `PER_CLASS` of a class.

    Among equal values those whose nearest image has another label are worst, the most similar first.

    Args:
        nearest_labels, similarities: label and similarity of the nearest image of each query, (Q,).
    """
    by_similarity = similarities.masked_fill(labels == nearest_labels, -torch.inf).argsort(descending=True, stable=True)
    order = by_similarity[values[by_similarity].argsort(stable=True)]
    seen: Counter[int] = Counter()
    worst: list[int] = []
    for position in order.tolist():
        label = int(labels[position])
        if seen[label] < PER_CLASS:
            seen[label] += 1
            worst.append(position)
        if len(worst) == most:
            break
    return torch.tensor(worst, dtype=torch.int64)


BINS = 60
PIECE = 2**20  # scores counted at once: 16 MB in addition to the scores
MOST_IMAGES = 12_000  # with more images, pairs of different classes are counted in a sample of so many: 72 million


class ScoreHistograms(NamedTuple):
    """Histograms of the similarities of pairs."""

    edges: Tensor  # (BINS + 1,) float64, ascending
    same: Tensor  # (BINS,) int64, number of pairs of the same class
    different: Tensor  # (BINS,) int64, number of pairs of different classes
    sampled: int  # number of images whose pairs of different classes were counted


@torch.no_grad()
def score_histograms(points: Points) -> ScoreHistograms:
    """Count all pairs of one class, and pairs of different classes of at most `MOST_IMAGES` images, in equal bins."""
    whole = Pairing.of(points)
    if whole.same == 0 or whole.different == 0:
        raise ValueError(
            f"{whole.same} pairs of one class and {whole.different} of different classes; histograms need both"
        )
    sample = whole
    if len(points.labels) > MOST_IMAGES:
        rows = torch.randperm(len(points.labels), generator=torch.Generator().manual_seed(0))[:MOST_IMAGES]
        labels = points.labels[rows].unique(return_inverse=True)[1]
        groups = None if points.groups is None else points.groups[rows]
        sample = Pairing.of(Points(points.embeddings[rows], labels, points.manifold, groups=groups))
    extremes = list[float]()  # of each piece; appending needs no lock

    def widen(scores: Tensor, *_: slice) -> None:
        for piece in _finite_pieces(scores):
            extremes.extend([float(piece.min()), float(piece.max())])

    sample.each_block(widen)
    for scores in whole.same_scores():
        widen(scores)
    low = min(extremes)
    high = max(max(extremes), low + 1e-6 * max(1.0, abs(low)))
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    same, different, lock = torch.zeros(BINS, dtype=torch.int64), torch.zeros(BINS, dtype=torch.int64), Lock()

    def count(scores: Tensor, into: Tensor) -> None:
        for piece in _finite_pieces(scores):
            counts = torch.bucketize(piece.double(), edges[1:-1], right=True).bincount(minlength=BINS)
            with lock:
                into.add_(counts)

    sample.each_block(lambda scores, _rows, _columns: count(scores, different))
    for scores in whole.same_scores():
        count(scores, same)
    return ScoreHistograms(edges, same, different, len(sample.rows))


def _finite_pieces(scores: Tensor) -> Iterator[Tensor]:
    """Yield the scores of pairs, those of no pair left out, in pieces that are not empty."""
    pieces = (piece[piece > -torch.inf] for piece in scores.flatten().split(PIECE))
    yield from (piece for piece in pieces if len(piece))


NEIGHBORS = 20  # with 5 % wrong labels the precision on glyphs and Grocery is 0.99 and 0.95; with 10, 0.97 and 0.90
ROWS = 4096  # rows whose neighbors are compared with each other at once: 2 MB
PLANTED = 0.05  # share of the labels that are changed to measure how many are found


class Suspects(NamedTuple):
    """Images whose labels are probably wrong, the most suspect first."""

    rows: Tensor  # (S,) int64, of the images
    own: Tensor  # (S,) float64, the share of neighbors with the image's own label, out of the possible number
    suggested: Tensor  # (S,) int64, the label that most neighbors have
    agreeing: Tensor  # (S,) int64, number of neighbors with the suggested label


def suspects(labels: Tensor, neighbors: Tensor) -> Suspects:
    """Find the images that have more of their nearest ones (N, k) with another label than with their own, of (N,).

    They are sorted by the number of neighbors with their own label / min(k, R), the possible number, ascending; equal
    values by the number of neighbors that agree on the other label, descending. Images that are alone in their class
    are left out.
    """
    near_labels = labels[neighbors]  # (N, k)
    positives = labels.bincount()[labels] - 1
    same = (near_labels == labels[:, None]).sum(1)
    own_share = same.double() / positives.clamp(min=1, max=neighbors.shape[1])
    ordered = near_labels.sort(dim=1).values
    times = torch.cat([(rows[:, :, None] == rows[:, None]).sum(2) for rows in ordered.split(ROWS)])
    agreeing, column = times.masked_fill(ordered == labels[:, None], 0).max(1)
    suggested = ordered.gather(1, column[:, None])[:, 0]  # the smallest of several labels
    rows = ((agreeing > same) & (positives > 0)).nonzero()[:, 0]
    order = (own_share[rows] - 1e-6 * agreeing[rows]).argsort(stable=True)  # shares differ by 1 / k or more
    rows = rows[order]
    return Suspects(rows, own_share[rows], suggested[rows], agreeing[rows])


def planted_precision(labels: Tensor, neighbors: Tensor) -> float:
    """Measure the precision of `suspects` after changing 5 % of the labels, among as many of the most suspect images.

    The precision for real errors may be higher, because labels that are already wrong count as false alarms here.
    """
    changed = wrong_labels(labels, max(PLANTED, 1 / len(labels)), seed=0)
    is_changed = changed != labels
    suspected = suspects(changed, neighbors).rows[: int(is_changed.sum())]
    return float(is_changed[suspected].double().mean()) if len(suspected) else 0.0
