"""Neighbours are those of a full matrix, and their graph hangs together."""

import pytest
import torch
from scipy.sparse.csgraph import connected_components

from dmlkit.embedding.groups.neighbors import connected_graph, neighbors_of
from dmlkit.manifolds import Euclidean, Lorentz, Sphere
from dmlkit.manifolds.base import Manifold


@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(4), Lorentz(4)], ids=lambda one: type(one).__name__)
def test_neighbors_are_those_of_all_pairs(manifold: Manifold):
    points = manifold.from_features(torch.randn(300, 4, generator=torch.Generator().manual_seed(0)))
    exact = manifold.paired_similarity(points.double()[:, None], points.double()).fill_diagonal_(-torch.inf)
    found = neighbors_of(manifold, points, 7)
    assert torch.equal(found.indices, exact.argsort(1, descending=True)[:, :7])


def test_nothing_is_its_own_neighbor_among_equals():
    points = torch.zeros(30, 2)
    found = neighbors_of(Euclidean(2), points, 3)
    assert not (found.indices == torch.arange(30)[:, None]).any()


@pytest.mark.parametrize("manifold", [Sphere(3), Euclidean(3), Euclidean(3, similarity="dot")], ids=["cos", "d", "dot"])
def test_parts_that_nothing_joins_are_joined_by_short_links(manifold: Manifold):
    generator = torch.Generator().manual_seed(0)
    parts = [
        manifold.from_features(4 * torch.eye(3)[axis] + 0.1 * torch.randn(9, 3, generator=generator))
        for axis in range(3)
    ]
    points = torch.cat(parts)
    neighbors = neighbors_of(manifold, points, 4)
    graph, origin = connected_graph(manifold, points, neighbors)
    assert connected_components(graph, directed=False)[0] == 1
    assert (graph != graph.T).nnz == 0 and graph.data.min() > 0
    row, column = 0, int(neighbors.indices[0, 0])
    similarity = float(manifold.paired_similarity(points[row].double(), points[column].double()))
    assert graph[row, column] == pytest.approx(origin - similarity, abs=1e-6)
