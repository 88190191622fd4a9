"""Groups are those of scipy's complete linkage; planted groups are found, and chains are not."""

import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from dmlkit.embedding.near_pairs import complete_groups, near_pairs
from dmlkit.manifolds import Euclidean, Sphere


def scipy_groups(points: torch.Tensor, threshold: float) -> set[frozenset[int]]:
    clusters = fcluster(linkage(points.double().numpy(), "complete"), -threshold, "distance")
    rows = [frozenset((clusters == cluster).nonzero()[0].tolist()) for cluster in set(clusters.tolist())]
    return {group for group in rows if len(group) > 1}


@pytest.mark.parametrize("threshold", [-0.1, -0.4, -0.9, -2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_groups_are_those_of_scipy(threshold: float, seed: int):
    points = torch.randn(600, 3, generator=torch.Generator().manual_seed(seed))
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


def test_without_pairs_there_is_no_group():
    points = Sphere(2).from_features(torch.eye(2))
    assert complete_groups(near_pairs(Sphere(2), points, None, 0.9), 2) == []
