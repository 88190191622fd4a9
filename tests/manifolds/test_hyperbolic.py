"""Hyperbolic space against mpmath, geoopt and itself in the other model."""

import geoopt
import mpmath
import pytest
import torch
from torch import Tensor

from dmlkit.manifolds import Euclidean, Lorentz, Poincare
from dmlkit.manifolds._sheet import Sheet
from dmlkit.manifolds.base import Manifold

CURVATURES = (-0.1, -1.0, -4.0)
MODELS = (Poincare, Lorentz)


def to_ball(points: Tensor, curvature: Tensor) -> Tensor:
    """Stereographic projection of the hyperboloid from (-1 / sqrt(-K), 0): an isometry."""
    return points[:, 1:] / (1 + (-curvature).sqrt() * points[:, :1])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_distance(x: Tensor, y: Tensor, curvature: float) -> float:
    """arcosh(1 + 2c|x-y|^2 / ((1-c|x|^2)(1-c|y|^2))) / sqrt(c) in the ball, with 60 digits."""
    with mpmath.workdps(60):
        c = -mpmath.mpf(curvature)
        first, second = ([mpmath.mpf(value) for value in row.tolist()] for row in (x, y))
        difference = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
        shrink = (1 - c * sum(a * a for a in first)) * (1 - c * sum(b * b for b in second))
        return float(mpmath.acosh(1 + 2 * c * difference / shrink) / mpmath.sqrt(c))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_ball_agrees_with_mpmath(curvature: float):
    ball = Poincare(3, curvature=curvature, clip_distance=None).double()
    exact_curvature = ball.curvature.item()
    x = ball.from_features(random(6, 3) * torch.logspace(-3, 1, 6, dtype=torch.float64)[:, None])
    y = ball.from_features(random(6, 3, seed=1))
    expected = torch.tensor([[exact_distance(a, b, exact_curvature) for b in y] for a in x], dtype=torch.float64)
    assert torch.allclose(ball.distance(x, y), expected, rtol=1e-9)
    assert torch.allclose(ball.paired_distance(x[:, None], y), expected, rtol=1e-11)


@pytest.mark.parametrize("gap", [1e-7, 1e-3, 0.1])
def test_paired_distance_tells_neighbours_at_the_boundary_apart_in_float32(gap: float):
    ball = Poincare(2, clip_distance=None)
    x = torch.tensor([0.996, 0.0])
    for y in (x + torch.tensor([0.0, gap * 0.01]), x - torch.tensor([gap, 0.0])):
        y64 = y.double()
        assert ball.paired_distance(x, y).item() == pytest.approx(exact_distance(x.double(), y64, -1.0), rel=1e-6)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_exponential_map_agrees_with_mpmath(curvature: float):
    vector = [0.3, -0.4]
    for model in (Poincare, Lorentz):
        manifold = model(2, curvature=curvature, clip_distance=None).double()
        length = mpmath.sqrt(-mpmath.mpf(manifold.curvature.item())) * 0.5
        coordinate = mpmath.tanh(length / 2) if model is Poincare else mpmath.sinh(length)
        expected = [float(coordinate / length * value) for value in vector]
        point = manifold.from_features(torch.tensor([vector], dtype=torch.float64))[0, -2:]
        assert torch.allclose(point, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_both_models_agree_with_geoopt(curvature: float):
    x, y = 0.2 * random(20, 4), 0.2 * random(20, 4, seed=1)  # geoopt's artanh stops at 1 - 1e-7, also in float64
    ball = Poincare(4, curvature=curvature).double()
    points = ball.from_features(x), ball.from_features(y)
    plane = geoopt.PoincareBall(c=torch.tensor(-curvature, dtype=torch.float64))
    assert torch.allclose(points[0], plane.expmap0(x / 2))  # its tangent vectors are 2|v| long
    theirs = plane.dist(*points)
    assert torch.allclose(ball.distance(*points).diagonal(), theirs, atol=1e-6)

    sheet = Lorentz(4, curvature=curvature).double()
    points = sheet.from_features(x), sheet.from_features(y)
    theirs = geoopt.Lorentz(k=torch.tensor(-1 / curvature, dtype=torch.float64)).dist(*points)
    assert torch.allclose(sheet.distance(*points).diagonal(), theirs, atol=1e-6)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_two_models_are_isometric(curvature: float):
    sheet, ball = (model(5, curvature=curvature, clip_distance=None).double() for model in (Lorentz, Poincare))
    x, y = sheet.from_features(random(15, 5)), sheet.from_features(random(17, 5, seed=1))
    x_ball, y_ball = to_ball(x, sheet.curvature), to_ball(y, sheet.curvature)
    assert torch.allclose(sheet.distance(x, y), ball.distance(x_ball, y_ball), atol=1e-6)
    cosines = [model(5, curvature=curvature, similarity="origin_cosine") for model in (Lorentz, Poincare)]
    assert torch.allclose(cosines[0].similarity(x, y), cosines[1].similarity(x_ball, y_ball), atol=1e-12)
    assert torch.allclose(to_ball(x, sheet.curvature), ball.from_features(random(15, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_space_is_the_limit(dtype: torch.dtype):
    x, y = random(12, 5).to(dtype), random(14, 5, seed=1).to(dtype)
    flat = Euclidean(5).distance(x, y)
    for model in (Poincare, Lorentz):
        errors: list[float] = []
        for curvature in (-1e-2, -1e-4, -1e-6):
            manifold = model(5, curvature=curvature, clip_distance=None).to(dtype)
            bent = manifold.distance(manifold.from_features(x), manifold.from_features(y))
            errors.append(((bent - flat).abs() / flat).max().item())
        assert errors[1] < 0.05 * errors[0] and errors[2] < 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_cosine_of_the_log_maps_is_the_feature_cosine_after_the_exponential_map_alone(model: type[Manifold]):
    """log0(exp0(v)) = v: the Grouplet similarity without a Möbius layer is the Euclidean cosine."""
    manifold = model(8, similarity="origin_cosine", clip_distance=None).double()
    x, y = random(10, 8), random(11, 8, seed=1)
    cosines = torch.cosine_similarity(x[:, None], y, dim=-1)
    assert torch.allclose(manifold.similarity(manifold.from_features(x), manifold.from_features(y)), cosines)
    assert torch.allclose(Euclidean(8, similarity="cosine").similarity(x, y), cosines)


@pytest.mark.parametrize("model", MODELS)
def test_clipping_shortens_features_and_nothing_else(model: type[Manifold]):
    clipped, free = model(3, clip_distance=1.5), model(3, clip_distance=None)
    short = torch.tensor([[1.0, 0.5, 0.0]])
    assert torch.equal(clipped.from_features(short), free.from_features(short))
    assert torch.allclose(clipped.from_features(short * 100), free.from_features(1.5 * short / short.norm()))


@pytest.mark.parametrize("model", MODELS)
def test_huge_features_stay_inside(model: type[Manifold]):
    points = model(3, clip_distance=None).from_features(1e6 * random(20, 3).float())
    assert points.isfinite().all()
    radius = points.norm(dim=1) if model is Poincare else to_ball(points, torch.tensor(-1.0)).norm(dim=1)
    assert (radius <= 0.99601).all()


@pytest.mark.parametrize("curvature", CURVATURES)
def test_what_is_moved_beyond_the_border_of_float32_ends_there(curvature: float):
    """Both models move a point at the origin as their exponential map does: 2 artanh(1 - 4e-3) / sqrt(-K) at most."""
    longest = float(2 * mpmath.atanh(1 - mpmath.mpf("4e-3"))) / (-curvature) ** 0.5
    far = 1e4 * torch.eye(3)
    for model in MODELS:
        manifold = model(3, curvature=curvature, clip_distance=None)
        origin = manifold.from_features(torch.zeros(3, 3))
        moved = manifold.translate(origin, far)
        torch.testing.assert_close(moved, manifold.from_features(far), rtol=1e-5, atol=1e-6)
        reached = manifold.paired_distance(origin, manifold.translate(moved, far))
        torch.testing.assert_close(reached, torch.full((3,), longest), rtol=1e-3, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_each_point_is_moved_by_its_own_vector(model: type[Manifold]):
    manifold = model(3, curvature=-0.7).double()
    points, vectors = manifold.from_features(random(6, 3)), random(6, 3, seed=1)
    alone = [manifold.translate(point, vector) for point, vector in zip(points, vectors, strict=True)]
    torch.testing.assert_close(manifold.translate(points, vectors), torch.stack(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_vectors_for_an_index_are_rounded_once(model: type[Poincare | Lorentz]):
    """The lift of float32 points, by its closed form in float64, rounded: many sums in float32 would be 2 units off."""
    manifold = model(64, curvature=-0.3, clip_distance=None)
    points = manifold.from_features(random(200, 64).float())
    x, c = points.double(), -manifold.curvature.double()
    if model is Lorentz:
        space = x[:, 1:]
        height = (1 / c + space.square().sum(1)).sqrt() - 1 / c.sqrt()
    else:
        shrink = 1 - c * x.square().sum(1, keepdim=True)
        space, height = 2 * x / shrink, (2 * c.sqrt() * x.square().sum(1, keepdim=True) / shrink)[:, 0]
    for side, time in (("query", -height - 1 / c.sqrt()), ("gallery", height)):
        expected = torch.cat([time[:, None], space], 1).float()
        torch.testing.assert_close(manifold.distance_vectors(points, side), expected, rtol=6e-8, atol=0)  # half a unit


@pytest.mark.parametrize("model", MODELS)
def test_a_learned_curvature_stays_negative_and_everything_follows_it(model: type[Manifold]):
    manifold = model(4, curvature=-0.05, learnable_curvature=True, proxies="points")
    proxies = manifold.new_proxies(6)
    features = random(5, 4).float()
    optimizer = torch.optim.SGD(manifold.parameters(), lr=10.0)
    for direction in (1, -1):  # towards flat, then far past the first ball's radius
        for _ in range(5):
            optimizer.zero_grad()
            (direction * manifold.curvature).neg().backward()
            optimizer.step()
            assert manifold.curvature < 0
    fixed = model(4, curvature=manifold.curvature.item())
    moved = manifold.proxy_points(proxies)
    assert fixed.geometry.check_point_on_manifold(moved.detach(), atol=1e-4, rtol=1e-4)
    x, y = manifold.from_features(features), fixed.from_features(features)
    assert torch.allclose(x, y, rtol=1e-5)
    for side in ("query", "gallery"):
        assert torch.allclose(manifold.index_vectors(x, side), fixed.index_vectors(y, side), rtol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_a_learnable_curvature_has_the_gradient_of_finite_differences(model: type[Manifold]):
    manifold = model(4, curvature=-0.7, learnable_curvature=True).double()
    (exponent,) = manifold.parameters()
    x, y = random(4, 4), random(5, 4, seed=1)

    def total(value: Tensor) -> Tensor:
        with torch.no_grad():
            exponent.copy_(value)
        return manifold.similarity(manifold.from_features(x), manifold.from_features(y)).square().sum()

    at = exponent.detach().clone()
    (gradient,) = torch.autograd.grad(total(at), exponent)
    expected = (total(at + 1e-6) - total(at - 1e-6)) / 2e-6
    assert gradient.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("optimizer", "lr"), [(geoopt.optim.RiemannianAdam, 0.02), (geoopt.optim.RiemannianSGD, 0.5)])
def test_points_stay_on_the_manifold_for_3_000_float32_steps(model: type[Manifold], optimizer: type, lr: float):
    """Half of the steps go outwards to the boundary, the others anywhere."""
    torch.manual_seed(0)
    manifold = model(4, proxies="points", clip_distance=None)
    proxies = manifold.new_proxies(8)
    outwards = -torch.nn.functional.normalize(manifold.from_features(torch.randn(8, 4)), dim=1)
    steps, origin, farthest = optimizer([proxies], lr=lr), manifold.from_features(torch.zeros(1, 4)), 0.0
    for step in range(3_000):
        proxies.grad = outwards.clone() if step < 1_500 else torch.randn_like(proxies)
        steps.step()
        if step % 250 == 249:
            assert proxies.isfinite().all()
            assert manifold.geometry.check_point_on_manifold(proxies.data, atol=1e-5, rtol=1e-5)
            farthest = max(farthest, manifold.distance(origin, proxies.detach()).max().item())
    assert farthest > 6.0  # the border of float32, 6.2, was reached


def test_sheet_agrees_with_geoopt_in_float64():
    ours, theirs = Sheet(k=2.0).double(), geoopt.Lorentz(k=2.0).double()
    x, y = (theirs.expmap0(torch.cat([torch.zeros(9, 1), random(9, 4, seed=seed)], 1)) for seed in (0, 1))
    u, v = theirs.proju(x, random(9, 5, seed=2)), theirs.proju(x, random(9, 5, seed=3))
    assert torch.allclose(ours.egrad2rgrad(x, u), theirs.egrad2rgrad(x, u.clone()))
    assert torch.allclose(ours.inner(x, u, v), theirs.inner(x, u, v))
    assert torch.allclose(ours.expmap(x, u), theirs.expmap(x, u))
    assert torch.allclose(ours.transp(x, y, u), theirs.transp(x, y, u))


@pytest.mark.parametrize("k", [0.5, 2.0])
def test_a_projection_onto_the_sheet_keeps_what_is_near_and_shortens_what_is_far(k: float):
    """The space coordinates of points at most `farthest` sqrt(k) from the origin stay; x_0 follows from them."""
    space = random(8, 3).float() * torch.logspace(-2, 4, 8)[:, None]
    found = Sheet(k=k).projx(torch.cat([torch.full((8, 1), 7.0), space], 1)).double()
    longest = k**0.5 * float(mpmath.sinh(2 * mpmath.atanh(1 - 4e-3)))
    lengths = space.double().norm(dim=1, keepdim=True)
    expected = space.double() * torch.where(lengths > longest, longest / lengths, 1)
    assert (lengths > longest).any() and (lengths < longest).any()
    torch.testing.assert_close(found[:, 1:], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[:, 0], (k + expected.square().sum(1)).sqrt(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curvature": 0.0}, "curvature: got 0.0, expected less than 0"),
        ({"curvature": float("nan")}, "curvature: got nan, expected"),
        ({"clip_distance": 0.0}, "clip_distance: got 0.0, expected greater than 0"),
    ],
)
def test_impossible_options_are_refused(model: type[Manifold], options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        model(4, **options)
