"""Near pairs are those that a comparison of every two finds, on every manifold."""

import pytest
import torch

from dmlkit.embedding import near_pairs as module
from dmlkit.embedding.near_pairs import near_pairs
from dmlkit.errors import UserError
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold

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
    generator = torch.Generator().manual_seed(3)
    points = manifold.from_features(torch.randn(2000, 6, generator=generator))
    points[700] = points[3]  # equal ones
    wanted = {pair for pair in brute(manifold, points, points, threshold) if pair[0] < pair[1]}
    assert (3, 700) in wanted and 100 < len(wanted) < 500_000
    monkeypatch.setattr(module, "BLOCK_ROWS", 300)
    monkeypatch.setattr(module, "DISTANCE_ROWS", 300)
    found = near_pairs(manifold, points, None, threshold)
    pairs = list(zip(found.first.tolist(), found.second.tolist(), strict=True))
    assert pairs == sorted(wanted)
    exact = manifold.paired_similarity(points[found.first].double(), points[found.second].double())
    assert torch.equal(found.similarities, exact)
    between = near_pairs(manifold, points[:400], points[400:1300], threshold)
    pairs = list(zip(between.first.tolist(), between.second.tolist(), strict=True))
    assert pairs == sorted(brute(manifold, points[:400], points[400:1300], threshold))


def test_a_threshold_that_all_pairs_reach_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_PAIRS", 100)
    with pytest.raises(UserError, match=r"--threshold -1: more than 100 pairs reach it; choose a higher threshold"):
        near_pairs(Sphere(3), Sphere(3).from_features(torch.randn(40, 3)), None, -1.0)
