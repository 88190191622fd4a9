"""Suspects are those of a naive loop, and planted wrong labels are found."""

from collections import Counter

import pytest
import torch

from dmlkit.evaluation.mistakes import NEIGHBORS, planted_precision, suspects
from dmlkit.manifolds import Sphere
from dmlkit.nearest.near_pairs import neighbors_of


def classes(spread: float, sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centers = torch.randn(len(sizes), 16, generator=generator)
    return Sphere(16).from_features(
        centers[labels] + spread * torch.randn(len(labels), 16, generator=generator)
    ), labels


@pytest.mark.parametrize("k", [1, 4, 9])
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
    found = suspects(labels, neighbors)
    assert len(wanted) > 3 and found.rows.tolist() == [row for _, _, row, _ in wanted]
    assert found.own.tolist() == pytest.approx([own for own, *_ in wanted])
    assert found.suggested.tolist() == [label for *_, label in wanted]
    assert found.agreeing.tolist() == [-agreeing for _, agreeing, _, _ in wanted]


def test_wrong_labels_are_found_and_the_expected_precision_is_told():
    points, labels = classes(0.4, [30] * 12)
    neighbors = neighbors_of(Sphere(16), points, NEIGHBORS).indices
    wrong = torch.arange(0, 360, 20)
    changed = labels.clone()
    changed[wrong] = (labels[wrong] + 5) % 12
    found = suspects(changed, neighbors)
    assert set(found.rows[:18].tolist()) == set(wrong.tolist())
    assert torch.equal(found.suggested[:18], labels[found.rows[:18]])
    assert planted_precision(labels, neighbors) >= 0.95
    random = torch.randperm(360, generator=torch.Generator().manual_seed(1))
    assert planted_precision(labels[random], neighbors) < 0.3  # neighbours that say nothing find nothing
