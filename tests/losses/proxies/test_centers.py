import pytest
import torch

from dmlkit.losses.proxies.centers import CenterPooling, distances_within, pool_centers
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


@pytest.mark.parametrize("centers", [1, 2, 5])
@pytest.mark.parametrize("kind", ["softmax", "max", "mean"])
def test_the_way_back_is_that_of_autograd(kind: CenterPooling, centers: int):
    torch.manual_seed(0)
    each = torch.randn(4, centers, 3, dtype=torch.float64).mul(2).round().div(2).requires_grad_()  # some are equal
    value = {
        "softmax": lambda: ((each / 0.3).softmax(1) * each).sum(1),
        "max": lambda: each.amax(1),
        "mean": lambda: each.mean(1),
    }[kind]()
    gradient = torch.randn_like(value)
    pooled = pool_centers(kind, 0.3)(each.detach())
    torch.testing.assert_close(pooled.similarity, value.detach(), rtol=1e-12, atol=1e-15)
    expected = torch.autograd.grad(value, each, gradient)[0]
    torch.testing.assert_close(pooled.pull_back(gradient), expected, rtol=1e-12, atol=1e-15)
