import pytest
import torch

from dmlkit.losses.proxies.centers import distances_within
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold

MANIFOLDS = {
    "sphere": Sphere(5),
    "arc": Sphere(5, metric="arc"),
    "euclidean": Euclidean(5),
    "poincare": Poincare(5),
    "lorentz": Lorentz(5),
}


@pytest.mark.parametrize("per_group", [2, 3, 70])
@pytest.mark.parametrize("manifold", MANIFOLDS.values(), ids=MANIFOLDS)
def test_distances_within_groups_are_those_of_pairs(manifold: Manifold, per_group: int):
    torch.manual_seed(0)
    points = manifold.from_features(torch.randn(50, per_group, 5, dtype=torch.float64) / 3)
    expected = manifold.paired_distance(points[:, :, None], points[:, None])
    torch.testing.assert_close(distances_within(manifold.double(), points), expected, rtol=1e-6, atol=1e-7)
