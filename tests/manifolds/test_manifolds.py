"""Manifolds: what they share, flat space, the sphere, products of points, and means."""

from math import pi, sqrt
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import normalize

from dmlkit.losses import ProxyAnchor, Triplet
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Product, Sphere
from dmlkit.manifolds.base import UNRELATED_RADIUS, Manifold, frechet_mean
from dmlkit.manifolds.hyperbolic import STRONGEST_CURVATURE
from dmlkit.manifolds.products import Cosines, inner_products, unit_vectors


def at_right_angles(manifold: Manifold, features_length: float) -> Tensor:
    points = manifold.from_features(features_length * torch.eye(3, manifold.dim, dtype=torch.float64))
    return manifold.paired_distance(points[0], points[1])


@pytest.mark.parametrize("curvature", [-1e-8, -0.1, -1.0, -4.0])
@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_in_hyperbolic_space_it_is_the_side_of_a_right_angled_triangle(kind, curvature):
    manifold = kind(3, curvature=curvature, clip_distance=None).double()
    unrelated = torch.as_tensor(manifold.unrelated_distance())
    torch.testing.assert_close(unrelated, at_right_angles(manifold, UNRELATED_RADIUS), rtol=1e-6, atol=0)
    with mpmath.workdps(60):
        root = mpmath.sqrt(-mpmath.mpf(manifold.curvature.item()))
        exact = float(mpmath.acosh(mpmath.cosh(root * UNRELATED_RADIUS) ** 2) / root)
    assert unrelated.item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_up_to_the_strongest_curvature_two_points_of_float32_are_as_far_apart(kind: type[Poincare | Lorentz]):
    """Against the distance in 60 digits, and against points as far out as float32 goes."""
    far = 1e4 * torch.eye(2, 3)
    for share, reached in ((0.98, True), (1.02, False)):
        curvature = share * STRONGEST_CURVATURE
        manifold = kind(3, curvature=curvature, clip_distance=None)
        points = manifold.from_features(far)
        assert bool(manifold.relative_similarity(points, points)[0, 1] <= 0) is reached
        with mpmath.workdps(60):
            root, border = mpmath.sqrt(-mpmath.mpf(curvature)), 2 * mpmath.atanh(1 - mpmath.mpf("4e-3"))
            longest = mpmath.acosh(mpmath.cosh(border) ** 2) / root
            unrelated = mpmath.acosh(mpmath.cosh(root * UNRELATED_RADIUS) ** 2) / root
        assert (longest >= unrelated) is reached
        assert float(manifold.distance(points, points)[0, 1]) == pytest.approx(float(longest), rel=1e-4)
        if reached:
            ProxyAnchor(manifold, 4)
        else:
            with pytest.raises(ValueError, match=r"ProxyAnchor: curvature got -9.84.*, expected -9.6 or weaker"):
                ProxyAnchor(manifold, 4)
        Triplet(manifold)  # compares distances with each other


@pytest.mark.parametrize("curvature", [-1e3, -1e6, -1e12])
def test_it_is_finite_where_points_cannot_be_so_far_apart(curvature: float):
    assert 0 < float(Lorentz(3, curvature=curvature).unrelated_distance()) < 2 * UNRELATED_RADIUS


def test_elsewhere_it_is_that_of_orthogonal_vectors():
    assert Euclidean(3).unrelated_distance() == pytest.approx(at_right_angles(Euclidean(3), UNRELATED_RADIUS).item())
    chord, arc = Sphere(3, similarity="negative_distance"), Sphere(3, metric="arc", similarity="negative_distance")
    for sphere, expected in ((chord, sqrt(2)), (arc, pi / 2)):
        assert sphere.unrelated_distance() == pytest.approx(at_right_angles(sphere, 1).item(), rel=1e-9)
        assert sphere.unrelated_distance() == pytest.approx(expected, rel=1e-12)
        axes = torch.eye(3)
        torch.testing.assert_close(sphere.relative_similarity(axes, axes), axes, rtol=0, atol=1e-6)


def test_points_between_antipodes_have_a_finite_gradient():
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype, requires_grad=True)
        distance = Sphere(2, metric="arc").distance(x, -x.detach())
        (gradient,) = torch.autograd.grad(distance.sum(), x)
        assert gradient.isfinite().all()
        assert distance.diagonal().tolist() == pytest.approx([pi, pi], abs=3 * torch.finfo(dtype).eps ** 0.25)


def test_what_a_manifold_without_words_of_its_own_says_of_a_point():
    """A plug-in's: half as long again as a point is 0.5 of its size off."""
    words = Manifold.describe_off(Sphere(3), torch.tensor([1.5, 0.0, 0.0]))
    assert words == "it is 0.5 of its size off the Sphere manifold"


def test_new_proxies_have_length_1_on_average():
    assert Euclidean(100).new_proxies(1000).norm(dim=1).mean().item() == pytest.approx(1, abs=0.02)


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
        return manifold.distance(points, points), manifold.relative_similarity(points, points), value, given.grad

    for ours, theirs in zip(seen(flat), seen(bent), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_optimizers_get_the_inner_product_of_each_point():
    x, u, v = (features(4, seed=seed).view(2, 2, 5) for seed in range(3))
    torch.testing.assert_close(Euclidean(5).geometry.inner(x, u, v), (u * v).sum(-1))


def test_proxies_are_clipped_like_features():
    plane = Euclidean.Config(clip_distance=0.5).build(5)
    proxies = plane.new_proxies(50)
    assert proxies.norm(dim=1).max() > 0.5
    assert plane.proxy_points(proxies).norm(dim=1).max() <= 0.5 + 1e-6


def features_unit() -> torch.Tensor:
    """Of every length: zero, below and above epsilon."""
    lengths = torch.tensor([0.0, 1e-9, 1e-5, 1.0, 1e4], dtype=torch.float64)
    directions = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (directions * lengths[:, None]).requires_grad_()


def test_value_and_gradient_are_those_of_normalize():
    x = features_unit()
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = [unit_vectors(x), normalize(x, dim=-1, eps=1e-6)]
    gradients = [torch.autograd.grad(value, x, weights)[0] for value in values]
    torch.testing.assert_close(values[0], values[1], rtol=1e-14, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)


def test_finite_differences_of_the_gradient_and_of_its_gradient():
    x = features_unit()[3:].detach().requires_grad_()
    torch.autograd.gradcheck(unit_vectors, x)
    torch.autograd.gradgradcheck(unit_vectors, x)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7)])
def test_any_leading_shape_and_vmap(shape: tuple[int, ...]):
    x = torch.randn(shape, requires_grad=True)
    torch.testing.assert_close(unit_vectors(x), normalize(x, dim=-1))
    stack = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(unit_vectors)(stack), normalize(stack, dim=-1))


@pytest.mark.parametrize("length", [1.0, 1e-3, 1e-8, 0.0, 1e6])
def test_cosines_and_their_gradients_are_those_with_normalized_vectors(length: float):
    torch.manual_seed(0)
    x, vectors = (torch.randn(n, 5, dtype=torch.float64) for n in (4, 7))
    vectors[:3] *= length
    weights = torch.randn(4, 7, dtype=torch.float64)
    cosines = Cosines(x.requires_grad_(), vectors.requires_grad_())
    assert not cosines.values.requires_grad  # it builds no graph
    of_vectors = torch.empty_like(vectors)
    values = cosines.values.clone()
    of_x = cosines.pull_back(weights, of_vectors)
    expected = x @ normalize(vectors, dim=1, eps=1e-6).T
    torch.testing.assert_close(values, expected.detach())
    gradients = torch.autograd.grad((expected * weights).sum(), (x, vectors))
    torch.testing.assert_close((of_x, of_vectors), gradients, rtol=1e-9, atol=1e-9)


def test_inner_products_of_a_set_with_itself():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 5, dtype=torch.float64)  # not symmetric

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return (weight * inner_products(x).sin()).sum()

    assert torch.equal(inner_products(x), x @ x.T)
    assert gradcheck(weighted, x) and gradgradcheck(weighted, x)
    separate = torch.autograd.grad((weight * (x @ x.T).sin()).sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(weighted(x), x)[0], separate)


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


@pytest.mark.parametrize("kind", [Euclidean, Poincare, Lorentz])
def test_where_points_are_clipped_before_they_are_unrelated_a_loss_with_a_margin_is_refused(kind: Any):
    """As the similarity of the points farthest out says, at right angles; so it is on a factor of a product."""
    far = 1e4 * torch.eye(2, 3)
    for longest, reached in ((1.9, False), (2.1, True)):
        manifold, factor = kind(3, clip_distance=longest), kind.Config(clip_distance=longest)
        product = Product(6, factors=(factor, Sphere.Config()))
        points = manifold.from_features(far)
        assert bool(manifold.relative_similarity(points, points)[0, 1] <= 0) is reached
        whole = product.from_features(torch.cat([far, torch.eye(2, 3)], 1))
        assert bool(product.relative_similarity(whole, whole)[0, 1] <= 0) is reached
        for space, key in ((manifold, "clip_distance"), (product, "factors.0.clip_distance")):
            if reached:
                ProxyAnchor(space, 4)
            else:
                with pytest.raises(ValueError, match=rf"^ProxyAnchor: {key} got 1.9, expected at least 2: points"):
                    ProxyAnchor(space, 4)
        Triplet(manifold)  # compares distances with each other
