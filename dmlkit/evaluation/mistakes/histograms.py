"""How similar pairs of one class are, and pairs of two."""

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing

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
