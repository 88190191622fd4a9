"""Suspects, the most alike pairs, the worst queries and histograms are those of loops."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dmlkit.evaluation import mistakes as module
from dmlkit.evaluation.mistakes import (
    BINS,
    NEIGHBORS,
    planted_precision,
    score_histograms,
    similar_pairs_across_labels,
    suspects,
    worst_queries,
)
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import Points
from dmlkit.nearest.near_pairs import neighbors_of


def classes(spread: float, sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centers = torch.randn(len(sizes), 16, generator=generator)
    return Sphere(16).from_features(
        centers[labels] + spread * torch.randn(len(labels), 16, generator=generator)
    ), labels


@pytest.mark.parametrize("k", [1, 9])
def test_suspects_are_those_of_a_loop(k: int):
    points, labels = classes(1.5, [9, 8, 5, 3, 2, 1])
    neighbors = neighbors_of(Sphere(16), points, k).indices
    wanted: list[tuple[float, int, int, int]] = []
    for row, near in enumerate(neighbors.tolist()):
        label, of_near = int(labels[row]), [int(labels[one]) for one in near]
        others = Counter(sorted(one for one in of_near if one != label)).most_common(1)
        positives = int((labels == label).sum()) - 1
        if positives and others and others[0][1] > of_near.count(label):
            wanted.append((of_near.count(label) / min(k, positives), -others[0][1], row, others[0][0]))
    wanted.sort()
    suspected = suspects(labels, neighbors)
    assert len(wanted) > 3 and suspected.rows.tolist() == [row for _, _, row, _ in wanted]
    assert suspected.own.tolist() == pytest.approx([own for own, *_ in wanted])
    assert suspected.suggested.tolist() == [label for *_, label in wanted]
    assert suspected.agreeing.tolist() == [-agreeing for _, agreeing, _, _ in wanted]


def test_wrong_labels_are_found_and_the_expected_precision_is_told():
    points, labels = classes(0.4, [30] * 12)
    neighbors = neighbors_of(Sphere(16), points, NEIGHBORS).indices
    wrong = torch.arange(0, 360, 20)
    changed = labels.clone()
    changed[wrong] = (labels[wrong] + 5) % 12
    suspected = suspects(changed, neighbors)
    assert set(suspected.rows[:18].tolist()) == set(wrong.tolist())
    assert torch.equal(suspected.suggested[:18], labels[suspected.rows[:18]])
    assert planted_precision(labels, neighbors) >= 0.95
    random = torch.randperm(360, generator=torch.Generator().manual_seed(1))
    assert planted_precision(labels[random], neighbors) < 0.3  # neighbours that say nothing find nothing


def test_pairs_are_the_most_alike_of_all_of_two_labels():
    points = Sphere(5).from_features(torch.randn(80, 5, generator=torch.Generator().manual_seed(0)))
    labels = torch.arange(80) % 9
    similarity = Sphere(5).paired_similarity(points.double()[:, None], points.double())
    pairs = [(float(similarity[i, j]), i, j) for i in range(80) for j in range(i + 1, 80) if labels[i] != labels[j]]
    wanted = [(i, j) for _, i, j in sorted(pairs, reverse=True)[:12]]
    neighbors = neighbors_of(Sphere(5), points, 20)
    first, second, _ = similar_pairs_across_labels(labels, neighbors, 12)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == wanted
    assert [len(column) for column in similar_pairs_across_labels(labels * 0, neighbors, 12)] == [0, 0, 0]


def test_the_worst_queries_are_few_of_a_class():
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(4, (60,), generator=generator).double() / 4
    labels, similarities = torch.arange(60) % 5, torch.rand(60, generator=generator)
    nearest_labels = torch.randint(5, (60,), generator=generator)
    worst = worst_queries(values, labels, nearest_labels, similarities, 7)
    is_right, scores = (labels == nearest_labels).tolist(), similarities.tolist()
    order = sorted(range(60), key=lambda row: (float(values[row]), is_right[row], -scores[row]))
    kept: list[int] = []
    for row in order:
        if sum(int(labels[one] == labels[row]) for one in kept) < 2 and len(kept) < 7:
            kept.append(row)
    assert worst.tolist() == kept


def some(manifold: Manifold, count: int = 150) -> Points:
    points = manifold.from_features(torch.randn(count, 4, generator=torch.Generator().manual_seed(0)))
    return Points(points, torch.arange(count) % 7, manifold)


@pytest.mark.parametrize("groups", [None, torch.arange(150) // 14], ids=["alone", "groups"])
@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(4)], ids=["cosine", "distance"])
def test_counts_are_those_of_numpy(manifold: Manifold, groups: torch.Tensor | None):
    points = replace(some(manifold), groups=groups)
    found = score_histograms(points)
    scores = (
        manifold.paired_similarity(points.embeddings.double()[:, None], points.embeddings.double()).float().double()
    )
    first, second = torch.triu_indices(150, 150, 1)
    if groups is not None:
        first, second = (side[groups[first] != groups[second]] for side in (first, second))
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
