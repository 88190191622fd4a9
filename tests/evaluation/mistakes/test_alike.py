"""The most alike pairs of two labels and the worst queries are those of a loop."""

import torch

from dmlkit.evaluation.mistakes import similar_pairs_across_labels, worst_queries
from dmlkit.manifolds import Sphere
from dmlkit.nearest.near_pairs import neighbors_of


def test_pairs_are_the_most_alike_of_all_of_two_labels():
    points = Sphere(5).from_features(torch.randn(80, 5, generator=torch.Generator().manual_seed(0)))
    labels = torch.arange(80) % 9
    similarity = Sphere(5).paired_similarity(points.double()[:, None], points.double())
    pairs = [(float(similarity[i, j]), i, j) for i in range(80) for j in range(i + 1, 80) if labels[i] != labels[j]]
    wanted = [(i, j) for _, i, j in sorted(pairs, reverse=True)[:12]]
    first, second, _ = similar_pairs_across_labels(labels, neighbors_of(Sphere(5), points, 20), 12)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == wanted


def test_one_label_has_no_such_pair():
    points = Sphere(2).from_features(torch.eye(2).repeat(3, 1))
    found = similar_pairs_across_labels(torch.zeros(6, dtype=torch.int64), neighbors_of(Sphere(2), points, 3), 4)
    assert [len(column) for column in found] == [0, 0, 0]


def test_the_worst_queries_are_few_of_a_class():
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(4, (60,), generator=generator).double() / 4
    labels, wrong = torch.arange(60) % 5, torch.rand(60, generator=generator)
    found = worst_queries(values, labels, wrong, 7)
    order = sorted(range(60), key=lambda row: (float(values[row]), -float(wrong[row])))
    kept: list[int] = []
    for row in order:
        if sum(int(labels[one] == labels[row]) for one in kept) < 2 and len(kept) < 7:
            kept.append(row)
    assert found.tolist() == kept
