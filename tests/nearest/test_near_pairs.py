"""Near pairs, groups and neighbors against a comparison of every two, and groups against scipy's complete linkage."""

import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse.csgraph import connected_components

from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.nearest import near_pairs as module
from dmlkit.nearest.near_pairs import complete_groups, connected_graph, near_pairs, neighbors_of
from tests.conftest import refuses

SPACES = {
    "cosine": (Sphere(6), 0.6),
    "dot": (Euclidean(6, similarity="dot"), 3.0),
    "distance": (Euclidean(6), -1.6),
    "squared": (Euclidean(6, similarity="negative_squared_distance"), -2.0),
    "ball": (Poincare(6), -2.0),
    "sheet": (Lorentz(6, curvature=-0.5), -2.0),
}


def brute(manifold: Manifold, points: torch.Tensor, others: torch.Tensor, threshold: float) -> set[tuple[int, int]]:
    exact = manifold.paired_similarity(points.double()[:, None], others.double())
    return {(int(row), int(column)) for row, column in (exact >= threshold).nonzero()}


@pytest.mark.heavy
@pytest.mark.parametrize("space", SPACES)
def test_every_pair_of_2_000_is_found_block_by_block(space: str, monkeypatch: pytest.MonkeyPatch):
    manifold, threshold = SPACES[space]
    points = manifold.from_features(torch.randn(2000, 6, generator=torch.Generator().manual_seed(3)))
    points[700] = points[3]  # equal ones
    wanted = {pair for pair in brute(manifold, points, points, threshold) if pair[0] < pair[1]}
    assert (3, 700) in wanted and 100 < len(wanted) < 500_000
    monkeypatch.setattr(module, "BLOCK_ROWS", 300)
    found = near_pairs(manifold, points, None, threshold)
    pairs = list(zip(found.first.tolist(), found.second.tolist(), strict=True))
    assert pairs == sorted(wanted)
    exact = manifold.paired_similarity(points[found.first].double(), points[found.second].double())
    assert torch.equal(found.similarities, exact)
    between = near_pairs(manifold, points[:400], points[400:1300], threshold)
    pairs = list(zip(between.first.tolist(), between.second.tolist(), strict=True))
    assert pairs == sorted(brute(manifold, points[:400], points[400:1300], threshold))


def scipy_groups(points: torch.Tensor, threshold: float) -> set[frozenset[int]]:
    clusters = fcluster(linkage(points.double().numpy(), "complete"), -threshold, "distance")
    rows = [frozenset((clusters == cluster).nonzero()[0].tolist()) for cluster in set(clusters.tolist())]
    return {group for group in rows if len(group) > 1}


@pytest.mark.parametrize("threshold", [-1e-9, -0.1, -0.4, -0.9, -2.0])  # the first has no pairs
def test_groups_are_those_of_scipy(threshold: float):
    points = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    groups = complete_groups(near_pairs(Euclidean(3), points, None, threshold), len(points))
    assert {frozenset(group.tolist()) for group in groups} == scipy_groups(points, threshold)
    assert [int(group[0]) for group in groups] == sorted(int(group[0]) for group in groups)


def test_planted_duplicates_are_found_and_chains_are_cut():
    generator = torch.Generator().manual_seed(0)
    sphere = Sphere(32)
    apart = sphere.from_features(torch.randn(200, 32, generator=generator))
    copies = sphere.from_features(apart[:20].repeat_interleave(3, 0) + 0.005 * torch.randn(60, 32, generator=generator))
    turn = torch.arange(12) * 0.25  # cosine 0.969 from one to the next, 0.878 to the one after it
    chain = torch.zeros(12, 32)
    chain[:, 0], chain[:, 1] = turn.cos(), turn.sin()
    points = torch.cat([apart, copies, chain])
    groups = complete_groups(near_pairs(sphere, points, None, 0.95), len(points))
    planted = {frozenset([row, *range(200 + 3 * row, 203 + 3 * row)]) for row in range(20)}
    found = {frozenset(group.tolist()) for group in groups}
    assert planted <= found
    of_chain = found - planted  # single linkage would give one group of 12
    assert all(len(group) == 2 and min(group) >= 260 for group in of_chain) and len(of_chain) >= 4


def test_neighbors_are_those_of_all_pairs():
    manifold = Lorentz(4)
    points = manifold.from_features(torch.randn(300, 4, generator=torch.Generator().manual_seed(0)))
    exact = manifold.paired_similarity(points.double()[:, None], points.double()).fill_diagonal_(-torch.inf)
    assert torch.equal(neighbors_of(manifold, points, 7).indices, exact.argsort(1, descending=True)[:, :7])


def test_nothing_is_its_own_neighbor_among_equals():
    points = torch.zeros(30, 2)
    assert not (neighbors_of(Euclidean(2), points, 3).indices == torch.arange(30)[:, None]).any()


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


def test_too_many_pairs_of_one_block_are_refused_before_all_are_compared(monkeypatch: pytest.MonkeyPatch):
    points, compared, compare = torch.ones(200, 2), list[int](), Euclidean.paired_similarity

    def counted(manifold: Euclidean, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        compared.append(len(x))
        return compare(manifold, x, y)

    monkeypatch.setattr(Euclidean, "paired_similarity", counted)
    monkeypatch.setattr(module, "MOST_PAIRS", 250)
    monkeypatch.setattr(module, "CHECKED", 100)
    message = "^--threshold -1: more than 250 pairs reach it; choose a higher threshold"
    refuses(message, near_pairs, Euclidean(2), points, None, -1.0)
    assert compared == [100, 100, 100]  # of 19 900
    message = "^--threshold 1: more than 250 pairs reach it"  # as it was given, not as it is compared
    refuses(message, near_pairs, Sphere(2), Sphere(2).from_features(points), None, 1.0)
