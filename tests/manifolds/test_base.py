"""What two unrelated points are apart, against geometry done by hand."""

from math import pi, sqrt

import mpmath
import pytest
import torch
from torch import Tensor

from dmlkit.losses import ProxyAnchor, Triplet
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import UNRELATED_RADIUS, Manifold
from dmlkit.manifolds.hyperbolic import strongest_curvature


def at_right_angles(manifold: Manifold, features_length: float) -> Tensor:
    points = manifold.from_features(features_length * torch.eye(3, manifold.dim, dtype=torch.float64))
    return manifold.paired_distance(points[0], points[1])


@pytest.mark.parametrize("curvature", [-1e-8, -0.1, -1.0, -4.0])
@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_in_hyperbolic_space_it_is_the_side_of_a_right_angled_triangle(
    kind: type[Poincare | Lorentz], curvature: float
):
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
    strongest = strongest_curvature(UNRELATED_RADIUS)
    far = 1e4 * torch.eye(2, 3)
    for share, reached in ((0.98, True), (1.02, False)):
        manifold = kind(3, curvature=share * strongest, clip_distance=None)
        points = manifold.from_features(far)
        assert bool(manifold.relative_similarity(points, points)[0, 1] <= 0) is reached
        with mpmath.workdps(60):
            root, border = mpmath.sqrt(-mpmath.mpf(share * strongest)), 2 * mpmath.atanh(1 - mpmath.mpf("4e-3"))
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
    manifold = Lorentz(3, curvature=curvature)
    assert 0 < float(manifold.unrelated_distance()) < 2 * UNRELATED_RADIUS


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
    told = Manifold.describe_off(Sphere(3), torch.tensor([1.5, 0.0, 0.0]))
    assert told == "it is 0.5 of its size off the Sphere manifold"


def test_a_learned_curvature_moves_it():
    manifold = Poincare(3, learnable_curvature=True)
    (parameter,) = manifold.parameters()
    (gradient,) = torch.autograd.grad(torch.as_tensor(manifold.unrelated_distance()), parameter)
    assert gradient.isfinite() and gradient != 0


def test_new_proxies_have_length_1_on_average():
    lengths = Euclidean(100).new_proxies(1000).norm(dim=1)
    assert lengths.mean().item() == pytest.approx(1, abs=0.02)
