"""Histograms count what numpy counts over all pairs."""

import numpy as np
import pytest
import torch

from dmlkit.evaluation import mistakes as module
from dmlkit.evaluation.mistakes import BINS, score_histograms
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import Points


def some(manifold: Manifold, count: int = 150) -> Points:
    generator = torch.Generator().manual_seed(0)
    points = manifold.from_features(torch.randn(count, 4, generator=generator))
    return Points(points, torch.arange(count) % 7, manifold)


@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(4)], ids=["cosine", "distance"])
def test_counts_are_those_of_numpy(manifold: Manifold):
    points = some(manifold)
    found = score_histograms(points)
    scores = (
        manifold.paired_similarity(points.embeddings.double()[:, None], points.embeddings.double()).float().double()
    )
    first, second = torch.triu_indices(150, 150, 1)
    is_same = points.labels[first] == points.labels[second]
    pairs = scores[first, second]
    for counts, kept in ((found.same, is_same), (found.different, ~is_same)):
        assert int(counts.sum()) == int(kept.sum())
        wanted, _ = np.histogram(pairs[kept].numpy(), found.edges.numpy())
        assert int((counts - torch.from_numpy(wanted)).abs().sum()) <= 4  # rounding at an edge
    assert len(found.edges) == BINS + 1 and found.sampled == 150


def test_of_many_images_a_sample_stands_for_the_pairs_of_two_classes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_IMAGES", 60)
    found, whole = score_histograms(some(Sphere(4), 400)), some(Sphere(4), 400)
    assert found.sampled == 60 and int(found.same.sum()) == sum(
        size * (size - 1) // 2 for size in whole.labels.bincount().tolist()
    )
    assert 0 < int(found.different.sum()) <= 60 * 59 // 2


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]])
def test_pairs_of_one_kind_alone_are_refused(labels: list[int]):
    with pytest.raises(ValueError, match="histograms need both"):
        score_histograms(Points(torch.eye(3), torch.tensor(labels), Sphere(3)))
