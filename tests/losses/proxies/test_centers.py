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
def test_pooled_similarities_and_their_gradient_are_those_of_the_formula(kind: CenterPooling, centers: int):
    torch.manual_seed(0)
    each = torch.randn(4, centers, 3, dtype=torch.float64).mul(2).round().div(2).requires_grad_()  # some are equal
    weights, ties = each.detach().div(0.3).exp(), (each.detach() == each.detach().amax(1, keepdim=True)).double()
    weights, ties = weights / weights.sum(1, keepdim=True), ties / ties.sum(1, keepdim=True)
    mean = (weights * each.detach()).sum(1)
    value, slope = {
        "softmax": (mean, weights * (1 + (each.detach() - mean[:, None]) / 0.3)),
        "max": (each.detach().amax(1), ties),
        "mean": (each.detach().mean(1), torch.full_like(each, 1 / centers)),
    }[kind]
    gradient = torch.randn_like(value)
    pooled = pool_centers(kind, 0.3)(each)
    torch.testing.assert_close(pooled.detach(), value, rtol=1e-12, atol=1e-15)
    found = torch.autograd.grad(pooled, each, gradient)[0]
    torch.testing.assert_close(found, gradient[:, None] * slope, rtol=1e-12, atol=1e-15)
