"""The Fréchet mean against a general minimizer, and in closed form."""

import pytest
import torch
from torch import Tensor

from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold, frechet_mean

SPACES: dict[str, Manifold] = {
    "ball": Poincare(3, curvature=-0.7),
    "ball to its border": Poincare(3, clip_distance=None),
    "sheet": Lorentz(3, curvature=-2.0),
    "sheet, far out": Lorentz(3, clip_distance=None),
    "arc": Sphere(3, similarity="negative_distance", metric="arc"),
    "chord": Sphere(3, similarity="negative_squared_distance"),
    "flat": Euclidean(3),
    "cosine": Sphere(3),
    "flat cosine": Euclidean(3, similarity="cosine"),
    "origin cosine": Poincare(3, similarity="origin_cosine"),
    "origin cosine of the sheet": Lorentz(3, similarity="origin_cosine"),
}


def cost(manifold: Manifold, mean: Tensor, points: Tensor) -> Tensor:
    if manifold.similarity_name.endswith("distance"):
        return manifold.paired_distance(mean, points).square().mean()
    return -manifold.paired_similarity(mean, points).mean()


@pytest.mark.parametrize("name", SPACES)
def test_no_point_is_nearer_to_all(name: str):
    manifold = SPACES[name]
    torch.manual_seed(0)
    points = manifold.from_features(1.5 * torch.randn(40, 3, dtype=torch.float64) + 1)
    features = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([features], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = cost(manifold, manifold.from_features(features), points)
        value.backward()
        return value

    search.step(closure)
    best = cost(manifold, manifold.from_features(features), points).item()
    assert cost(manifold, frechet_mean(manifold, points), points).item() == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("name", SPACES)
def test_of_one_point_it_is_that_point_and_of_two_the_middle(name: str):
    manifold = SPACES[name]
    points = manifold.from_features(torch.tensor([[0.9, 0.1, 0.2], [0.1, 0.8, -0.3]], dtype=torch.float64))
    alone = frechet_mean(manifold, points[:1])
    assert manifold.paired_similarity(alone, points[0]) >= manifold.paired_similarity(points[0], points[0]) - 1e-6
    to_both = manifold.paired_distance(frechet_mean(manifold, points), points)
    if "cosine" not in name:
        assert to_both[0].item() == pytest.approx(to_both[1].item(), abs=1e-9)
    if "cosine" not in name and name != "chord":
        assert to_both.sum().item() == pytest.approx(manifold.paired_distance(*points).item(), abs=1e-9)
