"""The Möbius-linear head against geoopt's operations, one by one, and the identity that its docs state."""

import geoopt
import pytest
import torch
from torch import Tensor

from dmlkit.heads import MobiusLinear
from dmlkit.manifolds import Poincare, Sphere

CURVATURES = (-0.1, -1.0, -4.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(curvature: float, *, clip_distance: float | None = None, bias: bool = True) -> MobiusLinear:
    torch.manual_seed(0)
    ball = Poincare(4, curvature=curvature, clip_distance=clip_distance, similarity="origin_cosine")
    head = MobiusLinear(6, ball, bias=bias).double()
    if head.bias is not None:
        with torch.no_grad():
            head.bias.copy_(0.3 * random(4, seed=3))
    return head


@pytest.mark.parametrize("curvature", CURVATURES)
def test_it_is_geoopts_exponential_map_product_and_sum(curvature: float):
    head = layer(curvature)
    ball = geoopt.PoincareBall(c=torch.tensor(-curvature, dtype=torch.float64))
    features = 0.2 * random(20, 6)
    # its tangent vectors at the origin are 2|v| long
    inside = ball.mobius_matvec(head.linear.weight, ball.expmap0(features / 2))
    expected = ball.mobius_add(inside, ball.expmap0(head.bias / 2))
    assert torch.allclose(head(features), expected, atol=1e-6)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_addition_is_geoopts(curvature: float):
    manifold = Poincare(5, curvature=curvature).double()
    # well inside the ball: a sum that is projected back from the boundary cannot be undone
    x, y = manifold.from_features(0.3 * random(30, 5)), manifold.from_features(0.3 * random(30, 5, seed=1))
    theirs = geoopt.PoincareBall(c=torch.tensor(-curvature, dtype=torch.float64)).mobius_add(x, y)
    assert torch.allclose(manifold.add(x, y), theirs, atol=1e-6)
    assert torch.allclose(manifold.add(-x, manifold.add(x, y)), y, atol=1e-6)  # left cancellation
    assert torch.allclose(manifold.add(x, torch.zeros_like(x)), x)


def test_addition_moves_all_points_by_an_isometry():
    manifold = Poincare(3).double()
    points, shift = manifold.from_features(0.5 * random(10, 3)), manifold.from_features(0.5 * random(1, 3, seed=1))
    moved = manifold.add(shift, points)
    assert torch.allclose(manifold.distance(moved, moved), manifold.distance(points, points), atol=1e-6)


def test_without_bias_its_cosine_is_the_plain_one_of_a_linear_layer():
    head, features = layer(-1.0, bias=False), random(12, 6)
    plain = torch.nn.functional.normalize(features @ head.linear.weight.T, dim=1)
    points = head(features)
    assert torch.allclose(head.manifold.similarity(points, points), plain @ plain.T, atol=1e-9)


def test_a_small_curvature_gives_the_linear_head():
    head, features = layer(-1e-6), random(12, 6)
    assert torch.allclose(
        head.manifold.to_features(head(features)), features @ head.linear.weight.T + head.bias, atol=1e-4
    )


def test_another_manifold_is_refused():
    with pytest.raises(ValueError, match="expected the Poincaré ball, got Sphere"):
        MobiusLinear(6, Sphere(4))
