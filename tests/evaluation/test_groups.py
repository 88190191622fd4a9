"""Images of a query's own group are junk: a naive double loop says the same of every query."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.evaluation.evaluate import score_dataset
from dmlkit.manifolds import Poincare, Sphere
from dmlkit.metrics import metric_configs
from dmlkit.vectors.in_memory import Embeddings

METRICS = ("recall@1", "recall@5", "map@r", "eer")


class Labelled(Dataset):
    """Labels alone."""

    def sample(self, index: int) -> Tensor:
        raise NotImplementedError


def by_hand(similarity: Tensor, labels: Tensor, groups: Tensor, query: Tensor, gallery: Tensor) -> dict[str, Any]:
    """Each query against each item that is neither itself nor of its group."""
    firsts, fives, precisions, left_out, nearest = [], [], [], 0, []
    same, different = [], []
    for one in query.nonzero()[:, 0].tolist():
        others = [other for other in gallery.nonzero()[:, 0].tolist() if other != one and groups[other] != groups[one]]
        others.sort(key=lambda other: -similarity[one, other].item())
        hits = [bool(labels[other] == labels[one]) for other in others]
        for other, hit in zip(others, hits, strict=True):
            (same if hit else different).append(similarity[one, other].item())
        total = sum(hits)
        if total == 0:
            left_out += 1
            continue
        firsts.append(hits[0])
        fives.append(any(hits[:5]))
        precisions.append(sum(sum(hits[: rank + 1]) / (rank + 1) for rank in range(total) if hits[rank]) / total)
        nearest.append(int(labels[others[0]]))
    means = {name: sum(values) / len(values) for name, values in (("recall@1", firsts), ("recall@5", fives))}
    return {**means, "map@r": sum(precisions) / len(precisions), "left_out": left_out, "nearest": nearest} | {
        "eer": equal_error(torch.tensor(same), torch.tensor(different))
    }


def equal_error(same: Tensor, different: Tensor) -> float:
    """Where the shares of wrongly accepted and wrongly refused pairs meet, between two thresholds on a line."""
    thresholds = torch.cat([same, different]).unique().flip(0)
    accepted = torch.tensor([0.0, *((different >= one).double().mean().item() for one in thresholds)])
    refused = torch.tensor([1.0, *((same < one).double().mean().item() for one in thresholds)])
    place = int((accepted >= refused).nonzero()[0])
    gap, before = accepted[place] - refused[place], refused[place - 1] - accepted[place - 1]
    share = before / (before + gap)
    return float(accepted[place - 1] + share * (accepted[place] - accepted[place - 1]))


@pytest.mark.parametrize("manifold", [Sphere(4), Poincare(4)], ids=["sphere", "ball"])
@pytest.mark.parametrize("searches", [False, True], ids=["all", "query and gallery"])
def test_a_query_never_finds_its_own_group(searches: bool, manifold: Any):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (90,), generator=generator)
    groups = labels * 100 + torch.randint(3, (90,), generator=generator)  # some cameras of a class
    groups[::5] = 7  # one of images of all classes
    groups[:12] = 10_000 + torch.arange(12)  # and images of none
    centers = torch.randn(8, 4, generator=generator)
    points = manifold.from_features(centers[labels] + torch.randn(90, 4, generator=generator))
    query = gallery = None
    if searches:
        query, gallery = (torch.rand(90, generator=generator) < share for share in (0.4, 0.8))
    data = Labelled(labels, tuple("abcdefgh"), list(map(str, range(90))), query=query, gallery=gallery, groups=groups)
    indices = torch.arange(90)[torch.arange(90) != 33]  # an image that could not be read
    embedded = Embeddings(points[indices], labels[indices], indices, [])
    found = score_dataset(embedded, data, manifold, metric_configs(METRICS))
    every = torch.ones(90, dtype=torch.bool)
    masks = [(every if mask is None else mask).clone() for mask in (query, gallery)]
    for mask in masks:
        mask[33] = False
    similarity = manifold.paired_similarity(points[:, None].double(), points.double())
    expected = by_hand(similarity, labels, groups, *masks)
    for name in METRICS:
        assert found.scores.values[name] == pytest.approx(expected[name], abs=1e-6), name
    assert found.scores.left_out == expected["left_out"] and found.nearest_labels.tolist() == expected["nearest"]
    plain = Labelled(labels, tuple("abcdefgh"), list(map(str, range(90))), query=query, gallery=gallery)
    alone = Labelled(
        labels, tuple("abcdefgh"), plain.paths, query=query, gallery=gallery, groups=torch.arange(90)
    )  # each in a group of its own: as if there were none
    values = [score_dataset(embedded, one, manifold, metric_configs(METRICS)).scores.values for one in (plain, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-12) and values[0] != found.scores.values
