"""Clipping in flat space: against the closed form, and against hyperbolic space whose curvature tends to 0."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dmlkit.losses import ProxyAnchor
from dmlkit.manifolds import Euclidean, Lorentz, Poincare
from dmlkit.manifolds.base import Manifold

RADIUS = 2.3


def features(count: int, seed: int = 0) -> Tensor:
    """Return features on both sides of the radius: lengths from 0.3 to 30."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(-0.5, 1.5, count, dtype=torch.float64)[:, None]
    return lengths * torch.nn.functional.normalize(torch.randn(count, 5, generator=generator).double(), dim=1)


def test_clipped_features_are_the_nearest_points_of_a_ball():
    x = features(12).requires_grad_()
    clipped = Euclidean(5, clip_distance=RADIUS).from_features(x)
    rows = x.detach().numpy()
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(clipped.detach().numpy(), np.where(lengths > RADIUS, RADIUS / lengths, 1) * rows)
    towards = features(12, seed=1)
    (gradient,) = torch.autograd.grad(clipped, x, towards)
    unit, back = rows / lengths, towards.numpy()
    across = RADIUS / lengths * (back - unit * (unit * back).sum(1, keepdims=True))
    np.testing.assert_allclose(gradient.numpy(), np.where(lengths > RADIUS, across, back), atol=1e-12)


def test_without_clipping_points_are_the_features():
    x = features(3).half()
    assert Euclidean(5).from_features(x) is x
    assert Euclidean.Config().build(5).clip_distance is None


@pytest.mark.parametrize("kind", [Poincare, Lorentz])
@pytest.mark.parametrize("radius", [RADIUS, None])
def test_it_is_the_limit_of_hyperbolic_space(kind: type[Poincare | Lorentz], radius: float | None):
    """Distances, the similarity of losses, and the loss with its gradient."""
    flat = Euclidean(5, clip_distance=radius)
    bent = kind(5, curvature=-1e-8, clip_distance=radius).double()
    x, proxies, labels = features(8), features(4, seed=1), torch.arange(8) % 4

    def seen(manifold: Manifold) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss = ProxyAnchor(manifold, 4).double()
        with torch.no_grad():
            loss.proxies.copy_(proxies)
        given = x.clone().requires_grad_()
        points = manifold.from_features(given)
        value = loss(points, labels)
        value.backward()
        assert given.grad is not None
        return manifold.distance(points, points), manifold.relative_similarity(points, points), value, given.grad

    for ours, theirs in zip(seen(flat), seen(bent), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_optimizers_get_the_inner_product_of_each_point():
    x, u, v = (features(4, seed=seed).view(2, 2, 5) for seed in range(3))
    geometry = Euclidean(5).geometry
    torch.testing.assert_close(geometry.inner(x, u, v), (u * v).sum(-1))


def test_proxies_are_clipped_like_features():
    plane = Euclidean.Config(clip_distance=0.5).build(5)
    proxies = plane.new_proxies(50)
    assert proxies.norm(dim=1).max() > 0.5
    assert plane.proxy_points(proxies).norm(dim=1).max() <= 0.5 + 1e-6
